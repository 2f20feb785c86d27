"""`moe-madv model`: look at, and make, Mixture-of-Experts GGUF files."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from toolkit import config
from toolkit.cli.model_ahead import ahead
from toolkit.cli.model_early import early
from toolkit.cli.model_evict import evict
from toolkit.cli.model_predict import predict
from toolkit.cli.model_trace import trace as trace_command
from toolkit.console import GIB, byte_progress, note

if TYPE_CHECKING:
    from toolkit.model.shape import Shape


@click.group()
def model() -> None:
    """Inspect and make MoE GGUF files.

    \b
    Example:
      moe-madv model synth demo.gguf --preset demo
      moe-madv model info demo.gguf --json
    """


model.add_command(ahead)
model.add_command(early)
model.add_command(evict)
model.add_command(predict)
model.add_command(trace_command)

_OVERRIDE = re.compile(r"(?P<key>[^=]+)=(?:int:)?(?P<value>-?[0-9]{1,18})")


def _parse_overrides(_ctx: click.Context, _param: click.Parameter, texts: tuple[str, ...]) -> dict[str, int]:
    overrides = {}
    for text in texts:
        match = _OVERRIDE.fullmatch(text)
        if match is None:
            raise click.BadParameter(f"{text!r} is not KEY=NUMBER, such as qwen3moe.expert_used_count=4")
        overrides[match["key"]] = int(match["value"])
    return overrides


@model.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--json", "json_", is_flag=True, help="Print everything as JSON, sizes in bytes.")
@click.option(
    "--override",
    "overrides",
    multiple=True,
    metavar="KEY=NUMBER",
    callback=_parse_overrides,
    help="Replace ARCH.expert_used_count, as llama.cpp's --override-kv does.",
)
@click.option("--tokens", type=click.IntRange(min=1), default=1, help="Expect the routed bytes of this many tokens.")
def info(file: Path, json_: bool, overrides: dict[str, int], tokens: int) -> None:
    """Show what a token reads of a model: always, by expert, by row, never.

    FILE is a GGUF file, any shard of a split model, or a folder that holds one model. Only headers are read.

    \b
    Example:
      moe-madv model info Qwen3-30B-A3B-Q4_K_M.gguf
      moe-madv model info model-00002-of-00003.gguf --json
      moe-madv model info demo.gguf --override qwen3moe.expert_used_count=4 --tokens 512
    """
    # Here, not above: numpy and gguf take longer to import than --help may take.
    from toolkit.model.info import as_json, as_text
    from toolkit.model.layout import read_model

    layout = read_model(file, overrides)
    if json_:
        click.echo(json.dumps(as_json(layout, tokens), indent=2))
        return
    encoding = sys.stdout.encoding or "utf-8"
    click.echo(as_text(layout, tokens).encode(encoding, "backslashreplace").decode(encoding))


_COUNT = click.IntRange(min=1)
_REPLAY_FIXES = {"experts", "top_k", "prompt", "decode", "popularity", "recency"}
_LIKE_LEAVES_OPEN = {"prompt", "decode", "popularity", "recency", "early_accuracy"}
_SCALE = 64  # one with DeepSeek-V4-Flash: 2.4 GiB


def _parse_scale(_ctx: click.Context, _param: click.Parameter, text: str | None) -> int | None:
    match = re.fullmatch(r"1/([1-9][0-9]{0,8})", text or "")
    if text is not None and match is None:
        raise click.BadParameter(f"{text!r} is not 1/N, such as 1/64")
    return int(match[1]) if match else None


@model.command()
@click.argument("out", required=False, type=click.Path(path_type=Path, dir_okay=False))
@click.option("--preset", type=click.Choice(["tiny", "demo", "bench"]), help="[default: demo]")
@click.option("--like", type=click.Choice(["deepseek-v4-flash"]), help="A smaller one of a real model's architecture.")
@click.option(
    "--scale",
    callback=_parse_scale,
    metavar="1/N",
    help="Share of the routed bytes of the model that --like names.  [default: 1/64]",
)
@click.option("--layers", type=_COUNT, help="Transformer blocks; with --replay the first ones of the trace.")
@click.option("--experts", type=click.IntRange(1, 1024), help="Experts in a layer.")
@click.option("--top-k", type=_COUNT, help="Experts a token takes in a layer.")
@click.option("--embd", type=_COUNT, help="Width of the residual stream.")
@click.option("--ff", type=_COUNT, help="Width of one expert.")
@click.option("--shared-ff", type=click.IntRange(min=0), help="Width of a shared expert, 0: none.  [default: 0]")
@click.option("--type", type=click.Choice(["Q4_0", "Q8_0", "Q4_K", "MXFP4"]), help="Of the experts.")
@click.option("--prompt", type=_COUNT, help="Prompt tokens of the prescribed list.")
@click.option("--decode", type=_COUNT, help="Decoded tokens of the prescribed list.")
@click.option("--popularity", type=float, help="Spread of expert use, 0 (alike) to 10.  [default: as in real models]")
@click.option("--recency", type=float, help="Weight of recent use, 0 (none) to 100.  [default: as in real models]")
@click.option(
    "--early-accuracy",
    type=float,
    metavar="SHARE",
    help="How often the next layer's router, given this layer's input, is right.  [default: always]",
)
@click.option("--replay", type=click.Path(path_type=Path), metavar="TRACE.npz", help="Use a recorded routing.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--vocab", type=click.Path(path_type=Path), help="GGUF vocabulary.  [default: of the fetched llama.cpp]")
@click.option("--force", is_flag=True, help="Replace an existing file.")
@click.option("--dry-run", is_flag=True, help="Say what would be made; write nothing.")
@click.option("--json", "json_", is_flag=True, help="Print parameters, size and routing statistics as JSON.")
def synth(
    out: Path | None,
    preset: str | None,
    like: str | None,
    scale: int | None,
    replay: Path | None,
    seed: int,
    vocab: Path | None,
    force: bool,
    dry_run: bool,
    json_: bool,
    **options: Any,
) -> None:
    """Make a model with random weights and prescribed routing, as large as a preset or as given.

    OUT (default: PRESET.gguf in the toolkit's cache) runs in any llama.cpp. Its metadata holds a token list; fed
    with it, every token takes exactly the experts that a routing trace says: a generated one, as recent and as
    frequent as in real models, or a recorded one.
    Sizes: tiny 9 MiB, demo 3 GiB, bench 8 GiB. With --like the architecture is the real model's, with all of its
    experts, narrower and shallower by --scale.
    By prescription the next layer's router is right even on this layer's input, which is early. Real models have
    published figures of 0.80 to 0.89: --early-accuracy 0.85 makes it as wrong as that, the true routing unchanged.

    \b
    Example:
      moe-madv model synth demo.gguf
      moe-madv model synth --preset tiny
      moe-madv model synth bench.gguf --preset bench --type Q8_0 --dry-run
      moe-madv model synth shared.gguf --shared-ff 3072
      moe-madv model synth ds4.gguf --like deepseek-v4-flash --scale 1/64
      moe-madv model synth replay.gguf --preset bench --replay trace.npz
      moe-madv model synth hard.gguf --preset bench --early-accuracy 0.85
    """
    from toolkit.model.routing import WINDOW, statistics
    from toolkit.model.shape import routing
    from toolkit.model.synth import Synth
    from toolkit.model.vocab import fetched_vocabulary

    given = {name: value for name, value in options.items() if value is not None}
    name, base = _base(preset, like, scale, replay, given)
    out = out or config.home() / "models" / f"{name.replace(' 1/', '-')}.gguf"
    shape, trace = routing(replace(base, **given), replay, seed)
    made = Synth(shape, trace, vocab=vocab or fetched_vocabulary(), seed=seed, preset=name)

    note(
        f"{out}: {made.nbytes / GIB:.2f} GiB; {shape.layers} layers, {shape.experts} {shape.type} experts, "
        f"top {shape.top_k}{', a shared one' if shape.shared_ff else ''}; {shape.prompt} + {shape.decode} tokens"
    )
    if trace.n_filled:
        note(f"{trace.source}: {trace.n_filled} rows were not recorded; they repeat other tokens of their layer")
    stats = None
    if shape.decode > WINDOW:
        stats = statistics(trace.experts, trace.n_prompt, trace.n_expert)
        note(
            f"routing: adjacent Jaccard {stats.adjacent_jaccard:.2f}, seen in the last {WINDOW} tokens "
            f"{stats.recent_reuse:.2f}, static top 1/8 {stats.static_coverage:.2f}, LRU hits at 20 / 30 % "
            f"{stats.lru_hits[20]:.2f} / {stats.lru_hits[30]:.2f}"
        )
    if made.early is not None:
        note(f"early routing right, by layers ahead: {', '.join(f'{share:.3f}' for share in made.early.accuracy)}")
    if not dry_run:
        with byte_progress() as progress:
            task = progress.add_task(out.name, total=made.nbytes)
            written = made.write(out, force=force, advance=lambda n: progress.advance(task, n))
        note("written" if written else "already there, made with the same options")
    if json_:
        measured = None if stats is None else asdict(stats)
        report = {"file": str(out), "bytes": made.nbytes, "parameters": made.parameters, "routing": measured}
        if made.early is not None:
            report["early_accuracy_by_layers_ahead"] = made.early.accuracy
        click.echo(json.dumps(report, indent=2))
    elif not dry_run:
        click.echo(out)


def _base(
    preset: str | None, like: str | None, scale: int | None, replay: Path | None, given: dict[str, Any]
) -> tuple[str, Shape]:
    """Name and shape that the options start from; UsageError for options that it does not leave open."""
    from toolkit.model.arch import deepseek4
    from toolkit.model.shape import PRESETS

    if like is None:
        if scale is not None:
            raise click.UsageError("--scale needs --like")
        if replay is not None and (fixed := given.keys() & _REPLAY_FIXES):
            raise click.UsageError(f"--replay fixes --{min(fixed).replace('_', '-')}; leave it out")
        name = preset or "demo"
        return name, PRESETS[name]
    others = given | {key: value for key, value in (("preset", preset), ("replay", replay)) if value is not None}
    if fixed := others.keys() - _LIKE_LEAVES_OPEN:
        raise click.UsageError(f"--like fixes --{min(fixed).replace('_', '-')}; leave it out")
    return f"{like} 1/{scale or _SCALE}", deepseek4.flash(scale or _SCALE)
