"""The doctor's visit: observe, measure, judge."""

from __future__ import annotations

from pathlib import Path

from toolkit import config
from toolkit.doctor import observe
from toolkit.doctor.predict import predict
from toolkit.doctor.report import Report
from toolkit.doctor.rules import findings
from toolkit.model.layout import ModelLayout


def diagnose(
    layout: ModelLayout | None, *, budget: int | None = None, read_disk: bool = True, root: Path = Path("/")
) -> Report:
    """Examine the machine and the disk under the model (without one: under the toolkit's cache folder)."""
    path = _place(layout)
    settings = observe.settings(path, _parts(layout), root=root)
    measured = observe.measured(path, settings.facts.storage.device, read_disk=read_disk, root=root)
    return _judged(layout, budget, settings, measured)


def again(report: Report, layout: ModelLayout | None, *, budget: int | None = None) -> Report:
    """Look at the settings once more, after changes; what was measured stays."""
    settings = observe.settings(report.settings.path, _parts(layout), root=report.settings.root)
    return _judged(layout, budget, settings, report.measured)


def _judged(
    layout: ModelLayout | None, budget: int | None, settings: observe.Settings, measured: observe.Measured
) -> Report:
    prediction = None
    if layout is not None:
        memory = min(settings.available.bytes, budget or settings.available.bytes)
        prediction = predict(layout, memory, measured.speeds, measured.memory_mib_s)
    model = None if layout is None else str(layout.shards[0].path)
    return Report(
        settings=settings,
        measured=measured,
        prediction=prediction,
        findings=tuple(findings(settings, measured, prediction, model)),
    )


def _place(layout: ModelLayout | None) -> Path:
    if layout is None:
        return config.home()
    return max(_parts(layout), key=lambda path: path.stat().st_size)


def _parts(layout: ModelLayout | None) -> list[Path]:
    return [] if layout is None else [shard.path for shard in layout.shards]
