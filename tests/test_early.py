"""Early routing: as wrong as asked for, the true routing untouched, and measured from what a run shows."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from click.testing import CliRunner
from numpy.typing import NDArray
from test_synth import make, tensors, write, write_vocabulary

from toolkit.bench.early import measure
from toolkit.bench.plan import Arm, Tokens
from toolkit.bench.tokens import prescribed
from toolkit.cli.model import model
from toolkit.errors import BenchError, ModelError
from toolkit.model.early import overlap, prescribe
from toolkit.model.layout import Routing, read_model
from toolkit.model.routing import Trace, generate
from toolkit.model.shape import PRESETS, Shape, routing
from toolkit.model.synth import prescription

TINY = PRESETS["tiny"]
HARD = replace(TINY, early_accuracy=0.8)


@pytest.fixture(scope="module")
def vocab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vocabulary(tmp_path_factory.mktemp("vocab") / "vocab.gguf")


@pytest.fixture(scope="module")
def hard(vocab: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("models") / "hard.gguf"
    assert write(make(HARD, vocab), out)
    return out


def trace_like_bench() -> Trace:
    return generate(layers=6, n_prompt=16, n_decode=48, n_expert=128, top_k=8, seed=4)


def right(logits: NDArray[Any], experts: NDArray[Any]) -> float:
    """Counted one by one."""
    k = experts.shape[-1]
    rows = zip(logits.reshape(-1, logits.shape[-1]), experts.reshape(-1, k), strict=True)
    return sum(len({*np.argsort(-row)[:k].tolist()} & {*taken.tolist()}) for row, taken in rows) / experts.size


def layer_inputs(path: Path) -> list[NDArray[np.float64]]:
    """What every layer's router sees, [layer][token, in], for any residual beside the codes."""
    told, weights = prescription(path), tensors(path)
    rng = np.random.default_rng(5)
    x = weights["token_embd.weight"][list(told.tokens)].astype(np.float64)
    found = []
    for layer in range(told.experts.shape[1]):
        free = ~np.any(weights[f"blk.{layer}.attn_output.weight"] == 0, axis=1)
        x[:, free] += rng.normal(0, 2, (len(x), int(free.sum())))
        rms = np.sqrt(np.mean(x**2, axis=1, keepdims=True))
        found.append(x / rms * weights[f"blk.{layer}.ffn_norm.weight"])
    return found


# --- What is prescribed


def test_overlap_is_the_share_of_the_true_experts() -> None:
    logits = np.array([[5, 4, 3, 2], [2, 3, 4, 5]])
    assert overlap(logits, np.array([[1, 0], [3, 0]])) == 3 / 4  # the best two are {0, 1} and {2, 3}


@pytest.mark.parametrize("accuracy", [0.6, 0.8, 0.89])
def test_early_logits_are_as_wrong_as_asked_for_and_worse_further_ahead(accuracy: float) -> None:
    trace = trace_like_bench()
    early = prescribe(trace, accuracy, seed=1)
    experts = trace.experts.astype(int)
    assert early.accuracy[0] == pytest.approx(accuracy, abs=0.005)
    assert early.accuracy == pytest.approx(
        (right(early.logits[0][:, 1:], experts[:, 1:]), right(early.logits[1][:, 2:], experts[:, 2:]))
    )
    assert early.accuracy[1] < early.accuracy[0] - 0.02


def test_errors_are_in_late_choices_and_towards_what_tokens_near_use() -> None:
    trace = trace_like_bench()
    logits = prescribe(trace, 0.8, seed=1).logits[0]
    missed, wrong, near = np.zeros(8), 0, 0
    for token in range(8, 56):
        for layer in range(6):
            best = {*np.argsort(-logits[token, layer])[:8].tolist()}
            taken = trace.experts[token, layer].tolist()
            missed += [expert not in best for expert in taken]
            around = {*trace.experts[token - 8 : token + 9, layer].ravel().tolist()}
            wrong += len(best - {*taken})
            near += len((best - {*taken}) & around)
    assert missed[:2].sum() < 0.02 * missed.sum() < missed[7]
    assert missed[7] > 2 * missed[4]
    assert 0.65 < near / wrong < 0.85


