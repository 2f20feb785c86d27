"""`moe-madv reproduce`: published experiments again, with their figures beside ours."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from toolkit.cli import bench_request
from toolkit.cli.bench_request import MeasuringCommand
from toolkit.console import note
from toolkit.files import write_text

if TYPE_CHECKING:
    from toolkit.reproduce.setup import Options


@click.group()
def reproduce() -> None:
    """Run a published experiment on this machine and put its figures beside ours.

    The model is a DeepSeek-V4-Flash with fewer and narrower layers, made on the first run, or your own file. Every
    command continues where it was interrupted. Rows are results files: `bench compare`, `bench report` and
    `scripts/results-readme` read them. With --out the report is written beside them.

    \b
    Example:
      moe-madv reproduce moe-madv --quick
      moe-madv reproduce overlap
      moe-madv reproduce context --lengths 512,1024
    """


_COUNT = click.IntRange(min=1)
_HOURS = click.FloatRange(min=0, min_open=True)


def _parse_scale(_ctx: click.Context, _param: click.Parameter, text: str) -> int:
    head, slash, n = text.partition("/")
    if head != "1" or not slash or not (n.isascii() and n.isdigit()) or int(n) < 1:
        raise click.BadParameter(f"{text!r} is not 1/N, such as 1/64")
    return int(n)


def _common(*, blocks: int, arms: bool = True) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Options that all experiments share."""
    options: list[Callable[[Any], Any]] = [
        click.option("--model", type=click.Path(path_type=Path), help="A real GGUF file.  [default: the scaled one]"),
        click.option("--scale", callback=_parse_scale, default="1/64", show_default=True, metavar="1/N"),
        click.option("--source", help="Where --model was published; recorded."),
        click.option("--revision", help="Which revision of it; recorded."),
        click.option("--sha256", metavar="HEX", help="Its checksum as published; recorded, not verified."),
        click.option("--repeats", "blocks", type=_COUNT, default=blocks, show_default=True, help="Runs of each arm."),
        click.option("--budget", metavar="SIZE", help="Memory of each run.  [default: model size / --oversubscribe]"),
        click.option("--oversubscribe", type=click.FloatRange(min=1.0, min_open=True), default=2.2, show_default=True),
        click.option("-t", "--threads", type=_COUNT, help="Threads.  [default: all usable cores]"),
        click.option(
            "--out", type=click.Path(path_type=Path, file_okay=False), help="Folder of results files and report."
        ),
        click.option("--dry-run", is_flag=True, help="Say what would be done; make and measure nothing."),
        click.option("--json", "json_", is_flag=True, help="Print everything as JSON."),
    ]

    if arms:
        options.insert(5, click.option("--arms", help="Names, with commas.  [default: those of the experiment]"))

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def _options(given: dict[str, Any]) -> Options:
    from toolkit.reproduce.setup import Options, Origin

    origin = Origin(**{name: given.pop(name) for name in ("source", "revision", "sha256")})
    arms = given.pop("arms", None)
    names = tuple(name.strip() for name in arms.split(",") if name.strip()) if arms else None
    command = click.get_current_context().meta.get(bench_request.__name__)
    return Options(arms=names, origin=origin, command=command, **given)


def _print(report: Any, module: Any, json_: bool) -> None:
    if report is None:
        return
    text = module.as_text(report)
    if report.path is not None:
        write_text(report.path, text + "\n")
        note(f"wrote {report.path}")
    click.echo(json.dumps(module.as_json(report), indent=2) if json_ else text)


