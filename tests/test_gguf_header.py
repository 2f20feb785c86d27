"""The GGUF header reader: what it reads, what it refuses, and that it stays small on hostile files."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf_builder import ARRAY, BOOL, I32, STRING, U32, U64, Gguf, T, moe

from toolkit.errors import ModelError
from toolkit.model.gguf_header import Skipped, read_header


def refused(path: Path) -> ModelError:
    with pytest.raises(ModelError) as e:
        read_header(path)
    assert e.value.where is not None and str(path) in e.value.where
    assert e.value.hint
    return e.value


def test_reads_a_whole_header(tmp_path: Path) -> None:
    model = moe()
    header = read_header(model.write(tmp_path / "m.gguf"))
    assert (header.version, header.endianness, header.alignment) == (3, "little", 32)
    assert len(header.tensors) == 29
    # experts 3*589,824/3 + shared 73,728 + dense ffn 24,576 + router 6,144 + embedding 4,096 + norms 1,024
    assert sum(t.nbytes or 0 for t in header.tensors) == 589824 + 73728 + 24576 + 6144 + 4096 + 1024
    first = header.tensors[0]
    assert (first.name, first.shape, first.type_name, first.nbytes) == ("token_embd.weight", (64, 16), "F32", 4096)
    assert first.offset == header.data_start  # offset 0 in the file is the first tensor, not a missing one
    assert header.tensors[1].offset == header.data_start + 4096
    assert header.file_size == header.data_start + 699392
    assert header.notes == ()


def test_agrees_with_the_gguf_package(tmp_path: Path) -> None:
    path = tmp_path / "w.gguf"
    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_block_count(1)
    writer.add_array("tokenizer.ggml.tokens", ["a", "bc"])
    writer.add_array("qwen3moe.attention.head_count_kv", [0])
    writer.add_tensor("token_embd.weight", np.zeros((16, 64), np.float32))
    packed = np.zeros((8, 32, 68), np.uint8)  # Q8_0: 64 elements are 2 blocks of 34 bytes
    writer.add_tensor("blk.0.ffn_up_exps.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("output_norm.weight", np.zeros(3, np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    ours = read_header(path)
    theirs = gguf.GGUFReader(path)
    assert ours.data_start == theirs.data_offset
    assert [(t.name, list(t.shape), t.offset, t.nbytes) for t in ours.tensors] == [
        (t.name, [int(n) for n in t.shape], int(t.data_offset), int(t.n_bytes)) for t in theirs.tensors
    ]
    assert ours.metadata["tokenizer.ggml.tokens"] == Skipped(type="string", length=2)
    assert ours.metadata["qwen3moe.attention.head_count_kv"] == (0,)


def test_values_of_every_kind_are_read_or_stepped_over(tmp_path: Path) -> None:
    model = Gguf(
        keys=[
            ("a.u64", U64, 1 << 40),
            ("a.i32", I32, -5),
            ("a.bool", BOOL, True),
            ("a.list", ARRAY, (U32, list(range(300)))),
            ("a.names", ARRAY, (STRING, ["x", "yy"])),
            ("a.empty", ARRAY, (U32, [])),
            ("a.raw", STRING, b"\xff!"),
            ("a.long", STRING, "x" * 70000),
            ("a.tags", ARRAY, (STRING, ["x"] * 2000)),
            ("a.many", ARRAY, (0, [1] * 70000)),
            ("tokenizer.ggml.merges", ARRAY, (STRING, ["a b"] * 5)),
            ("tokenizer.ggml.scores", ARRAY, (6, [0.5] * 7)),
            ("a.last", U32, 9),
        ]
    )
    assert dict(read_header(model.write(tmp_path / "v.gguf")).metadata) == {
        "a.u64": 1 << 40,
        "a.i32": -5,
        "a.bool": True,
        "a.list": tuple(range(300)),
        "a.names": ("x", "yy"),
        "a.empty": (),
        "a.raw": "\\xff!",
        "a.long": Skipped(type="string", length=70000),
        "a.tags": Skipped(type="string", length=2000),
        "a.many": Skipped(type="uint8", length=70000),
        "tokenizer.ggml.merges": Skipped(type="string", length=5),
        "tokenizer.ggml.scores": Skipped(type="float32", length=7),
        "a.last": 9,
    }


@pytest.mark.parametrize(
    ("type_id", "name", "nbytes"),
    [
        (200, "type 200 (unknown)", None),
        (153, "type 153 (unknown)", None),
        (39, "MXFP4", 256 * 2 * 17),  # 256 rows of 64: two blocks of 32 elements, 17 bytes each
        (40, "NVFP4", 256 * 36),  # one block of 64
        (41, "Q1_0", None),  # blocks of 128 do not fit a row of 64
        (42, "Q2_0", 256 * 18),  # one block of 64
    ],
)
def test_new_and_unknown_types_are_listed(tmp_path: Path, type_id: int, name: str, nbytes: int | None) -> None:
    model = moe()
    model.tensors.append(T("blk.9.ffn_up_exps.weight", [64, 32, 8], type_id, 9216))
    header = read_header(model.write(tmp_path / "u.gguf"))
    last = header.tensors[-1]
    assert (last.type_name, last.nbytes) == (name, nbytes)
    assert last.max_nbytes == (9216 if nbytes is None else nbytes)
    assert sum(t.nbytes or 0 for t in header.tensors[:-1]) == 699392
    assert any(last.name in note for note in header.notes) is (nbytes is None)


def test_unknown_type_is_bounded_by_the_next_tensor(tmp_path: Path) -> None:
    model = Gguf(tensors=[T("a.weight", [64], 200, 100), T("b.weight", [8])])
    a, b = read_header(model.write(tmp_path / "u.gguf")).tensors
    assert (a.nbytes, a.max_nbytes) == (None, 128)  # 100 bytes, padded to 32
    assert b.offset == a.offset + 128


@pytest.mark.parametrize("cut", [None, 24])
@pytest.mark.parametrize(
    ("lie", "word"),
    [({"n_keys": 2**32}, "keys"), ({"n_tensors": 2**40}, "tensors"), ({"n_keys": 2**63}, "keys")],
)
def test_promised_counts_are_compared_with_the_bytes_left(
    tmp_path: Path, lie: dict[str, int], word: str, cut: int | None
) -> None:
    model = moe()
    for key, value in lie.items():
        setattr(model, key, value)
    path = model.write(tmp_path / "k.gguf", cut)
    # When both counts are too large for 24 bytes, either may be named.
    assert "promises" in refused(path).what and (cut or word in refused(path).what)


@pytest.mark.parametrize(
    "key",
    [
        ("a", ARRAY, (U32, [1, 2])),
        ("a", ARRAY, (STRING, ["x"])),
        ("a", STRING, "x"),
        ("tokenizer.a", ARRAY, (U32, [1, 2])),
        ("tokenizer.a", ARRAY, (STRING, ["x"])),
    ],
)
@pytest.mark.parametrize("length", [1000, 2**40, 2**64 - 1])
def test_lengths_of_values_are_compared_with_the_bytes_left(tmp_path: Path, key: tuple, length: int) -> None:
    model = Gguf(keys=[key])
    raw = bytearray(model.encode())
    at = 24 + 8 + len(key[0]) + 4 + (4 if key[1] == ARRAY else 0)
    raw[at : at + 8] = length.to_bytes(8, "little")
    path = tmp_path / "l.gguf"
    path.write_bytes(raw)
    assert f"'{key[0]}'" in refused(path).what


def test_hostile_headers_need_little_memory(tmp_path: Path) -> None:
    """A sparse file is large enough for its lies: the reader must still not believe them."""
    paths = []
    for i, (kind, element) in enumerate([(ARRAY, STRING), (ARRAY, U32), (ARRAY, ARRAY)]):
        raw = bytearray(Gguf(keys=[("a.list", kind, (element, []))]).encode())
        at = 24 + 8 + 6 + 4 + 4
        raw[at : at + 8] = (2**31).to_bytes(8, "little")
        path = tmp_path / f"{i}.gguf"
        path.write_bytes(raw)
        os.truncate(path, 1 << 40)
        paths.append(path)
    long_key = bytearray(Gguf(keys=[("a", U32, 1)]).encode())
    long_key[24:32] = (2**33).to_bytes(8, "little")
    paths.append(tmp_path / "key.gguf")
    paths[-1].write_bytes(long_key)
    os.truncate(paths[-1], 1 << 40)
    for i, model in enumerate((Gguf(n_keys=2**33), Gguf(n_tensors=2**33))):
        paths.append(model.write(tmp_path / f"c{i}.gguf"))
        os.truncate(paths[-1], 1 << 40)
    head = bytearray(struct.pack("<4sIQQ", b"GGUF", 3, 0, 500))
    for i in range(500):
        head += len(f"k{i}").to_bytes(8, "little") + f"k{i}".encode() + struct.pack("<IIQ", ARRAY, 0, 1 << 16)
        head += bytes(range(256)) * 256
    paths.append(tmp_path / "many.gguf")
    paths[-1].write_bytes(head)
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_DATA, (256 << 20, 256 << 20))\n"
        "from pathlib import Path; from toolkit.model.gguf_header import read_header\n"
        "from toolkit.errors import ModelError\n"
        "for p in sys.argv[1:]:\n"
        "    try: print(read_header(Path(p)))\n"
        "    except ModelError as e: print('refused', e.what)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, paths)],
        capture_output=True,
        encoding="utf-8",
        timeout=60,
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},  # its threads alone would use up the limit
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    # 2^31 numbers are stepped over (8 GiB of the sparse file); everything else is refused.
    assert [line.startswith("refused") for line in lines] == [True, False, True, True, True, True, False]


def test_kept_and_walked_values_share_a_budget(tmp_path: Path) -> None:
    # 16 arrays of 2^16 are 2^20 elements: the 17th is stepped over, as is a string then
    numbers = [(f"k{i}", ARRAY, (0, [7] * (1 << 16))) for i in range(17)]
    header = read_header(Gguf(keys=[*numbers, ("s", STRING, "x" * 16)]).write(tmp_path / "n.gguf"))
    assert header.metadata["k15"] == (7,) * 65536
    assert header.metadata["k16"] == Skipped(type="uint8", length=65536)
    assert header.metadata["s"] == Skipped(type="string", length=16)

    def empty_strings(*counts: int) -> Path:
        raw = bytearray(struct.pack("<4sIQQ", b"GGUF", 3, 0, len(counts)))
        for i, count in enumerate(counts):
            raw += struct.pack("<Q1sIIQ", 1, b"%d" % i, ARRAY, STRING, count) + bytes(8 * count)
        path = tmp_path / "e.gguf"
        path.write_bytes(raw)
        return path

    walked = read_header(empty_strings(1 << 21, 1 << 20)).metadata
    assert walked["0"] == Skipped(type="string", length=2097152)
    assert walked["1"] == Skipped(type="string", length=1048576)
    assert "4,194,305 strings" in refused(empty_strings(1 << 21, 1 << 20, (1 << 20) + 1)).what


def test_strings_are_stepped_over_across_blocks(tmp_path: Path) -> None:
    lengths = [0, 1, 8170, 3, 8184, 20000, 0, 5] * 20
    strings = ["x" * n for n in lengths]
    model = Gguf(keys=[("tokenizer.a", ARRAY, (STRING, strings)), ("after", U32, 77)])
    path = model.write(tmp_path / "s.gguf")
    header = read_header(path)
    assert header.metadata["tokenizer.a"] == Skipped(type="string", length=160)
    assert header.metadata["after"] == 77


@pytest.mark.parametrize("shape", [[64, 0], [0], [0, 5]])
def test_empty_tensor_is_named_and_counts_nothing(tmp_path: Path, shape: list[int]) -> None:
    model = moe()
    model.tensors[3:3] = [T("z.weight", shape, 0, 0)]
    header = read_header(model.write(tmp_path / "z.gguf"))
    assert sum(t.nbytes or 0 for t in header.tensors) == 699392
    assert header.notes == (f"tensor 'z.weight' is empty: shape {shape}",)


def test_tensor_without_dimensions_is_one_element(tmp_path: Path) -> None:
    header = read_header(Gguf(tensors=[T("s.scale", [], 0, 4)]).write(tmp_path / "s.gguf"))
    assert (header.tensors[0].shape, header.tensors[0].nbytes) == ((), 4)
    assert "s.scale" in header.notes[0]


@pytest.mark.parametrize(
    ("tensor", "word"),
    [
        (T("bad.weight", [1, 1, 1, 1, 1]), "5 dimensions"),
        (T("bad.weight", [1] * 5000), "5,000 dimensions"),
        (T("bad.weight", [2**40, 2**40], 0, 32), "overflows"),
        (T("bad.weight", [2**63], 0, 32), "overflows"),
        (T("bad.weight", [8], 0, 32, 40), "multiple of 32"),
        (T("bad.weight", [8], 0, 32, 0), "before the end"),
        (T("norm.weight", [8]), "two tensors"),
        (T("bad.weight", [8], 0, 32, 1 << 50), "cut short"),
    ],
)
def test_impossible_tensors_are_refused_by_name(tmp_path: Path, tensor: T, word: str) -> None:
    model = Gguf(tensors=[T("norm.weight", [64]), tensor])
    what = refused(model.write(tmp_path / "b.gguf")).what
    assert word in what
    assert str(tensor.name) in what


def test_a_gap_is_no_reason_to_stop(tmp_path: Path) -> None:
    model = Gguf(tensors=[T("a.weight", [8], 0, 64), T("b.weight", [8])])
    assert read_header(model.write(tmp_path / "g.gguf")).notes == (
        "32 unused bytes before 'b.weight'; llama.cpp refuses such a file",
    )


@pytest.mark.parametrize("value", [0, 3, 48, 1 << 30])
def test_bad_alignment(tmp_path: Path, value: int) -> None:
    model = moe()
    model.keys.append(("general.alignment", U32, value))
    assert f"general.alignment is {value}" in refused(model.write(tmp_path / "a.gguf")).what


@pytest.mark.parametrize("alignment", [1, 8, 64, 16384])
def test_alignment_from_the_file(tmp_path: Path, alignment: int) -> None:
    model = moe()
    model.keys.append(("general.alignment", U32, alignment))
    model.alignment = alignment
    header = read_header(model.write(tmp_path / "a.gguf"))
    assert header.alignment == alignment
    assert header.data_start == header.file_size - model.data_bytes()


def test_data_starts_at_the_next_boundary_which_may_be_here(tmp_path: Path) -> None:
    starts = set()
    for length in range(32):
        model = moe()
        model.keys.append(("general.name", STRING, "x" * length))
        header = read_header(model.write(tmp_path / "p.gguf"))
        assert header.data_start == header.file_size - 699392
        starts.add(header.data_start)
    assert len(starts) == 2  # 32 consecutive lengths cross one boundary


_LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 4683074240\n"


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (_LFS, "Git LFS pointer for a file of 4,683,074,240 bytes"),
        (b"<!DOCTYPE html><html>", "web page"),
        (b"\n <HTML>", "web page"),
        (b"tjgg\x03\0\0\0", "GGJT"),
        (b"lmgg", "GGML"),
        (b"PK\x03\x04....", "zip"),
        ((60).to_bytes(8, "little") + b'{"__metadata__":{}}' + b" " * 60, "safetensors"),
        (b"\x1f\x8b\x08", "gzip"),
        (b"", "empty"),
        (bytes(4096), "zeros"),
        (b"hello world", "b'hell'"),
        (b"GG", "ends inside its header"),
    ],
)
def test_what_is_not_a_model_is_named(tmp_path: Path, content: bytes, word: str) -> None:
    path = tmp_path / "n.gguf"
    path.write_bytes(content)
    assert word in refused(path).what


def test_paths_that_are_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no such file" in refused(tmp_path / "absent.gguf").what
    assert "folder" in refused(tmp_path).what
    assert "regular" in refused(Path("/dev/null")).what
    os.mkfifo(tmp_path / "fifo.gguf")  # opening it would wait for a writer
    assert "regular" in refused(tmp_path / "fifo.gguf").what
    with socket.socket(socket.AF_UNIX) as s:
        monkeypatch.chdir(tmp_path)  # the path of a socket is at most 107 bytes long
        s.bind("s")
        assert "regular" in refused(tmp_path / "s").what


# Bytes: header 24; first key 8 + 20 + 4 + 8 + 8 = 48; key 'f' 8 + 1 + 4 + 8 + 40 = 61; then the tensor's entry.
@pytest.mark.parametrize(
    ("cut", "word"),
    [
        (6, "the version needs 4 bytes, 2 are left (2 missing)"),
        (15, "the tensor count needs 8 bytes"),
        (24 + 20, "promises 2 keys"),
        (24 + 48 + 30, "'f' needs 40 bytes, 9 are left (31 missing)"),
        (24 + 48 + 61 + 15, "the name of tensor 1 of 1 needs 13 bytes"),
        (24 + 48 + 61 + 30, "the entry of tensor 'output.weight' needs 8 bytes"),
    ],
)
def test_cut_in_the_header(tmp_path: Path, cut: int, word: str) -> None:
    keys: list = [("general.architecture", STRING, "qwen3moe"), ("f", STRING, "x" * 40)]
    error = refused(Gguf(keys=keys, tensors=[T("output.weight", [64])]).write(tmp_path / "t.gguf", cut))
    assert word in error.what
    assert "again" in (error.hint or "")


@pytest.mark.parametrize(
    ("missing", "tensor"),
    [(1, "blk.3.ffn_down_shexp.weight"), (8192 + 1, "blk.3.ffn_up_shexp.weight"), (699392, "token_embd.weight")],
)
def test_cut_in_the_data_names_the_first_tensor_and_the_missing_bytes(
    tmp_path: Path, missing: int, tensor: str
) -> None:
    model = moe()
    what = refused(model.write(tmp_path / "t.gguf", -missing)).what
    assert f"{missing:,} bytes" in what
    assert repr(tensor) in what


def test_data_of_an_unknown_type_may_not_be_missing_altogether(tmp_path: Path) -> None:
    model = Gguf(tensors=[T("a.weight", [64]), T("b.weight", [64], 200, 64)])
    assert "'b.weight'" in refused(model.write(tmp_path / "t.gguf", -64)).what


def test_versions(tmp_path: Path) -> None:
    model = moe()
    model.version = 2
    assert read_header(model.write(tmp_path / "v.gguf")).version == 2
    for version in (0, 1, 4, 99):
        model.version = version
        assert f"version {version} " in refused(model.write(tmp_path / "v.gguf")).what


def test_big_endian_is_listed(tmp_path: Path) -> None:
    model = moe()
    model.order = ">"
    header = read_header(model.write(tmp_path / "be.gguf"))
    assert (header.endianness, header.version, header.native) == ("big", 3, sys.byteorder == "big")
    assert header.metadata["qwen3moe.expert_count"] == 8
    assert sum(t.nbytes or 0 for t in header.tensors) == 699392


@pytest.mark.parametrize("n_first", [0, 29])
def test_joined_files_are_recognised(tmp_path: Path, n_first: int) -> None:
    model = moe()
    first = Gguf(keys=model.keys, tensors=model.tensors[:n_first]).encode()
    path = tmp_path / "joined.gguf"
    path.write_bytes(first + model.encode())
    error = refused(path)
    assert "joined" in error.what
    assert error.where is not None and f"byte {len(first):,}" in error.where


def test_bytes_after_the_end_are_noted(tmp_path: Path) -> None:
    path = tmp_path / "tail.gguf"
    path.write_bytes(moe().encode() + bytes(100))
    assert read_header(path).notes == ("100 bytes follow the last tensor and belong to none",)


@pytest.mark.parametrize(
    ("model", "word"),
    [
        (Gguf(keys=[(b"a\xff", U32, 1)]), "not UTF-8"),
        (Gguf(tensors=[T(b"\xff.weight", [8])]), "not UTF-8"),
        (Gguf(keys=[("", U32, 1)]), "empty"),
        (Gguf(keys=[("a", U32, 1), ("a", U32, 2)]), "second 'a'"),
        (Gguf(keys=[("a", ARRAY, (ARRAY, [(U32, [1])]))]), "array of type 9"),
    ],
)
def test_broken_keys_and_names(tmp_path: Path, model: Gguf, word: str) -> None:
    assert word in refused(model.write(tmp_path / "b.gguf")).what


def test_undefined_value_type(tmp_path: Path) -> None:
    raw = bytearray(Gguf(keys=[("a", U32, 1)]).encode())
    raw[24 + 8 + 1] = 77
    path = tmp_path / "b.gguf"
    path.write_bytes(raw)
    assert "type 77" in refused(path).what
