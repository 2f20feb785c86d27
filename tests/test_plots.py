from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner
from results_rows import header, rows, write

from toolkit.cli.bench import bench
from toolkit.errors import ResultsError
from toolkit.evidence.compare import compare
from toolkit.evidence.plots import chart, ticks, timelines
from toolkit.results import Row, read

ABBA = [["stock", "hint", "hint", "stock"]] * 3
SPEEDS = [1.9, 2.9, 3.1, 2.1, 2.2, 3.3, 3.5, 2.2, 2.0, 3.2, 3.2, 2.2]
SVG = "{http://www.w3.org/2000/svg}"


def drawn(tmp_path: Path, data: list[Row], head: Row | None = None) -> ElementTree.Element:
    return ElementTree.fromstring(chart(compare(read([write(tmp_path / "r.jsonl", head or header(ABBA), *data)]))))


def texts(svg: ElementTree.Element) -> list[str]:
    return [t.text or "" for t in svg.iter(f"{SVG}text")]


def places(svg: ElementTree.Element, text: str) -> list[float]:
    return [float(t.attrib["x"]) for t in svg.iter(f"{SVG}text") if t.text == text]


@pytest.mark.parametrize(
    ("top", "expected"),
    [
        (3.5, [0, 1, 2, 3, 4]),
        (24.0, [0, 10, 20, 30]),
        (190.0, [0, 50, 100, 150, 200]),
        (0.4, [0, 0.1, 0.2, 0.3, 0.4]),
        (0.0, [0, 1]),
    ],
)
def test_ticks_are_round_and_reach_the_top(top: float, expected: list[float]) -> None:
    assert ticks(top) == pytest.approx(expected)


def test_points_lie_on_the_scale(tmp_path: Path) -> None:
    svg = drawn(tmp_path, rows(["shhs"] * 3, SPEEDS, header(ABBA)))
    dots = [c for c in svg.iter(f"{SVG}circle") if "faster" in c.attrib["class"]]
    # The first panel's scale ends at 4 t/s, the second's at 100 MiB.
    (zero, _), (four,) = places(svg, "0"), places(svg, "4")
    expected = [zero + (four - zero) * v / 4 for v in (2.9, 3.1, 3.3, 3.5, 3.2, 3.2)]
    assert [float(c.attrib["cx"]) for c in dots] == pytest.approx(expected, abs=0.1)


def test_arms_verdicts_and_conditions_are_written_out(tmp_path: Path) -> None:
    shown = texts(drawn(tmp_path, rows(["shhs"] * 3, SPEEDS, header(ABBA))))
    assert {"stock", "hint", "baseline", "tg48: decode, t/s", "MiB read per token"} <= set(shown)
    assert any(re.fullmatch(r"1\.52 \[1\.\d\d, 1\.\d\d\] faster", t) for t in shown)
    assert any(t.startswith("demo.gguf 3.00 GiB · memory budget 2.00 GiB") for t in shown)


def test_no_speed_is_drawn_when_outputs_differ(tmp_path: Path) -> None:
    data = rows(["shhs"] * 3, SPEEDS, header(ABBA))
    data[1]["logits_sha256"] = "ee"
    svg = drawn(tmp_path, data)
    assert "outputs differ" in texts(svg)
    # Six dots of stock in the first panel, twelve of both arms in the second.
    assert len(list(svg.iter(f"{SVG}circle"))) == 18


def test_an_arm_without_a_run_and_odd_names_are_drawn(tmp_path: Path) -> None:
    head = header([["stock", "<hint>"]] * 2)
    data = rows(["s<"] * 2, [1.0, 2.0, 1.1, 2.1], head, mib_per_token=None)
    for row in data:
        if row["arm"] == "<hint>":
            row |= {"status": "failed", "avg_ts": None}
    shown = texts(drawn(tmp_path, data, head))
    assert "<hint>" in shown
    assert "no finished run" in shown


def test_plot_writes_one_self_contained_file(tmp_path: Path) -> None:
    path = write(tmp_path / "r.jsonl", header(ABBA), *rows(["shhs"] * 3, SPEEDS, header(ABBA)))
    out = tmp_path / "chart.svg"
    result = CliRunner().invoke(bench, ["plot", str(path), "--out", str(out)])
    assert result.exit_code == 0, result.output
    text = out.read_text(encoding="utf-8")
    assert text.startswith("<svg ")
    assert "prefers-color-scheme: dark" in text
    assert "href" not in text
    assert result.stdout == ""


def layer(n: int, **times: float) -> Row:
    return {"layer": n, "hint_ms": 0.0, "wait_ms": 0.0, "read_ms": 0.0, "compute_ms": 0.0, "bytes": 0, **times}


