from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner
from results_rows import header, rows, write

from toolkit.cli.bench import bench
from toolkit.evidence.compare import compare
from toolkit.evidence.plots import chart, ticks
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
