"""The list of settings against the payload's own source: same fields, variables, order and defaults."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from toolkit.config import patches_dir
from toolkit.errors import PinError
from toolkit.patch.knobs import load_knobs

PAYLOAD = patches_dir() / "payload"


def test_fields_are_those_of_the_struct() -> None:
    header = (PAYLOAD / "ggml-moe-prefetch.h").read_text(encoding="utf-8")
    body = re.search(r"struct ggml_moe_prefetch_params \{(.*?)\n\};", header, re.S)
    assert body is not None
    fields = re.findall(r"^\s+\w+\s+(\w+);.*?(?:\[(MOE_MADV_\w+)[,\]]|$)", body[1], re.M)
    assert fields[0] == ("size", "")
    assert fields[1:] == [(knob.name, knob.variable) for knob in load_knobs(patches_dir())]


def test_variables_and_defaults_are_those_of_the_source() -> None:
    source = (PAYLOAD / "ggml-moe-state.cpp").read_text(encoding="utf-8")
    knobs = load_knobs(patches_dir())
    assert re.findall(r'set\("(MOE_MADV_\w+)"', source) == [knob.variable for knob in knobs]
    defaults = dict(re.findall(r"/\*\.(\w+)\s*=\*/ (\S+),", source))
    words = {"GGML_MOE_PREFETCH_MODE_OFF": "off", "-1": "auto", "1": "on"}
    for knob in knobs:
        assert knob.default.split(",")[0] == words.get(defaults[knob.name], defaults[knob.name]), knob.name


def test_a_list_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "knobs.toml").write_text('[[knob]]\nname = "mode"\n', encoding="utf-8")
    with pytest.raises(PinError, match="not a list of"):
        load_knobs(tmp_path)
