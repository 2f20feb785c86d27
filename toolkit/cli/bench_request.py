"""Options that say what to measure, and the request they make: the same for `bench run` and `bench longrun`."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from toolkit.bench.request import Request

_COUNT = click.IntRange(min=0)
_POSITIVE = click.IntRange(min=1)

_OPTIONS: list[Callable[[Any], Any]] = [
    click.argument("model", type=click.Path(path_type=Path)),
    click.option("--arms", default="stock,off,madv,hint", show_default=True, help="Names; the first is the baseline."),
    click.option(
        "--arm",
        "custom",
        nargs=3,
        multiple=True,
        metavar="NAME WHEEL ENV",
        help="One more arm: a wheel with KEY=VALUE,… for its environment ('' for none).",
    ),
    click.option("--budget", metavar="SIZE", help="Memory of each run, such as 2.5GiB.  [default: no limit]"),
    click.option("--oversubscribe", type=click.FloatRange(min=1.0, min_open=True), help="Budget = model size / this."),
    click.option("-p", "--n-prompt", type=_COUNT, default=64, show_default=True, help="Prefill tokens."),
    click.option("-n", "--n-gen", type=_COUNT, default=48, show_default=True, help="Decode tokens."),
    click.option("-d", "--n-depth", type=_COUNT, default=0, help="Context before the tests, not timed.  [default: 0]"),
    click.option("--n-ctx", type=_POSITIVE, help="Size of the context.  [default: what the tokens need]"),
    click.option("-t", "--threads", "n_threads", type=_POSITIVE, help="Threads.  [default: all usable cores]"),
    click.option("-b", "--batch-size", "n_batch", type=_POSITIVE, default=2048, show_default=True),
    click.option("-ub", "--ubatch-size", "n_ubatch", type=_POSITIVE, default=512, show_default=True),
    click.option("-ngl", "--n-gpu-layers", type=_COUNT, default=0, help="Layers on a GPU, without experts."),
    click.option(
        "--lazy-mode",
        type=click.Choice(["off", "auto", "on"]),
        help="Row-sparse tables: in memory, by the row if large, by the row.  [default: llama.cpp's]",
    ),
    click.option("--backend", default="cpu", show_default=True, help="Backend of the wheels behind the arms' names."),
    click.option("--prompt", "prompt_file", type=click.Path(path_type=Path, exists=True), help="Text to force."),
    click.option("--timeline", is_flag=True, help="Keep where the time of each layer went (patched arms)."),
    click.option("--series", is_flag=True, help="Keep disk, GPU, memory and clock over the time of each test."),
    click.option(
        "--trace",
        type=click.Path(path_type=Path, dir_okay=False),
        help="File for the experts that each token selects in the check: .npz or .moetrace.",
    ),
    click.option("--warm", is_flag=True, help="Leave the page cache as it is instead of evicting the model."),
    click.option(
        "--out", type=click.Path(path_type=Path, dir_okay=False), help="Results file; an unfinished one continues."
    ),
    click.option(
        "--rpc", metavar="HOST:PORT,…", default="", help="One more arm, rpc: its layers are on these servers."
    ),
    click.option("--sdist", metavar="VERSION", help="Arms of another pinned llama-cpp-python than the one in use."),
    click.option("--dry-run", is_flag=True, help="Print the plan; measure nothing."),
]


class MeasuringCommand(click.Command):
    """Keeps the words that it was called with, for the header of the results file."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        words = ["moe-madv", *ctx.command_path.split()[1:], *map(_without_folders, args)]
        ctx.meta[__name__] = shlex.join(words)
        return super().parse_args(ctx, args)


def _without_folders(word: str) -> str:
    """A word of a command line with its paths as results show them: names alone, also in NAME=PATH,NAME=PATH."""
    from toolkit.model.text import shown

    short = shown(re.sub("[^=,]*/(?=[^/=,])", "", word))
    return f"./{short}" if short.startswith("-") and not word.startswith("-") else short


class _Slowdown(click.ParamType):
    """ARM=PERCENT, such as stock-2=10 or stock-2=10%."""

    name = "slowdown"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, float]:
        arm, _, size = str(value).rpartition("=")
        try:
            percent = float(size.strip().removesuffix("%"))
        except ValueError:
            percent = 0.0
        if not arm or not 0 < percent < math.inf:
            self.fail(f"{value!r} is not an arm and a percentage, such as stock-2=10%", param, ctx)
        return arm, percent


SLOWDOWN = _Slowdown()


def what_to_measure(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options, above those of the command itself."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def make_request(given: dict[str, Any], **conditions: Any) -> Request:
    """The request of these options, `--dry-run` apart; `conditions` are those that the command itself asks for."""
    from toolkit.bench.plan import STOCK, Conditions
    from toolkit.bench.request import Request

    if given["budget"] is not None and given["oversubscribe"] is not None:
        raise click.UsageError("--budget and --oversubscribe exclude each other")
    if given["n_prompt"] + given["n_gen"] == 0:
        raise click.UsageError("nothing to measure: -p and -n are both 0")
    if given["trace"] is not None and given["n_gen"] == 0:
        raise click.UsageError("--trace needs decoded tokens: -n 1 or more")
    for name in ("n_threads", "n_batch", "n_ubatch", "n_ctx", "n_gpu_layers", "lazy_mode", "timeline", "series"):
        conditions[name] = given.pop(name)
    conditions["cold"] = not given.pop("warm")
    ctx = click.get_current_context()
    given["command"] = ctx.meta.get(__name__)
    if given.get("aa") and ctx.get_parameter_source("arms") is click.core.ParameterSource.DEFAULT:
        given["arms"] = STOCK
    for name in ("arms", "rpc"):
        given[name] = tuple(word.strip() for word in given[name].split(",") if word.strip())
    given["custom"] = tuple(
        (name, Path(whl), tuple(filter(None, env.split(",")))) for name, whl, env in given["custom"]
    )
    return Request(conditions=Conditions(**conditions), **given)
