"""`moe-madv port`: the series on other versions of llama.cpp."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from toolkit.config import home, patches_dir
from toolkit.console import note
from toolkit.errors import BuildError, PatchError, ToolkitError
from toolkit.patch.port import PORTED, Port
from toolkit.patch.port import port as port_series
from toolkit.patch.replay import HookStatus
from toolkit.patch.series import Series, load_series


@click.command()
@click.argument("targets", nargs=-1, required=True, metavar="TARGET...")
@click.option("--git", "url", metavar="URL", help="The targets are revisions of this llama.cpp repository.")
@click.option("--no-build", is_flag=True, help="Do not compile and run the result.")
@click.option(
    "--model", type=click.Path(path_type=Path), help="MoE model to decode with.  [default: a tiny synthetic one]"
)
@click.option("--write", is_flag=True, help="Save each port that holds as a pin and a variant of the series.")
@click.option(
    "--save",
    type=click.Path(path_type=Path),
    metavar="PREFIX",
    help="Write the matrix of all targets to PREFIX.json and PREFIX.md.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def port(
    targets: tuple[str, ...],
    url: str | None,
    no_build: bool,
    model: Path | None,
    write: bool,
    save: Path | None,
    as_json: bool,
) -> None:
    """Port the series to other versions of llama.cpp, and say for each hook how it went.

    TARGET is a version of llama-cpp-python, or with --git a commit, branch or tag. A hook is applied as it is
    (clean), merged with what upstream changed (three-way), or written at its anchors (anchored); each time it
    has to land in the functions it is in at the pin. What is ported is compiled and decodes a tiny model, whose
    logits have to be those of an unpatched build, bit for bit. No source tree is changed.

    \b
    Example:
      moe-madv port 0.3.16 0.3.35 --no-build
      moe-madv port --git https://example.org/llama.cpp.git master
      moe-madv port 0.3.35 --write
    """
    from toolkit.patch.anchors import load_anchors

    series = load_series(patches_dir())
    anchors = load_anchors(patches_dir(), series)
    rows: list[dict[str, Any]] = []
    failures: list[ToolkitError] = []
    for name in targets:
        try:
            row, failure = _one(name, url, series, anchors, no_build=no_build, model=model, write=write)
        except ToolkitError as e:
            row, failure = {"target": name, "error": e.what}, e
        rows.append(row)
        failures += [failure] if failure else []
        if not as_json:
            click.echo(_text(row))
    if save:
        from toolkit.evidence.matrix import write_matrix

        for path in write_matrix(rows, save):
            note(f"wrote {path}")
    if as_json:
        click.echo(json.dumps({"targets": rows}, indent=2))
    if failures:
        if len(targets) > 1:
            note(f"{len(failures)} of {len(targets)} targets have a problem; the first:")
        raise failures[0]


def _one(
    name: str, url: str | None, series: Series, anchors: Any, *, no_build: bool, model: Path | None, write: bool
) -> tuple[dict[str, Any], ToolkitError | None]:
    from toolkit.patch import ports
    from toolkit.patch.gitrepo import Git
    from toolkit.patch.target import resolve
    from toolkit.patch.upstream import fetch_sdist, load_pin

    pin = load_pin()
    base = fetch_sdist(pin, home())
    target = resolve(name, url, home())
    result = port_series(series, anchors, Git(root=base.llama), pin.commit, target.repository, target.tree.commit, name)
    row = _row(name, result)
    if result.series is None:
        named = ", ".join(f"{h.hook} {h.status.value}" for h in result.hooks if h.status not in PORTED)
        named = named or "the payload's files are in the way"
        hint = next((h.hint for h in result.hooks if h.hint), None)
        return row, PatchError(f"the series has no place in {name}: {named}", where=target.tree.llama, hint=hint)
    if no_build:
        note(f"{name}: not compiled and not run (--no-build)")
    else:
        from toolkit.build.acceptance import accept

        found = accept(result.series, target.tree, model or _tiny_model(base.llama), home())
        row |= {
            "compiled": found.compiled,
            "counters_moved": found.counters_moved,
            "outputs_equal": found.outputs_equal,
            "modes": list(found.modes),
            "problems": list(found.problems),
        }
        if not found.ok:
            return row, BuildError(f"{name} is ported but not accepted: {'; '.join(found.problems)}", where=found.log)
    if write:
        row["written"] = [str(p) for p in ports.write_port(patches_dir(), series, result, target)]
    return row, None


def _tiny_model(llama: Path) -> Path:
    """The synthetic model `tiny`, made on first use."""
    from toolkit.model.shape import PRESETS, routing
    from toolkit.model.synth import Synth

    path = home() / "models" / "tiny.gguf"
    if not path.is_file():
        shape, trace = routing(PRESETS["tiny"], None, 0)
        synth = Synth(shape, trace, vocab=llama / "models" / "ggml-vocab-qwen2.gguf", seed=0, preset="tiny")
        synth.write(path, force=False, advance=lambda _: None)
    return path


def _row(name: str, result: Port) -> dict[str, Any]:
    return {
        "target": name,
        "commit": result.commit,
        "date": result.date,
        "status": result.worst.value,
        "compiled": None,
        "counters_moved": None,
        "outputs_equal": None,
        "series": result.series.digest if result.series else None,
        "hooks": [
            {
                "hook": h.hook,
                "status": h.status.value,
                "file": h.file,
                "line": h.line,
                "functions": list(h.functions),
                "function_changes": list(h.function_changes),
                "upstream": list(h.upstream),
                "detail": h.detail,
                "diff": h.diff,
                "next": h.hint,
            }
            for h in result.hooks
        ],
        "payload": [
            {"file": p.file, "status": p.status.value, "detail": p.detail}
            for p in result.payload
            if p.status is not HookStatus.CLEAN
        ],
        "overlaps": [{"name": o.name, "honest": o.honest} for o in result.overlaps],
    }


def _text(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"{row['target']}  {row['error']}"
    lines = [f"{row['target']}  {row['commit'][:9]}  {row['date']}  {row['status']}"]
    width = max(len(h["hook"]) for h in row["hooks"])
    for h in row["hooks"]:
        place = h["file"] + (f":{h['line']}" if h["line"] else "")
        lines.append(f"  {h['hook']:<{width}}  {h['status']:<9}  {place}")
        more = [f"differs from the pin: {change} lines" for change in h["function_changes"]]
        more += h["upstream"]
        if h["detail"] and h["status"] != HookStatus.CLEAN.value:
            more.append(h["detail"])
        more += h["diff"].split("\n") if h["diff"] else []
        more += [f"next: {h['next']}"] if h["next"] else []
        lines += [f"  {'':<{width}}    {line}" for line in more]
    lines += [f"  payload: {p['file']}: {p['detail']}" for p in row["payload"]]
    lines += [f"  upstream has {o['name']}: {o['honest']}" for o in row["overlaps"]]
    if row["compiled"] is not None:
        said = [f"{key.replace('_', ' ')}: {_yes(row[key])}" for key in ("compiled", "counters_moved", "outputs_equal")]
        lines.append("  " + ", ".join(said))
    lines += [f"  wrote {path}" for path in row.get("written", [])]
    return "\n".join(lines)


def _yes(value: bool | None) -> str:
    return "not run" if value is None else "yes" if value else "no"
