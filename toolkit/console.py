"""Text for people goes to stderr; data goes to stdout. NO_COLOR and pipes are respected by rich."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

GIB = 1 << 30
MIB = 1 << 20

err = Console(stderr=True, highlight=False, soft_wrap=True)


def note(text: str) -> None:
    """One line of progress or a remark, on stderr."""
    err.print(text, markup=False)


def byte_progress() -> Progress:
    """A progress bar for bytes, on stderr; silent when stderr is not a terminal."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=err,
        disable=not err.is_terminal,
    )
