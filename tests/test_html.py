from __future__ import annotations

import re
import shutil
import struct
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from click.testing import CliRunner, Result
from results_rows import GIB, header, rows, sample, write

from toolkit.cli.bench import bench
from toolkit.errors import MachineError, ResultsError
from toolkit.evidence import png, svg
from toolkit.evidence.compare import compare
from toolkit.evidence.html_report import page
from toolkit.evidence.html_style import CSS
from toolkit.evidence.setting import command
from toolkit.results import Row, RunData, read

ABBA = [["stock", "hint", "hint", "stock"]] * 3
SPEEDS = [1.9, 2.9, 3.1, 2.1, 2.2, 3.3, 3.5, 2.2, 2.0, 3.2, 3.2, 2.2]
STORED = sorted((Path(__file__).parent.parent / "results").glob("*/*.jsonl"))


def usual(**more: Any) -> list[Row]:
    return rows(["shhs"] * 3, SPEEDS, header(ABBA), **more)


def drawn(tmp_path: Path, *data: Row, head: Row | None = None) -> ElementTree.Element:
    """The page as XML, which it is on purpose."""
    text = page([compare(read([write(tmp_path / "r.jsonl", head or header(ABBA), *data)]))])
    return ElementTree.fromstring(text.removeprefix("<!DOCTYPE html>"))


def figure(html: ElementTree.Element, title: str) -> ElementTree.Element:
    (found,) = [f for f in html.iter("figure") if f.findtext("p") == title]
    return found


def titles(html: ElementTree.Element) -> list[str]:
    return [f.findtext("p") or "" for f in html.iter("figure")]


def words(element: ElementTree.Element) -> str:
    return " ".join("".join(element.itertext()).split())


def places(element: ElementTree.Element, text: str, axis: str) -> list[float]:
    return [float(t.attrib[axis]) for t in element.iter("text") if t.text == text]


def centres(element: ElementTree.Element, css: str) -> list[tuple[float, float]]:
    """Middle of each mark's box, from its corners or, for a circle, from its left end and radius."""
    found = []
    for path in element.iter("path"):
        classes = path.attrib.get("class", "").split()
        if "mark" not in classes or css not in classes or path.attrib["d"].count("z") == 0:
            continue
        d = path.attrib["d"]
        numbers = [float(n) for n in re.findall(r"-?\d+(?:\.\d+)?", d)]
        if "a" in d:
            found.append((numbers[0] + numbers[2], numbers[1]))
        else:
            xs, ys = numbers[0::2], numbers[1::2]
            found.append(((min(xs) + max(xs)) / 2, (min(ys) + max(ys)) / 2))
    return found


@pytest.mark.parametrize("path", STORED, ids=lambda p: p.stem)
def test_every_stored_result_makes_a_page_that_needs_nothing_from_outside(path: Path) -> None:
    (stored,) = read([path])
    text = page([compare([stored])])
    root = ElementTree.fromstring(text.removeprefix("<!DOCTYPE html>"))
    assert not re.search(r"https?:|//[a-z]|@import|\bsrc\b|\bhref\b|javascript", text)
    assert set(re.findall(r"url\(([^)]*)\)", text)) == {"#hatch"}
    assert {e.tag for e in root.iter()} & {"script", "link", "img", "iframe", "object"} == set()
    # throughput, bytes, order and roofline of each test
    assert len(list(root.iter("figure"))) >= 4 * len(stored.header["plan"]["tests"])


def test_style_knows_light_dark_and_print_and_no_escaped_character() -> None:
    assert "@media screen and (prefers-color-scheme: dark)" in CSS
    assert "@media print" in CSS
    assert not set("<>&") & set(CSS)


