"""SVG to PNG by a converter that is installed."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from toolkit import process
from toolkit.errors import MachineError
from toolkit.files import atomic_path

_SCALE = "2"  # two pixels per unit, for dense screens and print

# Program and its arguments for {svg} and {png}, the one nearest to a browser's drawing first.
_CONVERTERS = {
    "rsvg-convert": ("--zoom", _SCALE, "--format", "png", "--output", "{png}", "{svg}"),
    "inkscape": ("--export-type=png", f"--export-dpi={96 * int(_SCALE)}", "--export-filename={png}", "{svg}"),
    "cairosvg": ("--scale", _SCALE, "--format", "png", "--output", "{png}", "{svg}"),
}


def write(out: Path, svg: str) -> None:
    """Write `svg` as PNG, atomically; MachineError when no converter is installed."""
    found = next((name for name in _CONVERTERS if shutil.which(name)), None)
    if found is None:
        raise MachineError(
            "no program that turns SVG into PNG is installed",
            where=out,
            hint="install librsvg2-bin (rsvg-convert), inkscape or the Python package cairosvg, or write an .svg",
        )
    with tempfile.TemporaryDirectory(prefix="moe-madv-png-") as folder, atomic_path(out) as partial:
        source, target = Path(folder) / "chart.svg", Path(folder) / "chart.png"
        source.write_text(svg, encoding="utf-8")
        process.run([found, *(arg.format(svg=source, png=target) for arg in _CONVERTERS[found])])
        shutil.copyfile(target, partial)
