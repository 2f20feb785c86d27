"""`moe-madv serve`: an arm behind llama-cpp-python's OpenAI server."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import click

from toolkit import config
from toolkit.bench import limits
from toolkit.bench.limits import memory_budget, parse_size
from toolkit.bench.select import arms_by_name
from toolkit.console import note
from toolkit.errors import BenchError, CommandError, MachineError
from toolkit.patch.series import load_series
from toolkit.patch.upstream import load_pin
from toolkit.process import running

_PROGRAM = Path(limits.__file__).with_name("openai_server.py")
_LOOPBACK = ("127.", "localhost")


@click.command()
@click.argument("model", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.argument("options", nargs=-1, metavar="[-- OPTION...]")
@click.option("--arm", "name", default="hint", show_default=True, help="stock, or a mode of the patched build.")
@click.option("--backend", default="cpu", show_default=True, help="Backend of the wheel behind the arm's name.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0: any free one.")
@click.option("--budget", metavar="SIZE", help="Memory limit of the server, such as 2.5GiB.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object when the server is ready.")
def serve(
    model: Path,
    options: tuple[str, ...],
    name: str,
    backend: str,
    host: str,
    port: int,
    budget: str | None,
    as_json: bool,
) -> None:
    """Serve MODEL until interrupted, by llama-cpp-python's OpenAI server in the arm's environment.

    The model stays in its mapping: not repacked, not locked. Words after -- go to the server as they are. Standard
    output gets one line, when requests are answered; GET /moe-madv shows mode and counters.

    \b
    Example:
      moe-madv serve demo.gguf --arm cache --budget 2GiB -- --n_ctx 4096 --n_threads 8
    """
    (arm,) = arms_by_name(
        [name], load_pin(), load_series(config.patches_dir()), config.home(), backend=backend, extra="server"
    )
    if not host.startswith(_LOOPBACK) and "--api_key" not in options:
        note(
            f"warning: whoever can reach {host}:{port} can use this server; ask for a password with -- --api_key SECRET"
        )
    # A file of settings would replace what is asked for here.
    env = {key: value for key, value in os.environ.items() if key != "CONFIG_FILE"} | arm.env
    with memory_budget(parse_size(budget) if budget else None) as limit:
        if budget and limit.nbytes is None:
            raise MachineError(
                "this machine cannot limit the memory of a server",
                where=f"--budget {budget}",
                hint="start it without --budget, or as root",
            )
        command = limit.command([arm.python, "-I", _PROGRAM, host, str(port), model.resolve(), *options])
        with running(command, env=env, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            row = json.loads(process.stdout.readline() or b"{}")
            if "error" in row:
                raise MachineError(row["error"], where="--port", hint="choose another --port, or end what uses it")
            if row and (row["payload"], row["mode"]) != (arm.payload, arm.mode):
                raise BenchError(
                    f"arm {name} runs with payload {row['payload']} in mode {row['mode']}, "
                    f"not {arm.payload} in {arm.mode}",
                    where=arm.python,
                    hint=f"build its wheel again: moe-madv build --backend {backend} --arm both --force",
                )
            if row:
                row |= {
                    "arm": name,
                    "label": arm.label,
                    "budget_bytes": limit.effective(process.pid) if budget else None,
                }
                click.echo(json.dumps(row) if as_json else f"{row['url']} {name} {arm.label}")
            code = process.wait()
    raise CommandError(f"the server ended with exit code {code}", where=" ".join(command))
