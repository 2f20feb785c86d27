"""Figures that others have published, each file with its sources: results/published/*.toml."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.errors import ResultsError

tomllib = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")


@dataclass(frozen=True, kw_only=True)
class Published:
    """One experiment: where its figures come from, what they were measured under, and the figures by table."""

    title: str
    url: str | None
    sources: Mapping[str, str]
    conditions: Mapping[str, str]
    figures: Mapping[str, Any]

    @property
    def source(self) -> str:
        """The sources in one line."""
        places = "; ".join(f"{what}: {where}" for what, where in self.sources.items())
        return f"{self.url} ({places})" if self.url else places

    def as_json(self) -> dict[str, Any]:
        """Title, source, conditions and the tables of figures, side by side."""
        return {"title": self.title, "source": self.source, "conditions": dict(self.conditions), **self.figures}


def folder() -> Path:
    """The checkout's results/published, or the copy inside an installed wheel."""
    package = Path(__file__).resolve().parents[1]
    checkout = package.parent / "results" / "published"
    return checkout if checkout.is_dir() else package / "_published"


def load(name: str) -> Published:
    """Read the figures of one experiment; ResultsError when its file is damaged or names no source."""
    path = folder() / f"{name}.toml"
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
        title, sources, conditions = data.pop("title"), data.pop("sources"), data.pop("conditions")
    except (OSError, KeyError, UnicodeDecodeError, tomllib.TOMLDecodeError) as e:
        raise ResultsError(f"not the figures of an experiment: {e!r}", where=path) from e
    if not sources:
        raise ResultsError("figures without a source", where=path, hint="name it under [sources]")
    return Published(title=title, url=data.pop("url", None), sources=sources, conditions=conditions, figures=data)
