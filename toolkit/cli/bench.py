"""`moe-madv bench`: measure arms against each other and compare the rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.console import Console

from toolkit import results
from toolkit.cli.bench_longrun import longrun, stalls
from toolkit.cli.bench_reads import reads
from toolkit.cli.bench_report import EFFECT, export_command, plot_command, report_command
from toolkit.cli.bench_request import SLOWDOWN, MeasuringCommand, make_request, what_to_measure
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


@bench.command("run", cls=MeasuringCommand)
@what_to_measure
@click.option("-r", "--blocks", type=click.IntRange(min=1), default=6, show_default=True, help="Runs per arm.")
@click.option("--minutes", type=float, help="After 3 blocks, start no other past this time.")
@click.option("--aa", is_flag=True, help="The first arm once more, as ARM-2 (A/A); without --arms: stock, twice.")
@click.option("--one-process", is_flag=True, help="Switch modes of the patched build in one process (with --warm).")
@click.option(
    "--inject-slowdown",
    type=SLOWDOWN,
    multiple=True,
    metavar="ARM=PERCENT",
    help="Make an arm slower on purpose, to see whether it is found.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the comparison as JSON.")
def run_command(
    blocks: int,
    minutes: float | None,
    one_process: bool,
    inject_slowdown: tuple[tuple[str, float], ...],
    dry_run: bool,
    as_json: bool,
    **given: Any,
) -> None:
    """Measure arms of MODEL against each other, one fresh process per run, and compare them.

    Decode is forced along a fixed token list, the same in every arm; outputs are compared before any speed is
    shown. Decode goes on from the prompt; with -d each of the two starts from that context, as in llama-bench. A run
    that was interrupted continues with the same command.

    The noise floor of a machine is what --aa finds between two equal arms; --inject-slowdown tells whether a
    difference of a known size is found. Between modes of a model in memory, --one-process leaves out what differs
    from process to process: use many short blocks.

    \b
    Example:
      moe-madv bench run demo.gguf --oversubscribe 2.7
      moe-madv bench run big.gguf --arms stock,hint --budget 48GiB -p 128 -n 64 --blocks 4 --out big.jsonl
      moe-madv bench run demo.gguf --arms stock,hint -d 64 -p 0 -n 32
      moe-madv bench run demo.gguf --arms stock,cache --timeline --trace experts.npz
      moe-madv bench run demo.gguf --arms stock --arm late my.whl MOE_MADV_MODE=madv
      moe-madv bench run demo.gguf --arms stock --rpc 10.0.0.2:50052,10.0.0.3:50052
      moe-madv bench run demo.gguf --aa --inject-slowdown stock-2=10% --blocks 10
      moe-madv bench run demo.gguf --arms off,hint --one-process --warm -p 0 -n 16 --blocks 40
    """
    from toolkit.bench.request import measure

    given["injected_slowdown"] = inject_slowdown
    path = measure(make_request(given, blocks=blocks, minutes=minutes, one_process=one_process), dry_run=dry_run)
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


for _command in (export_command, plot_command, report_command, longrun, stalls):
    bench.add_command(_command)
