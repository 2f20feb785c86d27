"""Every failure a user can meet: one sentence, the place, the next command, and an exit code per family."""

from __future__ import annotations


class ToolkitError(Exception):
    """Base of all expected failures; the command line prints it without a traceback.

    `what` says what is wrong, `where` names the file, URL or field, `hint` is the next command to run.
    """

    exit_code = 1

    def __init__(self, what: str, *, where: object = None, hint: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.where = None if where is None else str(where)
        self.hint = hint

    def __str__(self) -> str:
        lines = [self.what]
        if self.where is not None:
            lines.append(f"  at: {self.where}")
        if self.hint is not None:
            lines.append(f"  next: {self.hint}")
        return "\n".join(lines)


class PinError(ToolkitError):
    """patches/upstream.toml or patches/series.toml is not usable as written."""

    exit_code = 10


class FetchError(ToolkitError):
    """Upstream bytes could not be had, or are not the pinned ones."""

    exit_code = 11


class PatchError(ToolkitError):
    """The series does not apply, or the tree is not one this toolkit made."""

    exit_code = 12


class BuildError(ToolkitError):
    """A wheel could not be built, or is not what its manifest says."""

    exit_code = 13


class ModelError(ToolkitError):
    """A GGUF file is broken, incomplete or not what the command needs."""

    exit_code = 14


class MachineError(ToolkitError):
    """This machine lacks something: a tool, memory, disk space, a permission."""

    exit_code = 15


class BenchError(ToolkitError):
    """A measurement could not be made, or cannot be believed."""

    exit_code = 16


class ResultsError(ToolkitError):
    """A results file cannot be read, or its rows cannot be compared."""

    exit_code = 17


class CommandError(ToolkitError):
    """A child process failed; `where` holds the command, the message the end of what it printed."""

    exit_code = 18