# --- What is written


def test_routing_stays_exact_and_early_routing_is_what_was_said(hard: Path, vocab: Path) -> None:
    told, weights = prescription(hard), tensors(hard)
    said = make(HARD, vocab).early
    assert said is not None
    inputs = layer_inputs(hard)
    for ahead, expected in [(0, 1.0), (1, said.accuracy[0]), (2, said.accuracy[1])]:
        found = [
            right(inputs[layer - ahead] @ weights[f"blk.{layer}.ffn_gate_inp.weight"].T, told.experts[:, layer])
            for layer in range(ahead, 4)
        ]
        assert np.mean(found) == pytest.approx(expected, abs=1e-9)
    assert said.accuracy[0] == pytest.approx(0.8, abs=0.01)


def test_the_layer_input_shows_one_code_of_three(hard: Path) -> None:
    for layer, x in enumerate(layer_inputs(hard)):
        codes = x[:, -3 * 64 :].reshape(64, 3, 64)
        assert np.array_equal(np.argwhere(codes), [[t, layer % 3, t] for t in range(64)])


def test_the_trace_is_the_one_without_the_option(hard: Path, vocab: Path) -> None:
    plain = make(TINY, vocab)
    assert np.array_equal(prescription(hard).experts, plain.trace.experts)
    assert "early_accuracy" not in plain.parameters  # files made before the option are still the same
    assert json.loads(gguf.GGUFReader(hard).fields["moe_madv.synth"].contents())["early_accuracy"] == 0.8