def luminance(colour: str) -> float:
    """Relative luminance of WCAG 2."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_every_colour_stands_off_its_ground() -> None:
    light, dark = CSS.split("@media screen", 1)
    for part in (light, dark):
        colours = dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", part))
        assert set(colours) >= {"back", "fore", "dim", *(f"c{i}" for i in range(svg.COLOURS))}
        ground = luminance(colours["back"])
        for name in ("fore", "dim", *(f"c{i}" for i in range(svg.COLOURS))):
            low, high = sorted((ground, luminance(colours[name])))
            # 4.5 for text, 3 for graphics.
            assert (high + 0.05) / (low + 0.05) >= (4.5 if name in ("fore", "dim") else 3), name


def test_series_differ_in_shape_and_not_in_colour_alone() -> None:
    styles = list(svg.styles([str(i) for i in range(42)]).values())
    assert len({(s.shape, s.css) for s in styles}) == 42
    assert len({s.shape for s in styles[:6]}) == 6


def test_sentences_table_and_conditions_are_there(tmp_path: Path) -> None:
    html = drawn(tmp_path, *usual(disk_mib_s=300.0, compute_ms_per_token=50))
    text = words(html)
    assert html.findtext("body/h1") == "stock, hint on demo.gguf"
    assert "hint decodes 1.52x faster than stock (95 % interval 1." in text
    assert "▲ faster" in text
    assert "limit of tg48: 333 ms per token; reading 100 MiB at 300 MiB/s takes 333 ms" in text
    pairs = {words(tr[0]): words(tr[1]) for tr in html.iter("tr") if len(tr) == 2}
    assert pairs["memory budget"] == "2.00 GiB (cgroup-v1)"
    assert pairs["disk"] == "loop0, ext4, a file on tmpfs"
    assert pairs["read-ahead"] == "128 KiB"
    assert pairs["disk speed"] == "300 MiB/s, random reads"
    assert pairs["command"].startswith("moe-madv bench run demo.gguf --arms stock,hint --budget 2GiB -t 2")
    runs = [tr for tr in html.iter("tr") if len(tr) == 11]
    assert len(runs) == 1 + 12


def test_raw_points_lie_on_the_scale(tmp_path: Path) -> None:
    picture = figure(drawn(tmp_path, *usual()), "Throughput")
    (zero,), (four,) = places(picture, "0", "x"), places(picture, "4", "x")
    expected = [zero + (four - zero) * v / 4 for v in (2.9, 3.1, 3.3, 3.5, 3.2, 3.2)]
    pale = [c for c in picture.iter("path") if "pale" in c.attrib.get("class", "") and "s1" in c.attrib["class"]]
    assert len(pale) == 6
    marks = [x for x, y in centres(picture, "s1")]
    assert sorted(marks)[1:] == pytest.approx(sorted(expected), abs=0.1)  # the first is the label's mark
    # The mean's bar is the one of the second arm, at 3.2.
    bars = [float(e.attrib["x1"]) for e in picture.iter("line") if e.attrib["class"] == "mean s1"]
    assert bars == pytest.approx([zero + (four - zero) * 3.2 / 4], abs=0.1)


def test_arms_far_apart_make_the_scale_logarithmic(tmp_path: Path) -> None:
    data = [{**row, "avg_ts": row["avg_ts"] / 10} if row["arm"] == "stock" else row for row in usual()]
    picture = figure(drawn(tmp_path, *data), "Throughput")
    assert places(picture, "t/s, logarithmic", "x")
    (low,), (high,) = places(picture, "0.5", "x"), places(picture, "5", "x")
    bars = [float(e.attrib["x1"]) for e in picture.iter("line") if e.attrib["class"] == "mean s1"]
    assert bars == pytest.approx([low + (high - low) * float(np.log10(3.2 / 0.5))], abs=0.2)


def test_order_shows_runs_in_their_order_with_trend_rings_and_failures(tmp_path: Path) -> None:
    data = usual()
    data[0] |= {"avg_ts": 0.5}
    data[5] |= {"status": "failed", "avg_ts": None, "reason": "out of memory"}
    data[6] |= {"cold": False}
    picture = figure(drawn(tmp_path, *data), "Order and drift")
    (zero,), (four,) = places(picture, "0", "y"), places(picture, "4", "y")
    key, points = centres(picture, "s1")[0], centres(picture, "s1")[1:]
    assert key == (8, 8)
    heights = {round(x): y for x, y in points}
    assert len(heights) == 5  # four as planned and one hollow
    by_place = [y for _, y in sorted(heights.items())]
    speeds = [2.9, 3.1, 3.5, 3.2, 3.2]
    # Labels stand 4 below their line.
    assert [y + 4 for y in by_place] == pytest.approx([zero + (four - zero) * v / 4 for v in speeds], abs=0.2)
    assert len([e for e in picture.iter("path") if "hollow" in e.attrib["class"]]) == 1
    assert len([e for e in picture.iter("circle") if e.attrib["class"] == "ring"]) == 1
    assert len(places(picture, "✕", "x")) == 1
    assert len([e for e in picture.iter("line") if "trend" in e.attrib["class"]]) == 2
    assert re.search(r"Drift [+-][\d.]+ % per run \(95 % interval", words(picture))


def test_latency_draws_every_token_and_its_quartiles(tmp_path: Path) -> None:
    data = usual(token_ms=[100.0, 200.0, 300.0, 400.0, 500.0])
    picture = figure(drawn(tmp_path, *data), "Time per token")
    (zero,), (end,) = places(picture, "0", "x"), places(picture, "600", "x")
    boxes = [(float(e.attrib["x"]), float(e.attrib["width"])) for e in picture.iter("rect")]
    # Six runs of these five tokens: the quartiles are 200 and 400.
    unit = (end - zero) / 600
    assert boxes == [pytest.approx((zero + 200 * unit, 200 * unit), abs=0.1)] * 2
    strokes = [e.attrib["d"].count("v14") for e in picture.iter("path") if "stroke" in e.attrib["class"].split()]
    assert strokes == [30, 30]
    assert "p50 300 · p95 500 · longest 500 ms" in words(picture)


def test_roofline_places_arms_under_disk_and_compute(tmp_path: Path) -> None:
    data = usual(disk_mib_s=400.0, compute_ms_per_token=50)
    for row in data:
        row["mib_per_token"] = 40.0 if row["arm"] == "hint" else 160.0
    picture = figure(drawn(tmp_path, *data), "Roofline")
    # hint: 40 MiB at 400 MiB/s are 100 ms, the limit 10 t/s, of which it reaches 3.2.
    assert "stock: 21 %" in words(picture) and "hint: 32 %" in words(picture)
    (ten,), (two,) = places(picture, "10", "y"), places(picture, "2", "y")
    (x100,), (x200,) = places(picture, "100", "x"), places(picture, "200", "x")
    x, y = centres(picture, "s1")[1]
    assert x == pytest.approx(x100 + (x200 - x100) * float(np.log2(40 / 100)), abs=0.3)
    assert y + 4 == pytest.approx(ten + (two - ten) * float(np.log(10 / 3.2) / np.log(5)), abs=0.8)
    (limit,) = [e for e in picture.iter("circle") if e.attrib["class"] == "ring"]
    assert float(limit.attrib["cy"]) + 4 == pytest.approx(ten, abs=0.2)
    # The roof bends where 50 ms of compute are 20 MiB of reads; the figure starts at 20.
    roof = next(e.attrib["d"] for e in picture.iter("path") if e.attrib["class"] == "roof")
    assert roof.count("L") >= 1
    assert "Roofline" not in titles(drawn(tmp_path / "other", *usual()))


def test_timeline_stacks_compute_and_wait_of_each_layer(tmp_path: Path) -> None:
    layers = [
        {"layer": 0, "wait_ms": 4.0, "read_ms": 8.0, "compute_ms": 6.0, "bytes": 1 << 20, "late": 0, "in_time": 3},
        {"layer": 1, "wait_ms": 1.0, "read_ms": 2.0, "compute_ms": 3.0, "bytes": 1 << 20, "late": 1, "in_time": 2},
    ]
    data = [{**row, "timeline": layers} if row["arm"] == "hint" else row for row in usual()]
    html = drawn(tmp_path, *data)
    assert [t for t in titles(html) if t.startswith("Time by layer")] == ["Time by layer: hint"]
    picture = figure(html, "Time by layer: hint")
    (zero,), (ten,) = places(picture, "0", "y")[:1], places(picture, "10", "y")
    unit = (zero - ten) / 10
    heights = {
        css: [float(e.attrib["height"]) for e in picture.iter("rect") if e.attrib["class"] == css]
        for css in ("compute", "wait")
    }
    assert heights["compute"] == pytest.approx([6 * unit, 3 * unit], abs=0.1)
    assert heights["wait"] == pytest.approx([4 * unit, unit], abs=0.1)
    tops = [float(e.attrib["y"]) for e in picture.iter("rect") if e.attrib["class"] == "wait"]
    assert tops[0] + 4 == pytest.approx(ten, abs=0.1)  # 6 and 4 stacked reach 10
    assert len(places(picture, "▾", "x")) == 1
    text = words(picture)
    assert "2 layers · computing 9 ms · waiting 5 ms · reading 10 ms · 2 MiB · 1 of 6 reads late (17 %)" in text


def test_a_timeline_is_the_mean_of_the_runs_and_left_out_without_rows(tmp_path: Path) -> None:
    data = usual()
    for i, row in enumerate(data):
        if row["arm"] == "hint":
            row["timeline"] = [{"layer": 7, "wait_ms": float(i)}]
    # Runs of hint are 1 2 5 6 9 10: the mean is 5.5.
    assert "1 layers · computing 0 ms · waiting 5.5 ms" in words(drawn(tmp_path, *data))
    assert not any("layer" in t for t in titles(drawn(tmp_path / "other", *usual())))


@pytest.mark.parametrize("timeline", [{"layer": 1}, [1], [{"wait_ms": 1.0}], [{"layer": 1, "wait_ms": "x"}]])
def test_a_timeline_of_another_shape_is_one_error(tmp_path: Path, timeline: object) -> None:
    with pytest.raises(ResultsError, match="not a list of layers") as caught:
        drawn(tmp_path, *usual(timeline=timeline))
    assert "stock tg48 run 0" in str(caught.value.where)


def test_no_speed_is_drawn_when_outputs_differ(tmp_path: Path) -> None:
    data = usual(disk_mib_s=300.0, compute_ms_per_token=50, token_ms=[1.0, 2.0])
    data[1] |= {"logits_sha256": "ee"}
    html = drawn(tmp_path, *data)
    assert "outputs differ: no speed is shown" in words(figure(html, "Throughput"))
    for title in ("Order and drift", "Roofline", "Time per token"):
        assert "hint" not in words(figure(html, title))


def test_names_cannot_break_the_page(tmp_path: Path) -> None:
    odd = "<b>&\"'"
    head = header([["stock", odd]] * 3)
    head["model"]["filename"] = "<script>alert(1)</script>.gguf"
    data = rows(["s<"] * 3, [1.0, 2.0, 1.1, 2.1, 1.0, 2.0], head)
    html = drawn(tmp_path, *data, head=head)
    assert html.findtext("body/h1") == f"stock, {odd} on <script>alert(1)</script>.gguf"
    assert list(html.iter("script")) == []


def test_files_of_other_conditions_get_a_section_of_their_own(tmp_path: Path) -> None:
    paths = []
    for name, budget in (("a", 2 * GIB), ("b", GIB), ("c", 2 * GIB)):
        head = header(ABBA, run_id=name, budget_bytes=budget)
        paths.append(write(tmp_path / f"{name}.jsonl", head, *rows(["shhs"] * 3, SPEEDS, head)))
    out = tmp_path / "report.html"
    result = run_cli("report", *paths, "--out", out)
    root = ElementTree.fromstring(out.read_text(encoding="utf-8").removeprefix("<!DOCTYPE html>"))
    assert [h.text for h in root.iter("h2")] == ["a.jsonl, c.jsonl", "b.jsonl"]
    assert result.stdout == ""


def run_cli(*args: object) -> Result:
    result = CliRunner().invoke(bench, [str(a) for a in args])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def stored(tmp_path: Path, head: Row, *data: Row) -> RunData:
    path = tmp_path / "r.jsonl"
    path.unlink(missing_ok=True)
    (run,) = read([write(path, head, *data)])
    return run


def test_a_recorded_command_comes_before_the_equivalent_one(tmp_path: Path) -> None:
    head = header([["stock", "late"]], cold=False, n_prompt=64, n_gen=48)
    head["arms"]["late"]["env"] = {"MOE_MADV_MODE": "madv"}
    assert command(stored(tmp_path, head)) == (
        "moe-madv bench run demo.gguf --arms stock --arm late WHEEL MOE_MADV_MODE=madv "
        "--budget 2GiB -p 64 -n 48 -t 2 --blocks 1 --warm --out r.jsonl"
    )
    assert command(stored(tmp_path, {**head, "command": "moe-madv bench run x"})) == "moe-madv bench run x"
    assert command(stored(tmp_path, {**head, "source": "llama-bench"})) == ""


def test_the_command_of_a_long_run_has_the_time_of_its_last_call(tmp_path: Path) -> None:
    head = header([["stock", "hint"]], n_prompt=64, n_gen=48, n_depth=8, budget_bytes=1214885250, n_gpu_layers=9)
    del head["plan"]["blocks"]
    for arm, label in (("stock", "base.cuda130"), ("hint", "moe1.cuda130")):
        head["arms"][arm]["label"] = label
    call: dict[str, Any] = {"minutes": 480.0, "pause_s": 30.0}
    data = [sample(head, 0, 0, "stock", 2.0, **{**call, "minutes": 60.0}), sample(head, 0, 1, "hint", 3.0, **call)]
    # 1214885250 bytes are no round number of GiB
    assert command(stored(tmp_path, head, *data)) == (
        "moe-madv bench longrun demo.gguf --arms stock,hint --budget 1214885250 -p 64 -n 48 -d 8 -t 2 -ngl 9 "
        "--backend cuda --pause 30 --out r.jsonl --minutes 480"
    )
    head["command"] = "moe-madv bench longrun demo.gguf --hours 1 --pause 30 --out r.jsonl"
    again = "moe-madv bench longrun demo.gguf --pause 30 --out r.jsonl --minutes 480"
    assert command(stored(tmp_path, head, *data)) == again
    head["command"] = "moe-madv bench longrun demo.gguf --minutes=60 --pause 30 --out r.jsonl"
    assert command(stored(tmp_path, head, *data)) == again


def test_a_long_run_that_does_not_say_its_time_is_as_long_as_it_took(tmp_path: Path) -> None:
    head = header([["stock", "hint"]])
    del head["plan"]["blocks"]
    data = [sample(head, 0, 0, "stock", 2.0, elapsed_s=30.0), sample(head, 0, 1, "hint", 2.0, elapsed_s=90.0)]
    assert command(stored(tmp_path, head, *data)).endswith("-t 2 --minutes 1.5 --out r.jsonl")


def test_stalls_and_greedy_text_stand_in_the_page(tmp_path: Path) -> None:
    checks = [
        {"kind": "check", "run_id": "r1", "arm": arm, "outputs_equal": True, "greedy_equal": equal, "text": "compared"}
        for arm, equal in (("stock", True), ("hint", False))
    ]
    data = usual(token_ms=[10.0] * 48)
    data[3] = {**data[3], "token_ms": [10.0] * 47 + [900.0]}
    html = drawn(tmp_path, *checks, *data)
    pairs = {words(tr[0]): words(tr[1]) for tr in html.iter("tr") if len(tr) == 2}
    assert pairs["greedy text"] == "hint not as the baseline"
    assert pairs["check hint"] == "compared"
    text = words(html)
    assert "Stalls 1 stall" in text
    assert "stock tg48 run 3, token 47: 900 ms, median 10 ms: unknown" in text


def test_what_the_machine_did_stands_beside_the_arms(tmp_path: Path) -> None:
    seen = {
        "readings": 3,
        "every_s": 0.5,
        "disk_util_percent": {"min": 10, "mean": 40, "max": 90, "values": [10, 20, 90]},
        "gpu_util_percent": None,
        "available_bytes": {"min": GIB, "mean": 2 * GIB, "max": 3 * GIB, "values": [GIB, 2 * GIB, 3 * GIB]},
        "temperature_c": {"min": 50, "mean": 55, "max": 71, "values": [50, 50, 71]},
        "swap_delta_bytes": 0,
    }
    html = drawn(tmp_path, *usual(observed=seen))
    head, stock, hint = ([words(cell) for cell in tr] for tr in list(html.iter("tr"))[3:6])
    assert head == ["test", "arm", "disk %", "least free MiB", "to swap MiB", "hottest °C"]
    assert stock == ["tg48", "stock", "40", "1024", "0", "71"]
    assert hint == ["tg48", "hint", "40", "1024", "0", "71"]
    picture = figure(html, "Disk utilisation")
    lines = [p for p in picture.iter("path") if "over-time" in p.attrib["class"]]
    assert len(lines) == 12
    # three values, half a second apart, on a scale of 0 to 1 s and 0 to 100 %
    points = [float(n) for n in re.findall(r"-?[\d.]+", lines[0].attrib["d"])]
    xs, ys = points[0::2], points[1::2]
    assert xs[1] - xs[0] == pytest.approx(xs[2] - xs[1], abs=0.11)
    assert (ys[0] - ys[1]) / (ys[0] - ys[2]) == pytest.approx(1 / 8, abs=0.01)
    assert "GPU utilisation" not in titles(html)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(1, 10, [1, 2, 5, 10]), (0.3, 4, [0.2, 0.5, 1, 2, 5]), (2, 2, [2, 5]), (900, 1100, [500, 1000, 2000])],
)
def test_logarithmic_ticks_hold_the_values(low: float, high: float, expected: list[float]) -> None:
    assert svg.log_ticks(low, high) == pytest.approx(expected)


def test_png_is_the_picture_at_twice_its_size(tmp_path: Path) -> None:
    if shutil.which("rsvg-convert") is None:
        pytest.skip("rsvg-convert is not installed")
    path = write(tmp_path / "r.jsonl", header(ABBA), *usual())
    run_cli("plot", path, "--out", tmp_path / "chart.svg")
    run_cli("plot", path, "--out", tmp_path / "chart.png")
    run_cli("plot", path, "--format", "png", "--out", tmp_path / "other")
    size = re.search(r'width="(\d+)" height="(\d+)"', (tmp_path / "chart.svg").read_text(encoding="utf-8"))
    assert size
    data = (tmp_path / "chart.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", data[16:24]) == (2 * int(size[1]), 2 * int(size[2]))
    assert (tmp_path / "other").read_bytes() == data


def test_png_without_a_converter_names_some(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MachineError, match="no program that turns SVG into PNG") as caught:
        png.write(tmp_path / "chart.png", "<svg/>")
    assert "rsvg-convert" in (caught.value.hint or "")
    assert list(tmp_path.iterdir()) == []