def with_layers(layers: dict[str, list[Row]], **more: Row) -> list[Row]:
    data = rows(["shhs"] * 3, SPEEDS, header(ABBA), **more)
    return [{**row, "timeline": layers[row["arm"]]} if row["arm"] in layers else row for row in data]


def heights(svg: ElementTree.Element, css: str) -> list[float]:
    return [float(r.attrib["height"]) for r in svg.iter(f"{SVG}rect") if r.attrib.get("class") == css]


def layers_drawn(tmp_path: Path, data: list[Row]) -> ElementTree.Element:
    return ElementTree.fromstring(timelines(compare(read([write(tmp_path / "r.jsonl", header(ABBA), *data)]))))


def test_layers_are_stacked_and_have_their_bytes_and_reads_below(tmp_path: Path) -> None:
    first = layer(0, hint_ms=20.0, compute_ms=50.0, wait_ms=30.0, read_ms=60.0, bytes=2 << 20, late=1, in_time=3)
    second = layer(1, hint_ms=10.0, compute_ms=40.0, bytes=1 << 20, in_time=2)
    svg = layers_drawn(tmp_path, with_layers({"hint": [first, second]}))
    # the highest layer reaches 100 ms, the last mark; the strip is 164 high, the two below it 48
    assert heights(svg, "asking") == pytest.approx([0.2 * 164, 0.1 * 164], abs=0.1)
    assert heights(svg, "compute") == pytest.approx([0.5 * 164, 0.4 * 164], abs=0.1)
    assert heights(svg, "wait") == pytest.approx([0.3 * 164], abs=0.1)
    # 2 and 1 MiB, then 3 and 2 reads in time with 1 late on top: the marks end at 2 MiB and at 4 reads
    assert heights(svg, "amount") == pytest.approx([48, 24, 36, 24], abs=0.1)
    assert heights(svg, "late") == pytest.approx([12], abs=0.1)
    reading = [float(e.attrib["y1"]) for e in svg.iter(f"{SVG}line") if e.attrib["class"] == "reading"]
    (zero, *_), (hundred,) = (
        [float(t.attrib["y"]) - 4 for t in svg.iter(f"{SVG}text") if t.text == mark] for mark in ("0", "100")
    )
    assert reading == pytest.approx([zero + 0.6 * (hundred - zero)], abs=0.1)
    shown = texts(svg)
    assert "tg48: decode, hint, mean of its runs" in shown
    assert "2 layers · computing 90 ms · asking 30 ms · waiting 30 ms · reading 60 ms · 3 MiB · " in " ".join(shown)
    assert shown.count("▾") == 1


def test_arms_of_a_test_share_a_scale_and_what_was_not_counted_has_no_strip(tmp_path: Path) -> None:
    arms = {"stock": [layer(3, compute_ms=100.0)], "hint": [layer(3, compute_ms=25.0)]}
    svg = layers_drawn(tmp_path, with_layers(arms))
    assert heights(svg, "compute") == pytest.approx([164, 41], abs=0.1)
    assert heights(svg, "amount") == []
    assert not {"MiB read", "reads, hatched: late"} & set(texts(svg))


def test_an_arm_whose_outputs_differ_has_no_layers(tmp_path: Path) -> None:
    data = with_layers({"stock": [layer(0, compute_ms=1.0)], "hint": [layer(0, compute_ms=1.0)]})
    data[1]["logits_sha256"] = "ee"
    shown = texts(layers_drawn(tmp_path, data))
    assert "tg48: decode, stock, mean of its runs" in shown
    assert not any("hint, mean" in words for words in shown)


def test_without_a_timeline_the_plot_says_how_to_get_one(tmp_path: Path) -> None:
    path = write(tmp_path / "r.jsonl", header(ABBA), *rows(["shhs"] * 3, SPEEDS, header(ABBA)))
    out = tmp_path / "layers.svg"
    result = CliRunner().invoke(bench, ["plot", str(path), "--timeline", "--out", str(out)])
    assert isinstance(result.exception, ResultsError)
    assert "bench run MODEL --timeline" in (result.exception.hint or "")
    assert not out.exists()


def test_plot_writes_layers_as_one_self_contained_file(tmp_path: Path) -> None:
    data = with_layers({"hint": [layer(n, compute_ms=1.0 + n) for n in range(94)]})
    path, out = write(tmp_path / "r.jsonl", header(ABBA), *data), tmp_path / "layers.svg"
    result = CliRunner().invoke(bench, ["plot", str(path), "--timeline", "--out", str(out)])
    assert result.exit_code == 0, result.output
    text = out.read_text(encoding="utf-8")
    assert text.startswith("<svg ")
    assert "prefers-color-scheme: dark" in text and "href" not in text
    assert heights(ElementTree.fromstring(text), "compute")[-1] > heights(ElementTree.fromstring(text), "compute")[0]
