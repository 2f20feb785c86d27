"""The one way the toolkit runs another program to its end, and the one to keep one running."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from toolkit.console import note
from toolkit.errors import CommandError

_TAIL_LINES = 20


def run(
    argv: Sequence[str | Path],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    log: Path | None = None,
    echo: bool = False,
    check: bool = True,
    stdin: str | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end and return it with stdout and stderr as text.

    `env` is added to the current environment. With `log`, both streams go to that file as they come
    (for builds of minutes) and the returned stdout is empty. Raises CommandError with the last lines
    when the command is missing or, with `check`, exits non-zero.
    """
    args = [str(a) for a in argv]
    shown = shlex.join(args)
    if echo:
        note(f"+ {shown}")
    full_env = {**os.environ, **(env or {})}
    capture = subprocess.PIPE
    sink = None
    try:
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
            sink = log.open("w", encoding="utf-8")
            sink.write(f"+ {shown}\n")
            sink.flush()
        # Undecodable bytes in a compiler's output must not end the build, so they are replaced.
        done = subprocess.run(
            args,
            cwd=cwd,
            env=full_env,
            input=stdin,
            stdout=sink or capture,
            stderr=subprocess.STDOUT if sink else capture,
            check=False,
            encoding="utf-8",
            errors="replace",
        )
        if log is None:
            tail = (done.stderr or "") + (done.stdout or "")
        else:
            done.stdout = done.stderr = ""
            tail = log.read_text(encoding="utf-8", errors="replace") if done.returncode else ""
    except OSError as e:
        raise CommandError(f"cannot run {args[0]}: {e.strerror}", where=shown) from e
    finally:
        if sink is not None:
            sink.close()
    if check and done.returncode != 0:
        last = "\n".join(tail.strip().splitlines()[-_TAIL_LINES:])
        hint = f"read the whole log: {log}" if log else None
        raise CommandError(f"command failed with exit code {done.returncode}:\n{last}", where=shown, hint=hint)
    return done


@contextlib.contextmanager
def running(
    argv: Sequence[str], *, env: Mapping[str, str] | None = None, stdout: int | IO[str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A child that ends when we do, also when we are terminated; `env` is all of its environment, None: ours."""

    def leave(number: int, _frame: object) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    process = subprocess.Popen(argv, env=env, stdin=subprocess.DEVNULL, stdout=stdout)
    try:
        yield process
    finally:
        signal.signal(signal.SIGTERM, before)
        process.kill()
        process.wait()