def test_a_shared_expert_keeps_its_gate(vocab: Path, tmp_path: Path) -> None:
    write(make(replace(HARD, shared_ff=64), vocab), tmp_path / "m.gguf")
    weights = tensors(tmp_path / "m.gguf")
    for layer in range(4):
        x = weights["token_embd.weight"] * weights[f"blk.{layer}.ffn_norm.weight"]
        gate = x @ weights[f"blk.{layer}.ffn_gate_inp_shexp.weight"]
        assert np.allclose(gate, 1.0, rtol=1e-3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"early_accuracy": 1.0}, "less than 1"),
        ({"early_accuracy": float("nan")}, "less than 1"),
        ({"early_accuracy": 0.4}, "less than 1"),
        ({"early_accuracy": 0.8, "layers": 1}, "none before it"),
        ({"early_accuracy": 0.8, "top_k": 9}, "too few others"),
        ({"early_accuracy": 0.8, "decode": 41}, "65 positions .* need 3 residual dimensions each"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as e:
        routing(replace(TINY, **changes), None, 0)
    assert e.value.hint


def test_the_hint_for_more_positions_works() -> None:
    shape = replace(HARD, decode=41)
    with pytest.raises(ModelError, match="positions") as e:
        routing(shape, None, 0)
    wider = int(str(e.value.hint).split()[2])
    routing(replace(shape, embd=wider), None, 0)


def test_the_command_says_what_it_made(vocab: Path, tmp_path: Path) -> None:
    out = tmp_path / "m.gguf"
    args = ["synth", str(out), "--preset", "tiny", "--early-accuracy", "0.8", "--vocab", str(vocab), "--json"]
    done = CliRunner().invoke(model, args, catch_exceptions=False)
    report = json.loads(done.stdout)
    said = make(HARD, vocab).early
    assert said is not None
    assert report["early_accuracy_by_layers_ahead"] == pytest.approx(said.accuracy)
    assert f"early routing right, by layers ahead: {said.accuracy[0]:.3f}" in done.stderr


# --- What is measured. A program stands for the runtime: it writes what the worker of a real one would.

_RUNTIME = """#!{python}
import json, sys
import numpy as np
job = json.load(open(sys.argv[3], encoding="utf-8"))
if {fail}:
    print(json.dumps({{"reason": "LlamaError: no such model", "log": "tensor missing"}}))
    raise SystemExit(1)
seen = np.load({seen!r})
n = job["n_prompt"]
first = seen["tokens"].tolist().index(job["tokens"][n])
span = slice(first, first + len(job["tokens"]) - n)
np.savez(job["out"], experts=seen["experts"][span], inputs=seen["inputs"][span], layers=np.arange(4))
print("{{}}")
"""


def arm(folder: Path, path: Path, *, fail: bool = False, experts: NDArray[np.int32] | None = None) -> Arm:
    told = prescription(path)
    inputs = np.stack(layer_inputs(path), axis=1).astype(np.float32)
    taken = told.experts if experts is None else experts
    np.savez(folder / "all.npz", experts=taken, inputs=inputs, tokens=np.array(told.tokens))
    python = folder / "python"
    python.write_text(_RUNTIME.format(python=sys.executable, seen=str(folder / "all.npz"), fail=fail), encoding="utf-8")
    python.chmod(0o755)
    return Arm(name="stock", python=python, label="base.cpu", wheel_sha256="0" * 64, payload=None, mode=None)


def some_tokens(path: Path) -> Tokens:
    return prescribed(prescription(path), 24, 40)


def test_measured_is_what_the_routers_say_of_the_inputs(hard: Path, tmp_path: Path) -> None:
    told, weights = prescription(hard), tensors(hard)
    found = measure(read_model(hard), arm(tmp_path, hard), {}, some_tokens(hard))
    assert (found.decode_tokens, found.experts_match) == (40, True)
    inputs = layer_inputs(hard)
    for ahead in found.ahead:
        d = ahead.distance
        by_layer = {
            layer: right(
                inputs[layer - d][24:] @ weights[f"blk.{layer}.ffn_gate_inp.weight"].T, told.experts[24:, layer]
            )
            for layer in range(d, 4)
        }
        assert ahead.by_layer == pytest.approx(by_layer)
        assert ahead.mean == pytest.approx(np.mean([*by_layer.values()]))
    assert [ahead.distance for ahead in found.ahead] == [0, 1, 2]
    assert found.ahead[0].mean == 1.0 > found.ahead[1].mean


def test_other_experts_than_the_prescribed_ones_are_told(hard: Path, tmp_path: Path) -> None:
    experts = prescription(hard).experts.copy()
    experts[:, :, ::-1] = experts.copy()  # another order is the same set
    assert measure(read_model(hard), arm(tmp_path, hard, experts=experts), {}, some_tokens(hard)).experts_match
    experts[30, 2] = [14, 15]
    assert not measure(read_model(hard), arm(tmp_path, hard, experts=experts), {}, some_tokens(hard)).experts_match


def test_a_run_that_fails_says_why(hard: Path, tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="no such model\ntensor missing"):
        measure(read_model(hard), arm(tmp_path, hard, fail=True), {}, some_tokens(hard))


def test_a_model_without_scored_experts_is_refused(hard: Path, tmp_path: Path) -> None:
    layout = read_model(hard)
    dense = replace(layout, layers=tuple(replace(layer, routing=Routing.DENSE) for layer in layout.layers))
    with pytest.raises(BenchError, match="no layer of this model scores experts"):
        measure(dense, arm(tmp_path, hard), {}, some_tokens(hard))


def test_shapes_keep_the_option(tmp_path: Path) -> None:
    experts = np.argsort(np.random.default_rng(2).random((12, 3, 24)), axis=2)[:, :, :5].astype(np.int16)
    np.savez(tmp_path / "t.npz", experts=experts, phase=np.array([0] * 4 + [1] * 8, dtype=np.uint8), n_expert=24)
    shape, _ = routing(replace(HARD, layers=2), tmp_path / "t.npz", 0)
    assert isinstance(shape, Shape)
    assert (shape.early_accuracy, shape.experts, shape.top_k) == (0.8, 24, 5)
