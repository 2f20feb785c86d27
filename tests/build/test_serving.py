"""Serving: the patched wheel behind its own OpenAI server and in a plain script, asked as a client would ask."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import requests

from toolkit.bench import limits
from toolkit.bench.limits import memory_budget
from toolkit.bench.plan import STOCK, Arm
from toolkit.bench.select import arms_by_name
from toolkit.config import patches_dir
from toolkit.console import MIB
from toolkit.errors import CommandError, MachineError
from toolkit.model.layout import Access, read_model
from toolkit.model.shape import PRESETS, routing
from toolkit.model.synth import Synth
from toolkit.patch.series import load_series
from toolkit.patch.upstream import load_pin, pristine

pytestmark = pytest.mark.build

ROOT = Path(__file__).parents[2]
MODES = ("hint", "overlap", "cache")
PROMPT, N_TOKENS = "Water flows down the hill", 12
BUDGET = 384 * MIB  # Python and the server need a third of it; the model below has 432 MiB of experts


@pytest.fixture(scope="module")
def model(real_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape, trace = routing(replace(PRESETS["tiny"], layers=8, experts=128, embd=512, ff=512), None, 0)
    out = tmp_path_factory.mktemp("serving") / "wide.gguf"
    vocab = pristine(load_pin(), real_home).llama / "models" / "ggml-vocab-qwen2.gguf"
    Synth(shape, trace, vocab=vocab, seed=0, preset="tiny").write(out, force=False, advance=lambda _: None)
    return out


@contextlib.contextmanager
def server(home: Path, model: Path, *options: str) -> Iterator[dict[str, Any]]:
    """A server by the command a person types; yields what it prints when it is ready."""
    command = [sys.executable, "-m", "toolkit", "serve", str(model), "--port", "0", "--json", *options]
    env = {**os.environ, "MOE_MADV_HOME": str(home)}
    with tempfile.TemporaryFile() as log:  # longer than a pipe holds
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=log, text=True)
        assert process.stdout is not None
        try:
            said = process.stdout.readline()
            log.seek(0)
            assert said, log.read().decode("utf-8", "replace")
            yield json.loads(said)
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=30)


def streamed(url: str) -> list[str]:
    """The pieces of a completion, as server-sent events bring them."""
    body = {"prompt": PROMPT, "max_tokens": N_TOKENS, "temperature": 0, "stream": True}
    pieces: list[str] = []
    with requests.post(f"{url}/v1/completions", json=body, stream=True, timeout=120) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        for line in answer.iter_lines(decode_unicode=True):
            if line == "data: [DONE]":
                return pieces
            if line.startswith("data: "):
                pieces.append(json.loads(line.removeprefix("data: "))["choices"][0]["text"])
    raise AssertionError(f"the stream broke off after {pieces}")


def test_every_arm_streams_the_same_text_within_less_memory_than_the_model_has(both_wheels: Path, model: Path) -> None:
    if limits.detect().name == "none":
        pytest.skip("this machine cannot limit memory")
    layout = read_model(model)
    assert layout.max_nbytes(Access.ROUTED) > BUDGET
    texts: dict[str, list[str]] = {}
    for name in (STOCK, *MODES):
        with server(both_wheels, model, "--arm", name, "--budget", str(BUDGET), "--", "--n_ctx", "256") as row:
            assert (row["arm"], row["budget_bytes"]) == (name, BUDGET)
            texts[name] = streamed(row["url"])
            state = requests.get(f"{row['url']}/moe-madv", timeout=30).json()
        if name == STOCK:
            assert state == {"payload": None, "mode": None, "counters": None}
        else:
            assert state["mode"] == name
            counters = state["counters"]
            # the first token comes out of the prompt's batch, each further one is a batch of its own
            assert counters["groups"] >= N_TOKENS * len(layout.layers)
            assert counters["errors"] == counters["unmapped"] == 0
    assert sum(map(bool, texts[STOCK])) > 1, "one piece is no stream"
    assert texts == dict.fromkeys(texts, texts[STOCK])


def test_a_port_in_use_is_said_before_the_model_is_loaded(both_wheels: Path, tiny: Path) -> None:
    with server(both_wheels, tiny, "--arm", "hint") as row:
        port = row["url"].rpartition(":")[2]
        command = [sys.executable, "-m", "toolkit", "serve", str(tiny), "--port", port]
        env = {**os.environ, "MOE_MADV_HOME": str(both_wheels)}
        second = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=120)
    assert second.returncode == MachineError.exit_code
    assert f"cannot listen on 127.0.0.1:{port}" in second.stderr
    assert "model buffer size" not in second.stderr


def test_what_would_take_the_model_out_of_its_mapping_is_refused(both_wheels: Path, tiny: Path) -> None:
    command = [sys.executable, "-m", "toolkit", "serve", str(tiny), "--", "--lora_path", "some.gguf"]
    env = {**os.environ, "MOE_MADV_HOME": str(both_wheels)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == CommandError.exit_code
    assert "--lora_path: with it the binding reads the whole model into memory" in done.stderr
    assert "model buffer size" not in done.stderr


@pytest.fixture(scope="module")
def arms(both_wheels: Path) -> dict[str, Arm]:
    names = [STOCK, *MODES]
    return {arm.name: arm for arm in arms_by_name(names, load_pin(), load_series(patches_dir()), both_wheels)}


def test_a_script_with_the_high_level_class_gives_the_same_text_in_every_mode(
    arms: dict[str, Arm], tiny: Path, tmp_path: Path
) -> None:
    said = {}
    for name, arm in arms.items():
        command = [str(arm.python), "-I", str(ROOT / "scripts" / "complete"), str(tiny), PROMPT, str(N_TOKENS)]
        done = subprocess.run(command, env={**os.environ, **arm.env}, cwd=tmp_path, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr
        said[name] = done.stdout
    assert said[STOCK].strip()
    assert said == dict.fromkeys(said, said[STOCK])


_REPACKED = """
import llama_cpp, sys
llama_cpp.Llama(sys.argv[1], n_ctx=64, use_mlock=False, verbose=True)
"""


def test_without_our_change_the_high_level_class_copies_the_experts_out_of_the_mapping(
    arms: dict[str, Arm], model: Path, tmp_path: Path
) -> None:
    """Why `serve` exists: on a processor that repacks, a model larger than memory cannot even be loaded."""
    command = [str(arms["hint"].python), "-I", "-c", _REPACKED, str(model)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, errors="replace", check=False)
    assert done.returncode == 0, done.stderr
    sizes = dict(re.findall(r"(\S+) model buffer size = +([0-9.]+) MiB", done.stderr))
    if "CPU_REPACK" not in sizes:
        pytest.skip(f"this processor does not repack Q4_0: {sizes}")
    assert float(sizes["CPU_REPACK"]) * MIB >= read_model(model).max_nbytes(Access.ROUTED)
    if limits.detect().name == "none":
        pytest.skip("this machine cannot limit memory")
    with memory_budget(BUDGET) as budget:
        killed = subprocess.run(budget.command(command), cwd=tmp_path, capture_output=True, check=False)
        assert budget.stat()["oom_kills"]
    assert killed.returncode == -signal.SIGKILL
