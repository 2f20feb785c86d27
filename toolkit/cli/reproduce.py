"""`moe-madv reproduce`: published experiments again, with their figures beside ours."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from toolkit.reproduce.setup import Options


@click.group()
def reproduce() -> None:
    """Run a published experiment on this machine and put its figures beside ours.

    The model is a DeepSeek-V4-Flash with fewer and narrower layers, made on the first run, or your own file. Every
    command continues where it was interrupted.

    \b
    Example:
      moe-madv reproduce moe-madv --quick
      moe-madv reproduce overlap
      moe-madv reproduce context --lengths 512,1024
    """


_COUNT = click.IntRange(min=1)


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
        click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Folder of the results files."),
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
    return Options(arms=names, origin=origin, **given)


def _print(report: Any, module: Any, json_: bool) -> None:
    if report is not None:
        click.echo(json.dumps(module.as_json(report), indent=2) if json_ else module.as_text(report))


@reproduce.command("moe-madv")
@click.option("--quick", is_flag=True, help="Three arms instead of all: under 15 minutes on two cores.")
@click.option("--matrix", is_flag=True, help="Also the prefill suite of the published matrix.")
@_common(blocks=3)
def moe_madv_command(quick: bool, matrix: bool, json_: bool, **given: Any) -> None:
    """Decode with and without hints for the routed experts: two prompts, 24 tokens, 3 repeats.

    `off` is the patched build without hints, `madv` the published behaviour; all other modes run beside them.

    \b
    Example:
      moe-madv reproduce moe-madv --quick
      moe-madv reproduce moe-madv --matrix --json
      moe-madv reproduce moe-madv --model DeepSeek-V4-Flash-MXFP4_MOE.gguf --revision cd42deba --budget 64GB
    """
    from toolkit.reproduce import moe_madv

    _print(moe_madv.reproduce(_options(given), quick=quick, matrix=matrix), moe_madv, json_)


@reproduce.command("overlap")
@click.option("--off", "off", type=click.Choice(["hint", "off"]), default="hint", show_default=True, help="Other arm.")
@click.option("-p", "--n-prompt", type=_COUNT, default=512, show_default=True, help="Tokens of the prompt.")
@_common(blocks=2, arms=False)
def overlap_command(off: str, n_prompt: int, json_: bool, **given: Any) -> None:
    """Prefill while the next layer is read, and without that: on, off, off, on.

    Two repeats are the published order; three or more give a verdict.

    \b
    Example:
      moe-madv reproduce overlap
      moe-madv reproduce overlap --off off -p 256 --repeats 4
    """
    from toolkit.reproduce import overlap

    _print(overlap.reproduce(_options(given), off=off, n_prompt=n_prompt), overlap, json_)


def _parse_lengths(_ctx: click.Context, _param: click.Parameter, text: str) -> list[int]:
    words = text.split(",")
    lengths = [int(word) for word in words if word.isascii() and word.isdigit() and int(word) > 0]
    if len(lengths) != len(words) or lengths != sorted(set(lengths)) or any(n % lengths[0] for n in lengths):
        raise click.BadParameter(f"{text!r} is not a rising list of multiples of its first, such as 512,1024,2048")
    return lengths


@reproduce.command("context")
@click.option("--lengths", callback=_parse_lengths, default="256,512,1024", show_default=True, metavar="N,N,…")
@_common(blocks=3)
def context_command(lengths: list[int], json_: bool, **given: Any) -> None:
    """Prefill and decode by length of the context: fresh processes, and one session that grows.

    The session takes the first length again and again; its prefill is that of the added tokens alone.

    \b
    Example:
      moe-madv reproduce context
      moe-madv reproduce context --lengths 1024,2048,4096 --arms off,hint --repeats 5
    """
    from toolkit.reproduce import context

    _print(context.reproduce(_options(given), lengths=lengths, wanted=("hint",)), context, json_)
