"""The payload's settings as data: patches/knobs.toml."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from toolkit.errors import PinError
from toolkit.patch.upstream import read_toml


@dataclass(frozen=True, kw_only=True)
class Knob:
    """One field of struct ggml_moe_prefetch_params."""

    name: str
    variable: str  # environment variable that sets it when a process starts
    unit: str
    default: str
    effect: str  # what was measured


def load_knobs(patches: Path) -> list[Knob]:
    """All settings in the order of the struct; raises PinError for a file that is no such list."""
    path = patches / "knobs.toml"
    try:
        return [Knob(**entry) for entry in read_toml(path)["knob"]]
    except (KeyError, TypeError) as e:
        raise PinError(f"not a list of [[knob]] with {', '.join(Knob.__annotations__)}: {e}", where=path) from e
