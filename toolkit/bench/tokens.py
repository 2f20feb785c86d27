"""The forced token list of a comparison: from the model's own prescription, a prompt file, or a built-in text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from toolkit.bench.check import require_done
from toolkit.bench.launch import launch
from toolkit.bench.limits import Budget
from toolkit.bench.plan import Arm, Tokens
from toolkit.errors import BenchError
from toolkit.model.synth import Prescription

_BUILT_IN = Path(__file__).with_name("text.txt")


def prescribed(found: Prescription, n_prompt: int, n_gen: int, n_depth: int = 0) -> Tokens:
    """The end of the trace's prompt, as depth and prompt, and the start of its decode: neighbouring positions."""
    prompt_room, gen_room = found.n_prompt, len(found.tokens) - found.n_prompt
    if n_depth + n_prompt > prompt_room or n_gen > gen_room:
        asked = f"{n_depth} + {n_prompt}" if n_depth else str(n_prompt)
        fewer = min(n_prompt, max(0, prompt_room - n_depth))
        raise BenchError(
            f"the model prescribes {prompt_room} prompt and {gen_room} decode tokens, asked for {asked} and {n_gen}",
            hint=f"use -p {fewer} -n {min(n_gen, gen_room)}, or make a model with a longer trace",
        )
    middle, last = prompt_room, prompt_room + n_gen
    first = middle - n_prompt - n_depth
    return Tokens(
        depth=tuple(map(int, found.tokens[first : first + n_depth])),
        prompt=tuple(map(int, found.tokens[first + n_depth : middle])),
        gen=tuple(map(int, found.tokens[middle:last])),
        source="prescribed by the model",
        experts=found.experts[first:last],
    )


def from_text(
    arm: Arm,
    job: dict[str, Any],
    unlimited: Budget,
    n_prompt: int,
    n_gen: int,
    prompt_file: Path | None,
    n_depth: int = 0,
) -> Tokens:
    """A real text in the model's own tokens: depth, prompt, and what is forced in decode, one after the other."""
    path = prompt_file or _BUILT_IN
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise BenchError(f"cannot read the prompt file: {e}", where=path) from e
    outcome = launch(arm, {**job, "text": text}, unlimited)
    require_done(arm, outcome)
    ids = outcome.tokens
    start, end = n_depth + n_prompt, n_depth + n_prompt + n_gen
    if len(ids) < end:
        asked = f"-d {n_depth}, -p {n_prompt}" if n_depth else f"-p {n_prompt}"
        raise BenchError(
            f"the text has {len(ids)} tokens, {asked} and -n {n_gen} need {end}",
            where=path,
            hint="pass a longer text with --prompt FILE",
        )
    source = "built-in text" if prompt_file is None else f"text of {path.name}"
    return Tokens(depth=ids[:n_depth], prompt=ids[n_depth:start], gen=ids[start:end], source=source)
