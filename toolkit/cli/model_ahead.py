"""`moe-madv model ahead`: what reading ahead can win, simulated on recorded routing."""

from __future__ import annotations

from pathlib import Path

import click

from toolkit.cli.model_evict import hand_out, shares
from toolkit.console import note


@click.command("ahead")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="TRACE...")
@click.option("--compute", required=True, type=click.FloatRange(min=0, min_open=True), help="Of a token in memory, ms.")
@click.option("--disk", required=True, type=click.FloatRange(min=0, min_open=True), help="Reads experts, MiB/s.")
@click.option("--capacity", default="20%,30%", show_default=True, callback=shares, help="Shares of all experts.")
@click.option(
    "--experts-share",
    default=0.65,
    show_default=True,
    type=click.FloatRange(0, 1),
    help="Of the compute, in the matmuls of selected experts.",
)
@click.option(
    "--shared-share",
    default=0.0,
    show_default=True,
    type=click.FloatRange(0, 1),
    help="The same of shared experts, which every token uses.",
)
@click.option("--expert-bytes", metavar="SIZE", help="Of one expert.  [default: what the trace says]")
@click.option(
    "--out", type=click.Path(path_type=Path, dir_okay=False), help="JSON file; its tables go beside it as .md."
)
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def ahead(
    files: tuple[Path, ...],
    compute: float,
    disk: float,
    capacity: tuple[int, ...],
    experts_share: float,
    shared_share: float,
    expert_bytes: str | None,
    out: Path | None,
    as_json: bool,
) -> None:
    """Simulate a token's time when a layer's reads start 0, 1 or 2 layers early, and in which order it computes.

    It is the limit of a machine where reads and compute are never in each other's way: what `bench run` measures
    above it is overhead, what it simulates above the larger of disk and compute alone is bad luck of the routing.
    TRACE is a trace file of a run, or a recorded routing (.npz) with --expert-bytes.

    \b
    Example:
      moe-madv bench run demo.gguf --arms stock,cache --trace demo.npz
      moe-madv model ahead demo.npz --compute 38 --disk 2000
      moe-madv model ahead qwen3.npz --expert-bytes 2.6MiB --compute 38 --disk 2000 --out results/ahead.json
    """
    from toolkit.bench.limits import parse_size
    from toolkit.model import ahead as study
    from toolkit.model import trace

    if experts_share + shared_share > 1:
        raise click.UsageError("--experts-share and --shared-share are parts of one compute: more than 1 together")
    machine = study.Machine(compute_ms=compute, experts_share=experts_share, shared_share=shared_share, disk_mib_s=disk)
    found = study.study(
        [trace.read(file) for file in files],
        capacity,
        machine,
        expert_bytes=None if expert_bytes is None else parse_size(expert_bytes),
        progress=note,
    )
    hand_out(study.as_json(found, machine), study.as_markdown(found, machine), out, as_json)
