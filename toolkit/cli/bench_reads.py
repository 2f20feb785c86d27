"""`moe-madv bench reads`: ways to read experts, against each other."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from toolkit import config
from toolkit.console import note

if TYPE_CHECKING:
    from toolkit.bench.reads import Row


def _numbers(_ctx: click.Context, _param: click.Parameter, text: str) -> tuple[int, ...]:
    try:
        return tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError as e:
        raise click.BadParameter(f"{text!r} is not a list of numbers such as 1,2,4") from e


@click.command("reads")
@click.argument("file", required=False, type=click.Path(path_type=Path))
@click.option("--lab", metavar="SIZE", help="Instead of FILE: a file of this size on a disk made of memory (root).")
@click.option("--lab-read-ahead", type=click.IntRange(min=0), metavar="KIB", help="Of that disk.  [default: 128]")
@click.option("--methods", metavar="NAMES", help="Ways to read, such as direct,uring.  [default: all]")
@click.option(
    "--readers", default="1,2,4,8,16", show_default=True, callback=_numbers, help="Threads, or reads at once."
)
@click.option("--slice", "slice_", default="864KiB", show_default=True, metavar="SIZE", help="Of one expert matrix.")
@click.option("--group", type=click.IntRange(min=1), default=24, show_default=True, help="Slices wanted together.")
@click.option("--window", metavar="SIZE", help="Most bytes in one hint.  [default: the read-ahead, 128KiB at least]")
@click.option("--budget", metavar="SIZE", help="Memory for the reader and its page cache.  [default: no limit]")
@click.option("--seconds", type=click.FloatRange(min=0.01), default=1.0, show_default=True, help="For one sample.")
@click.option("--blocks", type=click.IntRange(min=1), default=3, show_default=True, help="Samples of each way.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="JSON lines, written as they come.")
@click.option("--json", "as_json", is_flag=True, help="Print conditions and figures as JSON.")
def reads(
    file: Path | None,
    lab: str | None,
    lab_read_ahead: int | None,
    methods: str | None,
    readers: tuple[int, ...],
    slice_: str,
    group: int,
    window: str | None,
    budget: str | None,
    seconds: float,
    blocks: int,
    out: Path | None,
    as_json: bool,
) -> None:
    """Compare ways to read random expert matrices of FILE, from page faults to io_uring, with several readers.

    Slices start unaligned, as in a GGUF, and come in groups, as the experts of a layer do. The file is dropped from
    the page cache before each sample. Take a file much larger than the budget; read-ahead is that of its disk.

    \b
    Example:
      moe-madv bench reads bench.gguf --budget 2.5GiB --out reads.jsonl
      moe-madv bench reads bench.gguf --methods willneed,direct,uring --readers 1,4 --blocks 5
      moe-madv bench reads --lab 4GiB --budget 1GiB --json
    """
    from toolkit.bench import reads as reading
    from toolkit.bench.limits import parse_size
    from toolkit.errors import BenchError

    if (file is None) == (lab is None):
        raise click.UsageError("give FILE or --lab SIZE")
    if lab is None and lab_read_ahead is not None:
        raise click.UsageError("--lab-read-ahead is of --lab; set that of a disk with blockdev --setra")
    if out is not None and out.exists():
        raise BenchError("the file exists", where=out, hint="give another name, or remove it")
    plan = reading.Plan(
        methods=tuple(reading.METHODS) if methods is None else tuple(dict.fromkeys(methods.split(","))),
        readers=readers,
        slice_bytes=parse_size(slice_),
        group=group,
        window=None if window is None else parse_size(window),
        seconds=seconds,
        blocks=blocks,
        budget=None if budget is None else parse_size(budget),
    )
    rows: list[Row] = []
    with _file(file, None if lab is None else parse_size(lab), lab_read_ahead) as source:
        for row in reading.measure(source, plan, config.home(), progress=note):
            rows.append(row)
            if out is not None:
                out.parent.mkdir(parents=True, exist_ok=True)
                with out.open("a", encoding="utf-8") as f:
                    f.write(json.dumps(row) + "\n")
    click.echo(json.dumps(reading.as_json(rows), indent=2) if as_json else reading.as_markdown(rows), nl=as_json)


@contextlib.contextmanager
def _file(file: Path | None, lab_bytes: int | None, read_ahead_kb: int | None) -> Iterator[Path]:
    if file is not None:
        yield file
        return
    from toolkit.bench import lab

    assert lab_bytes is not None
    with lab.fast_disk(lab_bytes, read_ahead_kb=128 if read_ahead_kb is None else read_ahead_kb) as folder:
        note(f"writing {folder / 'data'}")
        lab.fill(folder / "data", lab_bytes)
        yield folder / "data"
