"""`moe-madv fetch`: the pinned upstream, or llama.cpp at another commit."""

from __future__ import annotations

import json

import click

from toolkit.config import home
from toolkit.console import note
from toolkit.patch.download import redact
from toolkit.patch.gitrepo import HEX40
from toolkit.patch.upstream import PROJECT, fetch_sdist, load_pin, tree_dir


@click.command()
@click.option("--sdist", metavar="VERSION", help="A pinned version of llama-cpp-python; default: the pin in use.")
@click.option("--git", "url", metavar="URL", help="Take llama.cpp from this repository instead.")
@click.option("--rev", metavar="REV", help="Commit, branch or tag for --git; default: the pinned commit.")
@click.option("--dry-run", is_flag=True, help="Say what would be fetched, and from where to where.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def fetch(sdist: str | None, url: str | None, rev: str | None, dry_run: bool, as_json: bool) -> None:
    """Fetch the pinned llama-cpp-python with its llama.cpp, and verify hash, commit and files.

    What is there already is verified, not fetched again. A tree at another commit than the pinned one is
    kept apart; `moe-madv patch check --tree` can read it, `moe-madv build` cannot use it.

    \b
    Example:
      moe-madv fetch
      moe-madv fetch --git https://example.org/llama.cpp.git --rev master
    """
    if url == "":
        raise click.UsageError("--git needs a URL or a path")
    if rev and not url:
        raise click.UsageError("--rev needs --git URL")
    if sdist and url:
        raise click.UsageError("--sdist and --git exclude each other")
    pin = load_pin(binding=sdist)
    source = {
        "binding": pin.binding,
        "sdist_sha256": pin.sdist_sha256,
        "pin": pin.commit,
        "source": "git" if url else "sdist",
        "revision": (rev or pin.commit) if url else pin.commit,
    }
    if dry_run:
        target = tree_dir(pin, "pristine", home())
        if source["revision"] != pin.commit:
            # Only the full id names the tree; a branch is resolved when it is fetched.
            from toolkit.patch.mirror import other_tree_dir

            known = HEX40.fullmatch(source["revision"])
            target = other_tree_dir(source["revision"], home()) if known else target.parents[1]
        plan = {**source, "tree": str(target), "present": target.is_dir() and target.name != "trees"}
        if as_json:
            click.echo(json.dumps(plan, indent=2))
        else:
            place = f"{source['revision']} of {redact(url)}" if url else "the configured package index"
            click.echo(f"{PROJECT} {pin.binding}, sha256 {pin.sdist_sha256}")
            click.echo(f"llama.cpp {pin.commit}")
            click.echo(f"from {place}")
            click.echo(f"to {target}" + (" (present)" if plan["present"] else ""))
        return
    if url:
        from toolkit.patch.mirror import fetch_git  # needs git, which help and a dry run do without

        tree = fetch_git(url, rev, pin, home())
    else:
        tree = fetch_sdist(pin, home())
    pinned = tree.commit == pin.commit
    if as_json:
        result = {**source, "tree": str(tree.root), "llama": str(tree.llama), "commit": tree.commit, "pinned": pinned}
        click.echo(json.dumps(result, indent=2))
        return
    click.echo(f"{tree.commit} {tree.root}")
    if pinned:
        note("verified: sha256, commit and files are the pinned ones; next: moe-madv patch apply")
    else:
        note(f"not the pinned commit; next: moe-madv patch check --tree {tree.root}")
