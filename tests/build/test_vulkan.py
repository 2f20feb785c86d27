"""Layers on a Vulkan device, a software one too: same outputs in every arm, and served.

Only where wheels are there, since their shaders take many minutes: moe-madv build --backend vulkan --arm both.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests

from toolkit import results
from toolkit.bench import limits
from toolkit.bench.launch import job_of, launch
from toolkit.bench.plan import Arm, Conditions
from toolkit.bench.select import arms_by_name
from toolkit.config import patches_dir
from toolkit.errors import BenchError
from toolkit.model.layout import read_model
from toolkit.patch.series import load_series
from toolkit.patch.upstream import load_pin

pytestmark = pytest.mark.build

ROOT = Path(__file__).parents[2]
ARMS = ("stock", "hint", "cache")
N_PROMPT = 40  # from 32 on llama.cpp copies experts to the device and computes them there
TOKENS = [7919 * i % 4000 for i in range(N_PROMPT + 8)]
ALL = 99


def find(names: tuple[str, ...], home: Path, backend: str) -> list[Arm]:
    try:
        return arms_by_name(names, load_pin(), load_series(patches_dir()), home, backend=backend)
    except BenchError as e:
        pytest.skip(f"{e.what}: {e.hint}")


@pytest.fixture(scope="module")
def on_gpu(real_home: Path) -> Iterator[list[Arm]]:
    """The arms, on the first device; a software one is used only when it is chosen."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GGML_VK_VISIBLE_DEVICES", os.environ.get("GGML_VK_VISIBLE_DEVICES", "0"))
        yield find(ARMS, real_home, "vulkan")


def decode(arm: Arm, model: Path, n_gpu_layers: int, logits: Path) -> np.ndarray:
    """Logits [position, n_vocab] of a prompt's end and eight decoded tokens."""
    conditions = Conditions(blocks=1, n_batch=64, n_ubatch=64, cold=False, n_threads=2, n_gpu_layers=n_gpu_layers)
    job = job_of(read_model(model), conditions, len(TOKENS))
    job |= {"tokens": TOKENS, "n_prompt": N_PROMPT, "logits_file": str(logits)}
    with limits.memory_budget(None) as unlimited:
        try:
            outcome = launch(arm, job, unlimited)
        except BenchError as e:
            if "put no layer on a GPU" in e.what:
                pytest.skip(f"no Vulkan device answers: {e.hint}; sudo apt-get install -y mesa-vulkan-drivers")
            raise
    assert outcome.reason is None
    assert outcome.loaded is not None
    assert any(name.startswith("Vulkan") for name in outcome.loaded["buffers"]) == (n_gpu_layers > 0)
    return np.concatenate([np.load(f"{logits}.{test['test']}.npy") for test in outcome.tests])


def test_every_arm_computes_the_same_bits_and_nearly_those_of_the_cpu(
    on_gpu: list[Arm], both_wheels: Path, tiny: Path, tmp_path: Path
) -> None:
    found = {arm.name: decode(arm, tiny, ALL, tmp_path / arm.name) for arm in on_gpu}
    assert len(found["stock"]) == 9
    assert np.isfinite(found["stock"]).all()
    for name in ARMS:
        assert found[name].tobytes() == found["stock"].tobytes(), name
    (cpu,) = find(("stock",), both_wheels, "cpu")
    expected = decode(cpu, tiny, 0, tmp_path / "cpu")
    # other kernels round in another way, and no more
    assert np.abs(found["stock"] - expected).max() < 0.02 * np.abs(expected).max()
    assert (found["stock"].argmax(axis=1) == expected.argmax(axis=1)).all()


def test_bench_run_records_the_device_that_was_chosen(
    on_gpu: list[Arm], real_home: Path, tiny: Path, tmp_path: Path
) -> None:
    decode(on_gpu[0], tiny, ALL, tmp_path / "probe")
    out = tmp_path / "run.jsonl"
    words = ["--backend", "vulkan", "-ngl", str(ALL), "--arms", "stock,hint", "-p", "8", "-n", "4", "-t", "2"]
    command = [sys.executable, "-m", "toolkit", "bench", "run", str(tiny), *words, "--blocks", "1", "--json", "--out"]

    def bench(file: Path, devices: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "MOE_MADV_HOME": str(real_home), "GGML_VK_VISIBLE_DEVICES": devices}
        return subprocess.run([*command, str(file)], cwd=ROOT, env=env, capture_output=True, text=True, check=False)

    done = bench(out, "0")
    assert done.returncode == 0, done.stderr
    assert {c["outputs_equal"] for c in json.loads(done.stdout)["comparisons"]} == {True}
    (run,) = results.read([out])
    assert {arm["label"] for arm in run.header["arms"].values()} == {"base.vulkan", "moe1.vulkan"}
    assert {arm["env"]["GGML_VK_VISIBLE_DEVICES"] for arm in run.header["arms"].values()} == {"0"}
    for sample in run.samples:
        assert any(name.startswith("Vulkan") for name in sample["buffers"])
        assert "CPU_Mapped" in sample["buffers"]  # the experts
    hidden = bench(tmp_path / "hidden.jsonl", "")
    assert hidden.returncode == BenchError.exit_code
    assert "put no layer on a GPU" in hidden.stderr
    assert "GGML_VK_VISIBLE_DEVICES" in hidden.stderr


@contextlib.contextmanager
def serving(home: Path, model: Path, backend: str, *options: str) -> Iterator[str]:
    """URL of a server of the hint arm."""
    words = ["serve", str(model), "--arm", "hint", "--backend", backend, "--port", "0", "--json", "--"]
    command = [sys.executable, "-m", "toolkit", *words, "--n_ctx", "256", *options]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, "MOE_MADV_HOME": str(home)}, stdout=subprocess.PIPE, stderr=log
        )
        assert process.stdout is not None
        try:
            said = process.stdout.readline()
            log.seek(0)
            words_of_server = log.read().decode("utf-8", "replace")
            assert said, words_of_server
            assert ("Vulkan0 model buffer" in words_of_server) == (backend == "vulkan")
            yield json.loads(said)["url"]
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=30)


def test_a_vulkan_arm_serves(on_gpu: list[Arm], real_home: Path, tiny: Path, tmp_path: Path) -> None:
    decode(on_gpu[0], tiny, ALL, tmp_path / "probe")
    body: dict[str, Any] = {"prompt": "Water flows down the hill", "max_tokens": 8, "temperature": 0}
    with serving(real_home, tiny, "vulkan", "--n_gpu_layers", str(ALL)) as url:
        first, second = (requests.post(f"{url}/v1/completions", json=body, timeout=300).json() for _ in range(2))
        state = requests.get(f"{url}/moe-madv", timeout=30).json()
    assert first["usage"]["completion_tokens"] == 8
    assert first["choices"][0]["text"] == second["choices"][0]["text"]
    assert state["mode"] == "hint"
    assert state["counters"]["groups"] > 0  # the experts are still computed here, out of the mapping
    assert state["counters"]["unmapped"] == 0
