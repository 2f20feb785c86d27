"""Context before the tests: the same computation as a prompt, without being timed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from toolkit.bench import limits
from toolkit.bench.check import GREEDY_TOKENS, check_arms
from toolkit.bench.launch import Outcome, job_of, launch
from toolkit.bench.plan import Arm, Conditions
from toolkit.bench.select import arms_by_name
from toolkit.bench.tokens import prescribed
from toolkit.config import patches_dir
from toolkit.errors import BenchError
from toolkit.model.layout import read_model
from toolkit.model.synth import prescription
from toolkit.patch.series import load_series
from toolkit.patch.upstream import load_pin

pytestmark = pytest.mark.build

CONDITIONS = Conditions(blocks=1, n_batch=16, n_ubatch=16, cold=False, n_threads=2)


@pytest.fixture(scope="module")
def arms(both_wheels: Path) -> Sequence[Arm]:
    return arms_by_name(["stock", "hint"], load_pin(), load_series(patches_dir()), both_wheels)


def _run(arm: Arm, model: Path, **job: object) -> Outcome:
    with limits.memory_budget(None) as unlimited:
        outcome = launch(arm, job_of(read_model(model), CONDITIONS, 32) | job, unlimited)
    assert outcome.reason is None
    return outcome


def test_decode_at_a_depth_is_decode_after_a_prompt_of_the_same_tokens(tiny: Path, arms: Sequence[Arm]) -> None:
    tokens = prescribed(prescription(tiny), 20, 4).all
    prompt = _run(arms[0], tiny, tokens=tokens, n_depth=0, n_prompt=20).tests
    depth = _run(arms[0], tiny, tokens=tokens, n_depth=20, n_prompt=0).tests
    assert [test["test"] for test in prompt] == ["pp20", "tg4"]
    assert [test["test"] for test in depth] == ["tg4 @ d20"]
    assert depth[0]["logits_sha256"] == prompt[1]["logits_sha256"]
    parts = prescribed(prescription(tiny), 8, 4, 12)
    assert (len(parts.depth), parts.all) == (12, tokens)


def test_prompt_and_decode_of_a_run_both_start_from_the_depth_as_in_llama_bench(
    tiny: Path, arms: Sequence[Arm]
) -> None:
    tokens = prescribed(prescription(tiny), 8, 4, 12)
    both = _run(arms[0], tiny, tokens=tokens.all, n_depth=12, n_prompt=8).tests
    assert [test["test"] for test in both] == ["pp8 @ d12", "tg4 @ d12"]
    prompt, decode = (
        _run(arms[0], tiny, tokens=[*tokens.depth, *rest], n_depth=12, n_prompt=n).tests[0]
        for rest, n in ((tokens.prompt, 8), (tokens.gen, 0))
    )
    assert [test["test"] for test in (prompt, decode)] == ["pp8 @ d12", "tg4 @ d12"]
    assert [test["logits_sha256"] for test in both] == [prompt["logits_sha256"], decode["logits_sha256"]]
    # without a depth decode goes on from the prompt
    after = _run(arms[0], tiny, tokens=[*tokens.depth, *tokens.gen], n_depth=0, n_prompt=12).tests[1]
    assert (after["test"], after["logits_sha256"]) == ("tg4", decode["logits_sha256"])


def test_a_context_is_of_the_size_asked_for_or_refused(tiny: Path) -> None:
    layout = read_model(tiny)
    fields = {"blocks": 1, "n_batch": 16, "n_ubatch": 16, "cold": False}
    assert job_of(layout, Conditions(**fields, n_ctx=40), 32)["n_ctx"] == 40  # type: ignore[arg-type]
    assert job_of(layout, Conditions(**fields), 300)["n_ctx"] == 512  # type: ignore[arg-type]
    with pytest.raises(BenchError, match="context of 31 tokens does not hold the 32"):
        job_of(layout, Conditions(**fields, n_ctx=31), 32)  # type: ignore[arg-type]


def test_the_greedy_text_is_that_of_the_baseline_and_each_token_the_likeliest(tiny: Path, arms: Sequence[Arm]) -> None:
    tokens = prescribed(prescription(tiny), 8, 4)
    job = job_of(read_model(tiny), CONDITIONS, 32) | {"n_prompt": 8}
    with limits.memory_budget(None) as unlimited:
        rows = check_arms(arms, tokens, job, unlimited)
    assert [row["greedy_equal"] for row in rows] == [True, True]
    assert rows[1]["text"].endswith(f", greedy text of {GREEDY_TOKENS} tokens equal")

    # the same by forcing the text that came out: every token is the likeliest after those before it
    going_on = _run(arms[0], tiny, tokens=tokens.all, n_prompt=8, n_greedy=6).tokens
    forced = _run(arms[0], tiny, tokens=[*tokens.all, *going_on], n_prompt=8).tests[1]["greedy"]
    assert tuple(forced[3:9]) == going_on
    # a context that is full ends it
    assert _run(arms[0], tiny, tokens=tokens.all, n_prompt=8, n_greedy=6, n_ctx=15).tokens == going_on[:3]
