"""`moe-madv bench`: measure arms against each other and compare the rows."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console

from toolkit import compare, plots, report, results
from toolkit.console import note
from toolkit.files import write_text


@click.group()
def bench() -> None:
    """Run and compare A/B measurements.

    \b
    Example:
      moe-madv bench run demo.gguf --oversubscribe 2.7 --out demo.jsonl
      moe-madv bench compare demo.jsonl
    """


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
def compare_command(files: tuple[Path, ...], baseline: str | None, output: str, as_json: bool) -> None:
    """Say which arm is faster, by how much, and how sure that is.

    Several files of the same conditions are pooled. Rows that differ in model, tokens, budget,
    read-ahead, threads or cache state are refused.

    \b
    Example:
      moe-madv bench compare demo.jsonl
      moe-madv bench compare monday.jsonl tuesday.jsonl --baseline off --json
    """
    findings = compare.compare(results.read(files), baseline)
    console = Console()
    if as_json or output == "json":
        click.echo(report.to_json(findings), nl=False)
    elif output == "csv":
        click.echo(report.to_csv(findings), nl=False)
    elif output == "table" and console.is_terminal:
        report.print_terminal(findings, console)
    else:
        click.echo(report.markdown(findings), nl=False)


@bench.command("plot")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="FILE...")
@click.option("--baseline", metavar="ARM", help="Arm to compare with.  [default: first arm of the plan]")
@click.option("--out", required=True, type=click.Path(path_type=Path, dir_okay=False), help="SVG file to write.")
def plot_command(files: tuple[Path, ...], baseline: str | None, out: Path) -> None:
    """Draw throughput and MiB read per token of every arm as one SVG file.

    \b
    Example:
      moe-madv bench plot demo.jsonl --out demo.svg
    """
    write_text(out, plots.chart(compare.compare(results.read(files), baseline)))
    note(f"wrote {out}")
