"""Expert trace files: bytes as documented, appending and cut ends, both forms and back, refusals, the command."""

from __future__ import annotations

import json
import os
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from gguf_builder import moe

from toolkit import cli as command_line
from toolkit.errors import ModelError
from toolkit.model import trace
from toolkit.model.layout import read_model
from toolkit.model.routing import generate, statistics
from toolkit.model.trace import Header, TraceWriter

HEADER = Header(model="m.gguf", layers=2, experts=8, top_k=3, expert_bytes=(100, 200))
IDS = np.array([[[0, 1, 2], [3, 4, 5]], [[7, 6, 5], [-1, -1, -1]], [[0, 1, 2], [3, 4, 7]]])


def written(path: Path, header: Header = HEADER, **kinds: Any) -> Path:
    """Two tokens of prompt and one of decode."""
    with TraceWriter(path, header) as w:
        w.append(IDS[:2], phase=0, tokens=[11, 12], **{k: v[:2] for k, v in kinds.items()})
        w.append(IDS[2:], phase=1, tokens=[13], **{k: v[2:] for k, v in kinds.items()})
    return path


def test_the_bytes_are_as_documented(tmp_path: Path) -> None:
    data = written(tmp_path / "a.moetrace").read_bytes()
    magic, version, length = struct.unpack("<8sII", data[:16])
    assert (magic, version) == (b"MOETRACE", 1)
    assert json.loads(data[16 : 16 + length])["expert_bytes"] == [100, 200]
    records = data[16 + length :]
    assert len(records) == 3 * (8 + 2 * 3 * 2)
    assert struct.unpack("<iB3x6H", records[:20]) == (11, 0, 0, 1, 2, 3, 4, 5)
    assert struct.unpack("<iB3x6H", records[20:40]) == (12, 0, 7, 6, 5, 65535, 65535, 65535)
    assert struct.unpack("<iB3x6H", records[40:]) == (13, 1, 0, 1, 2, 3, 4, 7)


def test_what_was_written_is_read_from_the_disk_as_it_is_used(tmp_path: Path) -> None:
    weights = np.linspace(0, 1, IDS.size).reshape(IDS.shape)
    found = trace.read(written(tmp_path / "a.moetrace", replace(HEADER, weights=True), weights=weights))
    assert isinstance(found.records, np.memmap)
    assert found.header == replace(HEADER, weights=True)
    assert np.array_equal(found.experts, IDS)
    assert found.experts.dtype == np.int16
    assert found.records["token"].tolist() == [11, 12, 13]
    assert found.weights is not None
    assert np.allclose(found.weights, weights, atol=1e-3)
    # The hole of layer 1 takes another row of that layer; nothing else changes.
    work = found.workload()
    assert (work.trace.n_prompt, work.trace.n_filled) == (2, 1)
    assert np.array_equal(work.trace.experts[:, 0], IDS[:, 0])


def test_a_cut_record_is_ignored_and_removed_by_the_next_writer(tmp_path: Path) -> None:
    path = written(tmp_path / "a.moetrace")
    whole = path.read_bytes()
    for keep in (1, 19):
        path.write_bytes(whole[: -20 + keep])
        found = trace.read(path)
        assert (len(found.records), found.cut_bytes) == (2, keep)
        with TraceWriter(path, HEADER) as w:
            w.append(IDS[2:], phase=1, tokens=[13])
        assert path.read_bytes() == whole


def test_a_reader_may_come_while_the_writer_writes(tmp_path: Path) -> None:
    path = tmp_path / "a.moetrace"
    with TraceWriter(path, HEADER) as w:
        assert len(trace.read(path).records) == 0
        w.append(IDS[:1], phase=0)
        found = trace.read(path)
        w.append(IDS[1:], phase=1)
        assert (len(found.records), len(trace.read(path).records)) == (1, 3)
        assert found.records["token"].tolist() == [-1]


def test_a_writer_does_not_continue_another_model(tmp_path: Path) -> None:
    path = written(tmp_path / "a.moetrace")
    before = path.read_bytes()
    with pytest.raises(ModelError, match="another model"):
        TraceWriter(path, replace(HEADER, model="other.gguf"))
    other = tmp_path / "text"
    other.write_text("a text that was there before", encoding="utf-8")
    with pytest.raises(ModelError, match="not an expert trace"):
        TraceWriter(other, HEADER)
    assert (path.read_bytes(), other.read_text(encoding="utf-8")) == (before, "a text that was there before")


@pytest.mark.parametrize(
    ("experts", "kinds", "what"),
    [
        (IDS[:, :1], {}, "shape [3, 1, 3]"),
        (IDS[0], {}, "shape [2, 3]"),
        (IDS.astype(float), {}, "type float64"),
        (IDS + 1, {}, "ids are 0..8; the model has 8"),
        (IDS - 1, {}, "ids are -2..6"),
        (IDS, {"weights": IDS}, "weights: False"),
    ],
)
def test_tokens_that_do_not_fit_the_header_leave_the_file_alone(
    tmp_path: Path, experts: Any, kinds: Any, what: str
) -> None:
    path = written(tmp_path / "a.moetrace")
    before = path.read_bytes()
    with TraceWriter(path, HEADER) as w, pytest.raises(ModelError) as e:
        w.append(experts, phase=1, **kinds)
    assert what in e.value.what
    assert path.read_bytes() == before


