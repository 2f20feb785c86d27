"""Running a build of minutes: a whole log, progress from ninja, and an early stop on bad options."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from toolkit.console import err, note
from toolkit.errors import BuildError, CommandError

_NINJA = re.compile(r"^\[(\d+)/(\d+)\]")
_UNUSED = "Manually-specified variables were not used by the project:"
_TAIL_LINES = 30


def unused_defines(log: Iterable[str]) -> tuple[str, ...]:
    """Options cmake was given and no CMakeLists.txt has read, from its log."""
    names: list[str] = []
    listing = False
    for line in log:
        if _UNUSED in line:
            listing = True
        elif listing and line.strip():
            if not line.startswith("    "):
                listing = False
            else:
                names.append(line.strip())
    return tuple(names)


def position(line: str) -> tuple[int, int] | None:
    """(done, total) of a progress line of ninja, None for another line."""
    match = _NINJA.match(line)
    return (int(match[1]), int(match[2])) if match else None


def compile_with_progress(argv: Sequence[str], *, env: Mapping[str, str], log: Path, label: str) -> None:
    """Run a build to its end with exactly the environment `env`; everything it prints goes to `log`.

    Raises BuildError at configure time for an option that does nothing, CommandError with the last lines
    when the build fails. An interrupt ends the whole process group, so ninja can continue later.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    lines: list[str] = []
    with log.open("w", encoding="utf-8") as f, _progress(label) as advance, _started(argv, env) as process:
        f.write(f"+ {shlex.join(argv)}\n")
        assert process.stdout is not None
        configured = False
        largest = 0
        for line in process.stdout:
            f.write(line)
            lines.append(line)
            if step := position(line):
                if not configured and (unused := unused_defines(lines)):
                    raise BuildError(
                        f"cmake does not know {', '.join(unused)}: the build would ignore it",
                        where=log,
                        hint="correct or remove the option (see CMAKE_ARGS in the environment)",
                    )
                configured = True
                largest = max(largest, step[1])
                if step[1] * 2 > largest:  # else of a build inside the build, such as that of Vulkan's shaders
                    advance(*step)
        code = process.wait()
    if code != 0:
        tail = "".join(lines[-_TAIL_LINES:]).rstrip()
        raise CommandError(
            f"the build failed with exit code {code}:\n{tail}",
            where=shlex.join(argv),
            hint=f"read the whole log: {log}",
        )


@contextlib.contextmanager
def _started(argv: Sequence[str], env: Mapping[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A child in a process group of its own, which is ended when the body fails."""
    try:
        process = subprocess.Popen(
            list(argv),
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            start_new_session=os.name == "posix",
        )
    except OSError as e:
        raise CommandError(f"cannot run {argv[0]}: {e.strerror}", where=shlex.join(argv)) from e
    with process:
        try:
            yield process
        except BaseException:
            # SIGINT, so that ninja removes the outputs it was in the middle of, as it does for SIGTERM. In the
            # background of a script the others, like this process, ignore SIGINT.
            if os.name == "posix":
                ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM if ignored else signal.SIGINT)
            else:
                process.terminate()
            raise


@contextlib.contextmanager
def _progress(label: str) -> Iterator[Callable[[int, int], None]]:
    """Yields advance(done, total): a bar on a terminal, a line per quarter elsewhere."""
    if not err.is_terminal:
        reported = 0

        def report(done: int, total: int) -> None:
            nonlocal reported
            if done * 4 // total > reported:
                reported = done * 4 // total
                note(f"{label}: [{done}/{total}]")

        yield report
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True) as progress:
        task = progress.add_task(label, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