@reproduce.command("moe-madv", cls=MeasuringCommand)
@click.option("--quick", is_flag=True, help="A first look: the arms off, madv and hint only.")
@click.option("--matrix", is_flag=True, help="Also the prefill suite of the published matrix.")
@click.option("--hours", type=_HOURS, help="The matrix until so much time is used up; published: 5.")
@_common(blocks=3)
def moe_madv_command(quick: bool, matrix: bool, hours: float | None, json_: bool, **given: Any) -> None:
    """Decode with and without hints for the routed experts: two prompts, 24 tokens, 3 repeats.

    `off` is the patched build without hints, `madv` the published behaviour; all other modes run beside them.
    The context has 1024 tokens, and nothing is read ahead of a run. --hours replaces --repeats.

    \b
    Example:
      moe-madv reproduce moe-madv --quick
      moe-madv reproduce moe-madv --matrix --out results/here
      moe-madv reproduce moe-madv --arms off,madv --hours 5 --out results/here
      moe-madv reproduce moe-madv --model DeepSeek-V4-Flash-MXFP4_MOE.gguf --revision cd42deba --budget 64GB
    """
    from toolkit.reproduce import moe_madv

    _print(moe_madv.reproduce(_options(given), quick=quick, matrix=matrix, hours=hours), moe_madv, json_)


def _parse_batch(_ctx: click.Context, _param: click.Parameter, text: str) -> int | None:
    """None for auto."""
    if text != "auto" and not (text.isascii() and text.isdigit() and int(text) > 0):
        raise click.BadParameter(f"{text!r} is neither a number of tokens nor auto")
    return None if text == "auto" else int(text)


@reproduce.command("overlap", cls=MeasuringCommand)
@click.option("--off", "off", type=click.Choice(["hint", "off"]), default="hint", show_default=True, help="Other arm.")
@click.option("-p", "--n-prompt", type=_COUNT, help="Tokens of the prompt.  [default: one batch]")
@click.option(
    "--batch",
    callback=_parse_batch,
    default="512",
    show_default=True,
    metavar="N|auto",
    help="Tokens computed at once; auto finds the batch that takes as long to read as to compute.",
)
@_common(blocks=2, arms=False)
def overlap_command(off: str, n_prompt: int | None, batch: int | None, json_: bool, **given: Any) -> None:
    """Prefill while the next layer is read, and without that: on, off, off, on.

    Two repeats are the published order; three or more give a verdict. --batch auto needs memory for the whole
    model: it measures with the model in there, before the runs.

    \b
    Example:
      moe-madv reproduce overlap --batch auto --repeats 4
      moe-madv reproduce overlap --off off -p 256
    """
    from toolkit.reproduce import overlap

    _print(overlap.reproduce(_options(given), off=off, n_prompt=n_prompt, batch=batch), overlap, json_)


_LENGTH = re.compile(r"([1-9][0-9]*)(K?)")


def _parse_lengths(_ctx: click.Context, _param: click.Parameter, text: str) -> list[int]:
    words = [_LENGTH.fullmatch(word.strip()) for word in text.split(",")]
    lengths = [int(word[1]) * (1024 if word[2] else 1) for word in words if word]
    if len(lengths) != len(words) or lengths != sorted(set(lengths)):
        raise click.BadParameter(f"{text!r} is not a rising list of lengths, such as 512,1024 or 32K,64K")
    return lengths


@reproduce.command("context", cls=MeasuringCommand)
@click.option(
    "--lengths",
    callback=_parse_lengths,
    default="256,512,1024",
    show_default=True,
    metavar="N,N,…",
    help="Tokens in the context; published: 32K,64K,96K,128K.",
)
@click.option("-n", "--n-gen", type=_COUNT, default=16, show_default=True, help="Tokens decoded at each length.")
@_common(blocks=3)
def context_command(lengths: list[int], n_gen: int, json_: bool, **given: Any) -> None:
    """Prefill and decode by length of the context: fresh processes, and one session that grows.

    The session comes to each length by a prompt of the missing tokens and decodes there; its prefill is that of
    the added tokens alone. Each run keeps least available memory, swap and temperature.

    \b
    Example:
      moe-madv reproduce context
      moe-madv reproduce context --lengths 1024,2048,4096 --arms off,hint --repeats 5
      moe-madv reproduce context --model big.gguf --lengths 32K,64K,96K,128K -n 128 --out results/here
    """
    from toolkit.reproduce import context

    before = 0
    for length in lengths:
        if length - before <= n_gen:
            raise click.BadParameter(
                f"{before} and {length} are not more than -n {n_gen} apart", param_hint="--lengths"
            )
        before = length
    report = context.reproduce(_options(given), lengths=lengths, n_gen=n_gen, wanted=("hint",))
    _print(report, context, json_)
