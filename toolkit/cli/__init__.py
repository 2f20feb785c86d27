"""`moe-madv`: one thin click module per command group; each parses, calls and prints."""

from __future__ import annotations

import importlib
import sys
from typing import NoReturn

import click

from toolkit import __version__
from toolkit.console import err
from toolkit.errors import MachineError, ToolkitError

# name -> module that holds a click command of that name; imported when used, so --help stays fast.
_COMMANDS = {
    "doctor": "toolkit.cli.doctor",
    "fetch": "toolkit.cli.fetch",
    "patch": "toolkit.cli.patch",
    "port": "toolkit.cli.port",
    "build": "toolkit.cli.build",
    "wheels": "toolkit.cli.wheels",
    "rpc": "toolkit.cli.rpc",
    "model": "toolkit.cli.model",
    "bench": "toolkit.cli.bench",
    "serve": "toolkit.cli.serve",
    "reproduce": "toolkit.cli.reproduce",
}


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        module = _COMMANDS.get(name)
        return getattr(importlib.import_module(module), name) if module else None


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="moe-madv")
def cli() -> None:
    """Patch, build and measure llama.cpp for Mixture-of-Experts models larger than memory.

    \b
    Example:
      moe-madv fetch && moe-madv patch apply && moe-madv build --backend cpu --arm both
      moe-madv model synth demo.gguf --preset demo
      moe-madv bench run demo.gguf --oversubscribe 2.7
    """


def main() -> None:
    """Console entry: expected failures become one message on stderr and their family's exit code."""
    try:
        cli.main(prog_name="moe-madv", standalone_mode=False)
    except (click.exceptions.Abort, KeyboardInterrupt):
        err.print("interrupted; run the same command again to continue", markup=False)
        sys.exit(130)
    except click.ClickException as e:
        e.show()
        sys.exit(e.exit_code)
    except OSError as e:
        _fail(
            MachineError(
                e.strerror or str(e),
                where=e.filename,
                hint="check space and permissions there, or set MOE_MADV_HOME to another folder",
            )
        )
    except ToolkitError as e:
        _fail(e)


def _fail(e: ToolkitError) -> NoReturn:
    err.print(f"error: {e}", markup=False, style="bold red" if err.is_terminal else None)
    sys.exit(e.exit_code)
