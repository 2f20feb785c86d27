"""`moe-madv model early`: how often the next layer's router is right on this layer's input."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click


@click.command("early")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("-p", "--n-prompt", type=click.IntRange(min=0), default=24, show_default=True, help="Prompt tokens.")
@click.option("-n", "--n-gen", type=click.IntRange(min=1), default=32, show_default=True, help="Decoded tokens.")
@click.option("--threads", type=click.IntRange(min=1), help="[default: all cores]")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON, by layer.")
def early(file: Path, n_prompt: int, n_gen: int, threads: int | None, as_json: bool) -> None:
    """Run a model and measure how well its experts are known one and two layers early.

    The run is of the unpatched wheel. Each layer's router is applied to the input of an earlier layer's expert
    matmuls: the share of the experts taken that are among its k best. Own input must give 1. FILE is any MoE model;
    one made by `model synth` runs its prescribed tokens, another one a built-in text.

    \b
    Example:
      moe-madv model early hard.gguf
      moe-madv model early Qwen3-30B-A3B-Q4_K_M.gguf -n 64 --json
    """
    from toolkit import config
    from toolkit.bench import early as measuring
    from toolkit.bench import limits, machine, plan
    from toolkit.bench import tokens as forced
    from toolkit.bench.launch import job_of
    from toolkit.bench.select import arms_by_name
    from toolkit.model.layout import read_model
    from toolkit.model.synth import prescription
    from toolkit.patch.series import load_series
    from toolkit.patch.upstream import load_pin

    layout = read_model(file)
    (arm,) = arms_by_name([plan.STOCK], load_pin(), load_series(config.patches_dir()), config.home())
    path = layout.shards[0].path
    conditions = plan.Conditions(
        blocks=1, n_batch=512, n_ubatch=512, cold=False, n_threads=threads or machine.facts(path).usable_cores
    )
    job = job_of(layout, conditions, n_prompt + n_gen)
    if "moe_madv.tokens" in layout.shards[0].header.metadata:
        tokens = forced.prescribed(prescription(path), n_prompt, n_gen)
    else:
        with limits.memory_budget(None) as unlimited:
            tokens = forced.from_text(arm, job, unlimited, n_prompt, n_gen, None)
    found = measuring.measure(layout, arm, job, tokens)
    if as_json:
        click.echo(json.dumps({"file": str(file), "tokens": tokens.source, **asdict(found)}, indent=2))
        return
    for ahead in found.ahead:
        where = ("its own input", "one layer before", "two layers before")[ahead.distance]
        worst = min(ahead.by_layer, key=ahead.by_layer.__getitem__)
        click.echo(f"{where:<18} {ahead.mean:.3f}, least {ahead.by_layer[worst]:.3f} in layer {worst}")
    if found.experts_match is not None:
        click.echo(f"experts taken are {'' if found.experts_match else 'NOT '}the prescribed ones")
