"""The one way the toolkit runs another program."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

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
    # Undecodable bytes in a compiler's output must not end the build, so they are replaced.
    text = {"encoding": "utf-8", "errors": "replace"}
    try:
        if log is None:
            done = subprocess.run(args, cwd=cwd, env=full_env, input=stdin, capture_output=True, check=False, **text)
            tail = (done.stderr or "") + (done.stdout or "")
        else:
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("w", encoding="utf-8") as f:
                f.write(f"+ {shown}\n")
                f.flush()
                done = subprocess.run(
                    args, cwd=cwd, env=full_env, input=stdin, stdout=f, stderr=subprocess.STDOUT, check=False, **text
                )
            done.stdout = done.stderr = ""
            tail = log.read_text(encoding="utf-8", errors="replace") if done.returncode else ""
    except OSError as e:
        raise CommandError(f"cannot run {args[0]}: {e.strerror}", where=shown) from e
    if check and done.returncode != 0:
        last = "\n".join(tail.strip().splitlines()[-_TAIL_LINES:])
        hint = f"read the whole log: {log}" if log else None
        raise CommandError(f"command failed with exit code {done.returncode}:\n{last}", where=shown, hint=hint)
    return done
