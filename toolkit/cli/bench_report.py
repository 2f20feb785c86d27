"""`moe-madv bench export`, `report` and `plot`: what was measured, for other programs and for people."""

from __future__ import annotations

import math
from pathlib import Path

import click

from toolkit import results
from toolkit.console import note
from toolkit.files import write_text


class _Percentage(click.ParamType):
    """A fraction above 0, written 5% or 0.05."""

    name = "percent"

    def convert(self, value: str | float, param: click.Parameter | None, ctx: click.Context | None) -> float:
        text = str(value).strip()
        try:
            fraction = float(text[:-1]) / 100 if text.endswith("%") else float(text)
        except ValueError:
            fraction = 0.0
        if not 0 < fraction < math.inf:
            self.fail(f"{text!r} is not a size such as 5% or 0.05", param, ctx)
        return fraction


EFFECT = _Percentage()

_FILES = click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="FILE...")
_BASELINE = click.option("--baseline", metavar="ARM", help="Arm to compare with.  [default: first arm of the plan]")


@click.command("export")
@_FILES
@click.option(
    "--format",
    "form",
    type=click.Choice(["md", "csv", "json", "jsonl", "sql"]),
    default="jsonl",
    show_default=True,
    help="One of llama-bench's formats.",
)
@click.option("--json", "as_json", is_flag=True, help="Same as --format json.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="File to write.  [default: stdout]")
def export_command(files: tuple[Path, ...], form: str, as_json: bool, out: Path | None) -> None:
    """Write results in llama-bench's formats: its fields first, ours after.

    One row per arm and test. llama.cpp's own script reads them all but md, sql through sqlite3; an arm is a
    build there, named by pin and arm and filled up to one length, as in the second line of the example.

    \b
    Example:
      moe-madv bench export demo.jsonl --format json --out demo.json
      compare-llama-bench.py --tool llama-bench -i demo.json -b 0c1e57098+stock -c 0c1e57098+hint=
      moe-madv bench export demo.jsonl --format sql | sqlite3 llama-bench.sqlite
    """
    from toolkit.evidence import export

    table = export.rows(results.read(files))
    for row in table:
        if row["outputs_equal"] is False:
            note(f"warning: {row['arm']}: outputs differ from the baseline's, its speed means nothing")
    text = export.FORMATS["json" if as_json else form](table)
    if out is None:
        click.echo(text, nl=False)
    else:
        write_text(out, text)
        note(f"wrote {out}")


@click.command("plot")
@_FILES
@_BASELINE
@click.option("--timeline", "by_layer", is_flag=True, help="Draw where the time of each layer went instead.")
@click.option("--format", "form", type=click.Choice(["svg", "png"]), help="[default: by the name of --out, else svg]")
@click.option("--out", required=True, type=click.Path(path_type=Path, dir_okay=False), help="File to write.")
def plot_command(files: tuple[Path, ...], baseline: str | None, by_layer: bool, form: str | None, out: Path) -> None:
    """Draw throughput and MiB read per token of every arm as one picture, or the time of every layer.

    The time of layers is that of patched arms in a run with --timeline. PNG is made by the first of rsvg-convert,
    inkscape and cairosvg that is installed.

    \b
    Example:
      moe-madv bench plot demo.jsonl --out demo.svg
      moe-madv bench plot before.json after.json --format png --out speed.png
      moe-madv bench plot demo.jsonl --timeline --out layers.svg
    """
    from toolkit.evidence import compare, imported, plots, png

    draw = plots.timelines if by_layer else plots.chart
    picture = draw(compare.compare(imported.load(files), baseline))
    if (form or out.suffix[1:].lower()) == "png":
        png.write(out, picture)
    else:
        write_text(out, picture)
    note(f"wrote {out}")


@click.command("report")
@_FILES
@_BASELINE
@click.option("--out", required=True, type=click.Path(path_type=Path, dir_okay=False), help="HTML file to write.")
def report_command(files: tuple[Path, ...], baseline: str | None, out: Path) -> None:
    """Write one HTML page that holds everything: charts, tables, conditions; no scripts, nothing from outside.

    Files of the same conditions are pooled as in `bench compare`; others get a section of their own.

    \b
    Example:
      moe-madv bench report demo.jsonl --out demo.html
    """
    from toolkit.evidence import compare, html_report, imported

    groups = compare.pools(imported.load(files))
    write_text(out, html_report.page([compare.compare(group, baseline) for group in groups]))
    note(f"wrote {out}")
