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


def prescribed(found: Prescription, n_prompt: int, n_gen: int) -> Tokens:
    """The end of the trace's prompt and the start of its decode: n_prompt + n_gen neighbouring positions."""
    prompt_room, gen_room = found.n_prompt, len(found.tokens) - found.n_prompt
    if n_prompt > prompt_room or n_gen > gen_room:
        raise BenchError(
            f"the model prescribes {prompt_room} prompt and {gen_room} decode tokens, asked for {n_prompt} and {n_gen}",
            hint=f"use -p {min(n_prompt, prompt_room)} -n {min(n_gen, gen_room)}, or make a model with a longer trace",
        )
    first, middle, last = prompt_room - n_prompt, prompt_room, prompt_room + n_gen
    return Tokens(
        prompt=tuple(map(int, found.tokens[first:middle])),
        gen=tuple(map(int, found.tokens[middle:last])),
        source="prescribed by the model",
        experts=found.experts[first:last],
    )


def from_text(
    arm: Arm, job: dict[str, Any], unlimited: Budget, n_prompt: int, n_gen: int, prompt_file: Path | None
) -> Tokens:
    """A real text in the model's own tokens; the text after the prompt is forced in decode."""
    path = prompt_file or _BUILT_IN
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise BenchError(f"cannot read the prompt file: {e}", where=path) from e
    outcome = launch(arm, {**job, "text": text}, unlimited)
    require_done(arm, outcome)
    ids = outcome.tokens
    if len(ids) < n_prompt + n_gen:
        raise BenchError(
            f"the text has {len(ids)} tokens, -p {n_prompt} and -n {n_gen} need {n_prompt + n_gen}",
            where=path,
            hint="pass a longer text with --prompt FILE",
        )
    source = "built-in text" if prompt_file is None else f"text of {path.name}"
    return Tokens(prompt=ids[:n_prompt], gen=ids[n_prompt : n_prompt + n_gen], source=source)
