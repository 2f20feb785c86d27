"""`moe-madv doctor`: what this machine will do to a result."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import click

from toolkit.console import note


@click.command()
@click.argument("model", required=False, type=click.Path(path_type=Path))
@click.option("--budget", metavar="SIZE", help="Predict for a run with this much memory, such as 2.5GiB.")
@click.option("--no-read", is_flag=True, help="Do not time the disk and the memory.")
@click.option("--fix", is_flag=True, help="Offer to change each setting that spoils results.")
@click.option("--yes", is_flag=True, help="With --fix: change without asking.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def doctor(model: Path | None, budget: str | None, no_read: bool, fix: bool, yes: bool, as_json: bool) -> None:
    """Say what this machine will do to a result, and the command that changes it.

    With MODEL, of which only the header and some blocks are read, also whether it fits and what decode to expect.
    Takes about ten seconds and reads at most 1.3 GiB. Nothing is changed without --fix, and then only what can be
    put back: the undo command is printed.

    \b
    Example:
      moe-madv doctor
      moe-madv doctor demo.gguf --budget 2.5GiB
      sudo moe-madv doctor demo.gguf --fix
      moe-madv doctor demo.gguf --json --no-read
    """
    from toolkit.bench.limits import parse_size
    from toolkit.doctor import fix as fixing
    from toolkit.doctor import report as reports
    from toolkit.doctor.diagnose import again, diagnose
    from toolkit.doctor.finding import Finding
    from toolkit.errors import MachineError
    from toolkit.model.layout import read_model

    if yes and not fix:
        raise click.UsageError("--yes goes with --fix")
    if fix and not yes and not sys.stdin.isatty():
        raise click.UsageError("--fix asks before each change and there is no terminal: add --yes")
    if budget is not None and model is None:
        raise click.UsageError("--budget goes with MODEL")
    limit = None if budget is None else parse_size(budget)
    layout = None if model is None else read_model(model)
    report = diagnose(layout, budget=limit, read_disk=not no_read)

    def consent(finding: Finding) -> bool:
        note(f"{finding.key}: {finding.what}. {finding.effect}")
        return yes or click.confirm(f"run  {finding.command}", err=True)

    changes = fixing.apply(report.findings, consent) if fix else []
    if any(change.done for change in changes):
        report = again(report, layout, budget=limit)
    report = dataclasses.replace(report, changes=tuple(changes))

    note(reports.summary(report.findings))
    # a path in a command may hold bytes that the terminal's encoding cannot show
    encoding = sys.stdout.encoding or "utf-8"
    text = json.dumps(reports.as_json(report), indent=2) if as_json else reports.as_text(report)
    click.echo(text.encode(encoding, "backslashreplace").decode(encoding))
    failed = [change for change in changes if change.why not in (None, "declined")]
    if failed:
        raise MachineError(
            f"not changed: {', '.join(change.key for change in failed)}: {failed[0].why}",
            hint="repeat as root: sudo moe-madv doctor --fix",
        )
