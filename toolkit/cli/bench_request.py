"""Options that say what to measure, and the request they make: the same for `bench run` and `bench longrun`."""

from __future__ import annotations

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
    click.option("--backend", default="cpu", show_default=True, help="Backend of the wheels behind the arms' names."),
    click.option("--prompt", "prompt_file", type=click.Path(path_type=Path, exists=True), help="Text to force."),
    click.option("--timeline", is_flag=True, help="Keep where the time of each layer went (patched arms)."),
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


def what_to_measure(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options, above those of the command itself."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def make_request(given: dict[str, Any], **conditions: Any) -> Request:
    """The request of these options, `--dry-run` apart; `conditions` are those that the command itself asks for."""
    from toolkit.bench.plan import Conditions
    from toolkit.bench.request import Request

    if given["budget"] is not None and given["oversubscribe"] is not None:
        raise click.UsageError("--budget and --oversubscribe exclude each other")
    if given["n_prompt"] + given["n_gen"] == 0:
        raise click.UsageError("nothing to measure: -p and -n are both 0")
    for name in ("n_threads", "n_batch", "n_ubatch", "n_ctx", "n_gpu_layers", "timeline"):
        conditions[name] = given.pop(name)
    conditions["cold"] = not given.pop("warm")
    for name in ("arms", "rpc"):
        given[name] = tuple(word.strip() for word in given[name].split(",") if word.strip())
    given["custom"] = tuple(
        (name, Path(whl), tuple(filter(None, env.split(",")))) for name, whl, env in given["custom"]
    )
    return Request(conditions=Conditions(**conditions), **given)
