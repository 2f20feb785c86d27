"""A table that llama.cpp reads by the row keeps its advice and its absent pages, whatever is done to the experts."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gemma4_model
import pytest
from click.testing import CliRunner
from gemma4_model import PLACES
from probe import probe

from toolkit import results
from toolkit.bench import lab
from toolkit.bench.pagecache import evict
from toolkit.bench.plan import MODES, STOCK, Arm
from toolkit.bench.select import arms_by_name
from toolkit.cli import cli
from toolkit.config import patches_dir
from toolkit.console import MIB
from toolkit.errors import MachineError
from toolkit.model.gguf_header import TensorInfo
from toolkit.model.layout import Access, read_model
from toolkit.model.synth import prescription
from toolkit.patch.series import load_series
from toolkit.patch.upstream import load_pin, pristine

pytestmark = pytest.mark.build

PAGE = os.sysconf("SC_PAGESIZE")
ROW = 4 * 1024 // 32 * 34  # bytes: four layers of 1024 values, Q8_0
READ_AHEAD_KB = 128
N_PROMPT, N_TOKENS = 4, 4
# as for a model larger than memory: not read at the load, and more experts than the cache may hold
LARGE = {"MOE_MADV_LOAD": "off", "MOE_MADV_CACHE_MIB": "2"}


@dataclass(frozen=True, kw_only=True)
class Table:
    """Where the table lies: pages of the file, the outer ones shared with its neighbours."""

    model: Path
    info: TensorInfo

    @property
    def pages(self) -> tuple[int, int]:
        assert self.info.nbytes is not None
        return self.info.offset // PAGE, -(-(self.info.offset + self.info.nbytes) // PAGE)

    @property
    def last(self) -> int:
        return self.pages[1] - self.pages[0] - 1

    def of_rows(self, rows: Sequence[int]) -> set[int]:
        """Pages of these rows, counted from the table's first."""
        begins = [self.info.offset + row * ROW for row in rows]
        return {page - self.pages[0] for b in begins for page in range(b // PAGE, (b + ROW - 1) // PAGE + 1)}

    def near_its_ends(self, pages: set[int]) -> bool:
        """A fault on a neighbour reads around itself, twice as far as the device says after a sequential advice."""
        window = 2 * READ_AHEAD_KB * 1024 // PAGE
        return all(page < window or page > self.last - window for page in pages)


@pytest.fixture(scope="module")
def disk() -> Iterator[Path]:
    """A disk of its own, so that the read-ahead is known."""
    try:
        with lab.fast_disk(128 * MIB, read_ahead_kb=READ_AHEAD_KB) as folder:
            yield folder
    except MachineError as e:
        pytest.skip(str(e))


@pytest.fixture(scope="module")
def tables(disk: Path, real_home: Path) -> dict[str, Table]:
    vocab = pristine(load_pin(), real_home).llama / "models" / "ggml-vocab-qwen2.gguf"
    found = {}
    for i, place in enumerate(PLACES):
        model = gemma4_model.write(disk / f"gemma4-{i}.gguf", vocab, place)
        (info,) = (t.info for t in read_model(model).tensors if t.info.name == gemma4_model.TABLE)
        found[place] = Table(model=model, info=info)
    return found


@pytest.fixture(scope="module")
def arms(both_wheels: Path) -> Sequence[Arm]:
    return arms_by_name([STOCK, *MODES], load_pin(), load_series(patches_dir()), both_wheels)


def cold(arm: Arm, table: Table, scenario: str, env: dict[str, str] | None = None, **job: Any) -> dict[str, Any]:
    assert evict([table.model]).cold
    settings: dict[str, Any] = {
        "model": str(table.model),
        "pages": table.pages,
        "lazy_mode": "on",
        "n_threads": 1,
        **job,
    }
    return probe(arm, scenario, LARGE | (env or {}), **settings)


def tokens_of(table: Table) -> dict[str, Any]:
    tokens = prescription(table.model).tokens
    return {"prompt": list(tokens[:N_PROMPT]), "tokens": list(tokens[N_PROMPT : N_PROMPT + N_TOKENS])}


def test_the_table_lies_where_its_name_says(tables: dict[str, Table]) -> None:
    neighbours = {
        PLACES[0]: ("blk.0.ffn_gate_exps.weight", "blk.0.ffn_up_exps.weight"),
        PLACES[1]: ("token_embd.weight", "per_layer_model_proj.weight"),
    }
    for place, table in tables.items():
        layout = read_model(table.model)
        names = [t.info.name for t in layout.tensors]
        i = names.index(gemma4_model.TABLE)
        assert (names[i - 1], names[i + 1]) == neighbours[place]
        # 4096 tokens and three control tokens, each with a row of the table and one of 256 values
        assert layout.nbytes(Access.ROW_SPARSE) == 4099 * (ROW + 256 // 32 * 34)


@pytest.mark.parametrize("place", PLACES)
def test_only_the_rows_of_the_tokens_are_read_and_the_advice_stays(
    place: str, tables: dict[str, Table], arms: Sequence[Arm]
) -> None:
    table = tables[place]
    tokens = tokens_of(table)
    rows = table.of_rows(tokens["prompt"] + tokens["tokens"])
    stock = cold(arms[0], table, "rows", **tokens)
    assert stock["lazy"] == 1
    # llama.cpp's own advice, on every page that holds a byte of the table
    assert [len(changes) for changes in stock["advice"]] == [1, 1]
    (((_, flags),), _) = stock["advice"]
    assert "rr" in flags.split()
    assert rows <= set(stock["resident"])

    for arm in arms[1:]:
        others = [mode for mode in ("off", "cache", "hint", "overlap") if mode != arm.mode]
        found = cold(arm, table, "rows", switch=[*others, arm.mode], **tokens)
        assert set(found["logits"]) == set(stock["logits"]), arm.name
        assert found["lazy"] == 1
        # after the load, after tokens, after each switch, and after tokens in each mode
        assert len(found["advice"]) == 2 + 2 * (len(others) + 1)
        assert [changes for changes in found["advice"] if changes != [[0, flags]]] == [], arm.name

        read = set(found["resident"])
        assert rows <= read, arm.name
        assert table.near_its_ends(read - rows), arm.name
        assert table.near_its_ends(set(found["resident_after"]) - rows), arm.name
        if place == PLACES[0] and arm.name in ("hint", "overlap", "cache"):
            # the experts beside it are read by hints and direct reads alone: the shared pages at most
            assert read - rows <= {0, table.last}, arm.name
            assert read <= set(stock["resident"]) | {0, table.last}, arm.name

        counters = found["counters"]
        if arm.name in ("hint", "overlap"):
            assert counters["calls"] > 0
        elif arm.name == "cache":
            assert counters["reads"] + counters["bytes_copied"] > 0
        assert counters["errors"] == 0


@pytest.mark.parametrize("place", PLACES)
def test_locked_weights_beside_the_table_share_one_page_with_it(
    place: str, tables: dict[str, Table], arms: Sequence[Arm]
) -> None:
    table = tables[place]
    overlap = next(arm for arm in arms if arm.name == "overlap")
    found = cold(overlap, table, "rows", {"MOE_MADV_LOCK_MIB": "64"}, **tokens_of(table))
    # all that is used for every token: 6 MB
    assert found["counters"]["bytes_locked"] > 4 * MIB
    after = found["advice"][1]
    locked = [page for page, flags in after if "lo" in flags.split()]
    assert all("rr" in flags.split() for _, flags in after)
    assert all(page in (0, table.last) for page in locked)
    rows = table.of_rows([*tokens_of(table)["prompt"], *tokens_of(table)["tokens"]])
    assert table.near_its_ends(set(found["resident"]) - rows)


def test_without_a_mapping_of_the_model_the_table_has_one_and_is_left_alone(
    tables: dict[str, Table], arms: Sequence[Arm]
) -> None:
    table = tables[PLACES[0]]
    tokens = tokens_of(table)
    rows = table.of_rows(tokens["prompt"] + tokens["tokens"])
    stock = cold(arms[0], table, "rows", load_mode=0, **tokens)
    for arm in arms[1:]:
        found = cold(arm, table, "rows", load_mode=0, **tokens)
        assert found["logits"] == stock["logits"], arm.name
        assert found["advice"] == stock["advice"], arm.name
        assert rows <= set(found["resident"])
        asked = ("slices", "calls", "bytes_hinted", "reads", "bytes_locked", "errors")
        assert {name: found["counters"][name] for name in asked} == dict.fromkeys(asked, 0), arm.name
        assert found["counters"]["mappings"] == 1


@pytest.mark.parametrize(
    "name",
    [
        STOCK,
        "off",
        "madv",
        "hint",
        "overlap",
        "cache",
    ],
)
def test_a_batch_of_embeddings_reads_one_row(name: str, tables: dict[str, Table], arms: Sequence[Arm]) -> None:
    """As of an image: the graph has a view of the first row instead of rows by the token."""
    table = tables[PLACES[0]]
    arm = next(arm for arm in arms if arm.name == name)
    found = cold(arm, table, "embedded", embd=256)
    stock = cold(arms[0], table, "embedded", embd=256)
    assert found["result"] == stock["result"] == 0
    assert found["logits"] == stock["logits"]
    assert table.of_rows([0]) <= set(found["resident"])
    assert table.near_its_ends(set(found["resident"]))


def test_a_comparison_says_how_tables_were_read(
    tables: dict[str, Table], both_wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOE_MADV_HOME", str(both_wheels))
    model = shutil.copy(tables[PLACES[0]].model, tmp_path / "gemma4.gguf")
    plans: dict[str | None, Any] = {}
    for lazy in ("on", None):
        out = tmp_path / f"{lazy}.jsonl"
        args = ["bench", "run", str(model), "--arms", "stock,off,cache", "-p", "16", "-n", "4"]
        options = ["--lazy-mode", lazy] if lazy else []
        done = CliRunner().invoke(
            cli, [*args, "-t", "1", "--blocks", "1", "--out", str(out), "--json", *options], catch_exceptions=False
        )
        assert done.exit_code == 0, done.output
        assert {c["outputs_equal"] for c in json.loads(done.stdout)["comparisons"]} == {True}
        (run,) = results.read([out])
        plans[lazy] = run.header["plan"]
        assert {s["status"] for s in run.samples} == {"ok"}
        assert run.checks[0]["experts_match"] is True
    assert plans["on"]["lazy_mode"] == "on"
    assert "lazy_mode" not in plans[None]
