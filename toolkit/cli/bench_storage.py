"""`moe-madv bench storage`: the suspects of a slow disk, one by one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from toolkit.console import MIB, note

if TYPE_CHECKING:
    from toolkit.bench.hunt import Hunt


@click.command("storage")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--other", type=click.Path(path_type=Path), metavar="FILE", help="A file on another device to compare.")
@click.option("--minutes", type=click.FloatRange(min=0.01), default=2.0, show_default=True, help="Time to spend.")
@click.option("--portion", metavar="SIZE", help="Read only so much of FILE, from its start.  [default: all]")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="JSON file, rewritten after every step.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def storage(
    file: Path, other: Path | None, minutes: float, portion: str | None, out: Path | None, as_json: bool
) -> None:
    """Look for the reason of slow reads: a verdict on each suspect, with its evidence.

    FILE is only read: in pairs past the page cache and through it, then twice as a whole, place by place; with
    --other the two devices take turns. Places that are read through the cache are dropped from it. An interrupt
    keeps what was measured.

    \b
    Example:
      moe-madv bench storage demo.gguf
      moe-madv bench storage demo.gguf --other /mnt/usb/demo.gguf --minutes 5 --out storage.json
      moe-madv bench storage demo.gguf --portion 1GiB --json
    """
    from toolkit.bench import hunt as hunting
    from toolkit.bench.limits import parse_size
    from toolkit.errors import BenchError
    from toolkit.model.text import shown

    bounded = None if portion is None else parse_size(portion)
    hunt = hunting.prepare(file, other, minutes=minutes, portion=bounded)
    if hunt.no_direct is not None:
        note(f"warning: {hunt.no_direct}; everything is read through the page cache")
    hunt = hunting.run(hunt, out)
    click.echo(hunting.to_json(hunt) if as_json else _table(hunt), nl=not as_json)
    if hunt.state == "interrupted":
        note("interrupted: verdicts are on what was measured until then")
        sys.exit(130)
    if hunt.failure is not None:
        raise BenchError(f"{hunt.failure}; verdicts are on what was measured until then", where=shown(file))


def _table(hunt: Hunt) -> str:
    lines = []
    for found in hunt.judgements:
        lines.append(f"{found.verdict.value:<14} {found.suspect:<15} {found.claim}")
        lines.append(f"{'':<30} {found.evidence}")
    read = sum(s.nbytes for s in hunt.stretches) / MIB
    seconds = sum(s.seconds for s in hunt.stretches)
    return "\n".join([*lines, f"{read:.0f} MiB read in {seconds:.1f} s, {len(hunt.stretches)} stretches"])