def rewritten(path: Path, **changes: Any) -> Path:
    """The file with fields of its header changed."""
    data = path.read_bytes()
    _, version, length = struct.unpack("<8sII", data[:16])
    header = {**json.loads(data[16 : 16 + length]), **changes}
    text = json.dumps({k: v for k, v in header.items() if v is not None}).encode()
    path.write_bytes(struct.pack("<8sII", b"MOETRACE", version, len(text)) + text + data[16 + length :])
    return path


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"layers": 0}, "says what cannot be"),
        ({"layers": -2}, "says what cannot be"),
        ({"layers": True}, "says what cannot be"),
        ({"layers": 1 << 40}, "says what cannot be"),
        ({"top_k": 9}, "says what cannot be"),
        ({"experts": 1 << 20}, "says what cannot be"),
        ({"model": 5}, "says what cannot be"),
        ({"weights": "yes"}, "says what cannot be"),
        ({"expert_bytes": [1, 2, 3]}, "says what cannot be"),
        ({"expert_bytes": ["x", 2]}, "says what cannot be"),
        ({"expert_bytes": 7}, "broken"),
        ({"blocks": [1]}, "says what cannot be"),
        ({"experts": None}, "broken"),
        ({"colour": "red"}, "broken"),
    ],
)
def test_headers_that_cannot_be_are_refused(tmp_path: Path, changes: dict[str, Any], what: str) -> None:
    path = rewritten(written(tmp_path / "a.moetrace"), **changes)
    with pytest.raises(ModelError, match=what) as e:
        trace.read(path)
    assert e.value.where == str(path)


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"MOETRACE", "not an expert trace"),
        (struct.pack("<8sII", b"MOETRACE", 2, 0), "trace format 2"),
        (struct.pack("<8sII", b"MOETRACE", 1, 1 << 31) + b"{}", "cut off"),
        (struct.pack("<8sII", b"MOETRACE", 1, 2) + b"[]", "broken"),
        (struct.pack("<8sII", b"MOETRACE", 1, 4) + b"\xff\xfe{}", "broken"),
        (struct.pack("<8sII", b"MOETRACE", 1, 90_000) + b"[" * 90_000, "broken"),
        (b"", "not a routing trace"),
        (b"GGUF and more", "not a routing trace"),
    ],
)
def test_files_that_are_no_trace_are_refused(tmp_path: Path, data: bytes, what: str) -> None:
    path = tmp_path / "x"
    path.write_bytes(data)
    with pytest.raises(ModelError, match=what):
        trace.read(path)


def test_paths_that_are_no_files_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for name in ("fifo", "missing", "."):
        with pytest.raises(ModelError, match="not a file"):
            trace.read(tmp_path / name)
    for name in ("fifo", "."):
        with pytest.raises(ModelError, match="not a file"):
            TraceWriter(tmp_path / name, HEADER)


# --- The other form


def save_npz(path: Path, *, n_prompt: int = 20, **more: Any) -> Path:
    made = generate(layers=4, n_prompt=n_prompt, n_decode=30, n_expert=24, top_k=3, seed=1)
    phase = np.arange(len(made.experts)) >= n_prompt
    arrays = {"experts": made.experts, "phase": phase.astype(np.uint8), "n_expert": np.int32(24), **more}
    np.savez(path, **arrays)
    return path


def test_npz_to_trace_file_and_back_loses_nothing(tmp_path: Path) -> None:
    sizes, weights = np.array([5, 6, 7, 8]), np.random.default_rng(0).random((50, 4, 3)).astype(np.float16)
    first = save_npz(tmp_path / "a.npz", expert_bytes=sizes, dense_bytes=sizes * 2, weights=weights)
    with np.load(first) as arrays:
        experts = arrays["experts"].copy()
        experts[:19, 3] = -1  # not recorded
        np.savez(first, **{**dict(arrays), "experts": experts})
    trace.write(trace.read(first), tmp_path / "b.moetrace")
    trace.write(trace.read(tmp_path / "b.moetrace"), tmp_path / "c.npz")
    with np.load(first) as a, np.load(tmp_path / "c.npz") as c:
        assert set(a.files) == set(c.files)
        for name in a.files:
            assert np.array_equal(a[name], c[name]), name
            assert a[name].dtype == c[name].dtype, name
    header = trace.read(tmp_path / "b.moetrace").header
    assert (header.model, header.expert_bytes, header.dense_bytes) == ("a", (5, 6, 7, 8), (10, 12, 14, 16))
    with pytest.raises(ModelError, match="not an expert trace"):
        TraceWriter(first, header)


