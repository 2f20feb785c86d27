"""`moe-madv bench`: measure arms against each other and compare the rows."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console

from toolkit import results
from toolkit.cli.bench_reads import reads
from toolkit.cli.bench_report import EFFECT, export_command, plot_command, report_command
from toolkit.cli.bench_storage import storage
from toolkit.evidence import compare, imported, report


@click.group()
def bench() -> None:
    """Run and compare A/B measurements.

    \b
    Example:
      moe-madv bench run demo.gguf --oversubscribe 2.7 --out demo.jsonl
      moe-madv bench compare demo.jsonl
    """


bench.add_command(storage)
bench.add_command(reads)


@bench.command("run")
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--arms", default="stock,off,madv,hint", show_default=True, help="Names; the first is the baseline.")
@click.option(
    "--arm",
    "custom",
    nargs=3,
    multiple=True,
    metavar="NAME WHEEL ENV",
    help="One more arm: a wheel with KEY=VALUE,… for its environment ('' for none).",
)
@click.option("--budget", metavar="SIZE", help="Memory of each run, such as 2.5GiB.  [default: no limit]")
@click.option("--oversubscribe", type=click.FloatRange(min=1.0, min_open=True), help="Budget = model size / this.")
@click.option("-p", "--n-prompt", type=click.IntRange(min=0), default=64, show_default=True, help="Prefill tokens.")
@click.option("-n", "--n-gen", type=click.IntRange(min=0), default=48, show_default=True, help="Decode tokens.")
@click.option("-t", "--threads", type=click.IntRange(min=1), help="Threads.  [default: all usable cores]")
@click.option("-b", "--batch-size", type=click.IntRange(min=1), default=2048, show_default=True)
@click.option("-ub", "--ubatch-size", type=click.IntRange(min=1), default=512, show_default=True)
@click.option("-ngl", "--n-gpu-layers", type=click.IntRange(min=0), default=0, help="Layers on a GPU, without experts.")
@click.option("--backend", default="cpu", show_default=True, help="Backend of the wheels behind the arms' names.")
@click.option("--blocks", type=click.IntRange(min=1), default=6, show_default=True, help="Runs per arm.")
@click.option("--minutes", type=float, help="After 3 blocks, start no other past this time.")
@click.option("--prompt", "prompt_file", type=click.Path(path_type=Path, exists=True), help="Text to force.")
@click.option("--timeline", is_flag=True, help="Keep where the time of each layer went (patched arms).")
@click.option("--warm", is_flag=True, help="Leave the page cache as it is instead of evicting the model.")
@click.option(
    "--out", type=click.Path(path_type=Path, dir_okay=False), help="Results file; an unfinished one continues."
)
@click.option("--rpc", metavar="HOST:PORT,…", default="", help="One more arm, rpc: its layers are on these servers.")
@click.option("--sdist", metavar="VERSION", help="Arms of another pinned llama-cpp-python than the one in use.")
@click.option("--dry-run", is_flag=True, help="Print the plan; measure nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print the comparison as JSON.")
def run_command(
    model: Path,
    arms: str,
    custom: tuple[tuple[str, Path, str], ...],
    budget: str | None,
    oversubscribe: float | None,
    n_prompt: int,
    n_gen: int,
    threads: int | None,
    batch_size: int,
    ubatch_size: int,
    n_gpu_layers: int,
    backend: str,
    blocks: int,
    minutes: float | None,
    prompt_file: Path | None,
    timeline: bool,
    warm: bool,
    out: Path | None,
    rpc: str,
    sdist: str | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Measure arms of MODEL against each other, one fresh process per run, and compare them.

    Decode is forced along a fixed token list, the same in every arm; outputs are compared before any speed is
    shown. A run that was interrupted continues with the same command.

    \b
    Example:
      moe-madv bench run demo.gguf --oversubscribe 2.7
      moe-madv bench run big.gguf --arms stock,hint --budget 48GiB -p 128 -n 64 --blocks 4 --out big.jsonl
      moe-madv bench run demo.gguf --arms stock --arm late my.whl MOE_MADV_MODE=madv
      moe-madv bench run demo.gguf --arms stock --rpc 10.0.0.2:50052,10.0.0.3:50052
    """
    from toolkit.bench.plan import Conditions
    from toolkit.bench.request import Request, measure

    if budget is not None and oversubscribe is not None:
        raise click.UsageError("--budget and --oversubscribe exclude each other")
    if n_prompt + n_gen == 0:
        raise click.UsageError("nothing to measure: -p and -n are both 0")
    request = Request(
        model=model,
        arms=tuple(name.strip() for name in arms.split(",") if name.strip()),
        custom=tuple((name, Path(wheel), tuple(filter(None, env.split(",")))) for name, wheel, env in custom),
        n_prompt=n_prompt,
        n_gen=n_gen,
        prompt_file=prompt_file,
        budget=budget,
        oversubscribe=oversubscribe,
        conditions=Conditions(
            blocks=blocks,
            n_threads=threads,
            n_batch=batch_size,
            n_ubatch=ubatch_size,
            cold=not warm,
            n_gpu_layers=n_gpu_layers,
            timeline=timeline,
            minutes=minutes,
        ),
        out=out,
        sdist=sdist,
        backend=backend,
        rpc=tuple(server.strip() for server in rpc.split(",") if server.strip()),
    )
    path = measure(request, dry_run=dry_run)
    if path is not None:
        _print(compare.compare(results.read([path])), "json" if as_json else "table")


@bench.command("compare")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="FILE...")
@click.option("--baseline", metavar="ARM", help="Arm to compare with.  [default: first arm of the plan]")
@click.option(
    "--output",
    type=click.Choice(["table", "md", "csv", "json"]),
    default="table",
    show_default=True,
    help="Form of the result; a table that is piped is markdown.",
)
@click.option("--json", "as_json", is_flag=True, help="Same as --output json.")
@click.option("--effect", type=EFFECT, help="Also say how many blocks find a difference of this size, such as 5%.")
def compare_command(
    files: tuple[Path, ...], baseline: str | None, output: str, as_json: bool, effect: float | None
) -> None:
    """Say which arm is faster, by how much, and how sure that is.

    Several files of the same conditions are pooled. Rows that differ in model, tokens, budget,
    read-ahead, threads or cache state are refused. Files of llama-bench (json, jsonl, csv) are arms too,
    named by file and compared unpaired.

    \b
    Example:
      moe-madv bench compare demo.jsonl --effect 5%
      moe-madv bench compare monday.jsonl tuesday.jsonl --baseline off --json
      moe-madv bench compare before.json after.json
    """
    _print(compare.compare(imported.load(files), baseline, effect=effect), "json" if as_json else output)


def _print(findings: compare.Findings, output: str) -> None:
    console = Console()
    if output == "json":
        click.echo(report.to_json(findings), nl=False)
    elif output == "csv":
        click.echo(report.to_csv(findings), nl=False)
    elif output == "table" and console.is_terminal:
        report.print_terminal(findings, console)
    else:
        click.echo(report.markdown(findings), nl=False)


for _command in (export_command, plot_command, report_command):
    bench.add_command(_command)