def test_tokens_and_layer_numbers_go_along(tmp_path: Path) -> None:
    first = save_npz(tmp_path / "a.npz", token=np.arange(50, dtype=np.int32) * 7, blocks=np.array([1, 2, 5, 6]))
    trace.write(trace.read(first), tmp_path / "b.moetrace")
    trace.write(trace.read(tmp_path / "b.moetrace"), tmp_path / "c.npz")
    found = trace.read(tmp_path / "c.npz")
    assert found.header.blocks == (1, 2, 5, 6)
    assert found.records["token"].tolist() == list(range(0, 350, 7))


def test_what_a_run_selected_is_a_recording_of_the_layers_with_experts(tmp_path: Path) -> None:
    layout = read_model(moe(layers=3, experts=8, top_k=2).write(tmp_path / "m.gguf"))
    # block 0 is dense, and of the prompt's last token alone is everything computed
    ids = np.array([[[-1, -1], [3, 1], [-1, -1]], [[-1, -1], [0, 7], [2, 4]], [[-1, -1], [5, 6], [1, 0]]])
    found = trace.of_run(layout, ids, [11, 12, 13], n_prompt=2, where=tmp_path / "a.npz")
    # gate, up and down of 64 x 32 F32
    sizes = (3 * 64 * 32 * 4,) * 2
    wanted = Header(model="m.gguf", layers=2, experts=8, top_k=2, blocks=(1, 2), expert_bytes=sizes)
    assert found.header == wanted
    for name in ("a.npz", "a.moetrace"):
        trace.write(found, tmp_path / name)
        again = trace.read(tmp_path / name)
        assert again.experts.tolist() == ids[:, 1:].tolist()
        assert again.records["token"].tolist() == [11, 12, 13]
        assert again.records["phase"].tolist() == [0, 0, 1]
        assert (again.header.blocks, again.header.expert_bytes) == ((1, 2), sizes)


def test_a_model_without_experts_has_no_trace(tmp_path: Path) -> None:
    layout = read_model(moe(layers=2, dense=2).write(tmp_path / "m.gguf"))
    with pytest.raises(ModelError, match="no layer of the model has experts"):
        trace.of_run(layout, np.empty((1, 2, 0), np.int32), [1], n_prompt=0, where=tmp_path / "a.npz")


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ({"weights": np.ones((2, 2), np.float16)}, "weights has shape"),
        ({"expert_bytes": np.array([1, 2, 3])}, "expert_bytes must have one number for each of 4 layers"),
        ({"blocks": np.array([1, 2, 3])}, "blocks must have one number for each of 4 layers"),
        ({"token": np.array([1, 2, 3])}, "token has shape"),
        ({"token": np.zeros(50)}, "type float64"),
        ({"phase": np.zeros(50, np.uint8)}, "phase must be 0"),
    ],
)
def test_npz_with_arrays_that_do_not_fit_are_refused(tmp_path: Path, more: Any, what: str) -> None:
    with pytest.raises(ModelError, match=what):
        trace.read(save_npz(tmp_path / "a.npz", **more))


# --- The command


def moe_madv(*args: object) -> str:
    return CliRunner().invoke(command_line.cli, ["model", "trace", *map(str, args)], catch_exceptions=False).stdout


def test_the_command_prints_the_statistics_of_routing(tmp_path: Path) -> None:
    path = save_npz(tmp_path / "a.npz")
    report = json.loads(moe_madv(path, "--json"))
    made = generate(layers=4, n_prompt=20, n_decode=30, n_expert=24, top_k=3, seed=1)
    expected = statistics(made.experts, 20, 24)
    assert report["routing"]["adjacent_jaccard"] == expected.adjacent_jaccard
    assert report["routing"]["lru_hits"]["20"] == expected.lru_hits[20]
    assert (report["prompt_tokens"], report["decode_tokens"], report["layers"]) == (20, 30, 4)
    text = moe_madv(path)
    assert f"seen in the last 8 tokens  {expected.recent_reuse:.3f}" in text
    assert f"LRU hits at 30 %           {expected.lru_hits[30]:.3f}" in text


def test_the_command_converts_and_keeps_what_is_there(tmp_path: Path) -> None:
    path, out = save_npz(tmp_path / "a.npz"), tmp_path / "b.moetrace"
    moe_madv(path, "--to", out)
    assert np.array_equal(trace.read(out).experts, trace.read(path).experts)
    with pytest.raises(ModelError, match="the file exists"):
        moe_madv(path, "--to", out)
    moe_madv(path, "--to", out, "--force")


def test_a_short_trace_has_no_statistics(tmp_path: Path) -> None:
    path = written(tmp_path / "a.moetrace")
    assert json.loads(moe_madv(path, "--json"))["routing"] is None
    assert "rows not recorded          1" in moe_madv(path)
