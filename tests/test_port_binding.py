"""The binding's structs of old and new releases: the same settings under the names each of them has."""

from __future__ import annotations

import ctypes
import importlib
import sys
import types
from typing import Any

import pytest


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Any:
    """llama_api with a binding that has the constants alone; the module is not left behind."""
    binding = types.ModuleType("llama_cpp")
    binding.LLAMA_LOAD_MODE_MMAP = 1  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "llama_cpp", binding)
    monkeypatch.delitem(sys.modules, "toolkit.bench.llama_api", raising=False)
    module = importlib.import_module("toolkit.bench.llama_api")
    yield module
    sys.modules.pop("toolkit.bench.llama_api", None)


def params(**values: tuple[Any, Any]) -> Any:
    """A ctypes struct with these fields: name -> (type, value)."""
    kind = type("params", (ctypes.Structure,), {"_fields_": [(name, t) for name, (t, _) in values.items()]})
    return kind(*(value for _, value in values.values()))


BOOL, INT = ctypes.c_bool, ctypes.c_int


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (  # August 2025
            {"use_mmap": (BOOL, False), "use_mlock": (BOOL, True), "use_extra_bufts": (BOOL, True)},
            {"use_mmap": True, "use_mlock": False, "use_extra_bufts": False},
        ),
        (  # before repacking could be turned off
            {"use_mmap": (BOOL, False), "use_mlock": (BOOL, True)},
            {"use_mmap": True, "use_mlock": False},
        ),
        (  # May 2026
            {"use_mmap": (BOOL, False), "use_direct_io": (BOOL, True), "use_mlock": (BOOL, True)},
            {"use_mmap": True, "use_direct_io": False, "use_mlock": False},
        ),
        ({"load_mode": (INT, -1), "use_extra_bufts": (BOOL, True)}, {"load_mode": 1, "use_extra_bufts": False}),
    ],
)
def test_the_model_stays_in_its_mapping(api: Any, before: dict[str, Any], after: dict[str, Any]) -> None:
    model = params(**before)
    api.load_mapped(model)
    assert {name: getattr(model, name) for name in before} == after


def test_flash_attention_is_off_under_both_names(api: Any) -> None:
    old, new = params(flash_attn=(BOOL, True)), params(flash_attn_type=(INT, -1))
    api.without_flash_attention(old)
    api.without_flash_attention(new)
    assert (old.flash_attn, new.flash_attn_type) == (False, 0)


def test_a_struct_with_neither_name_is_an_error(api: Any) -> None:
    with pytest.raises(api.LlamaError, match="no field use_mmap"):
        api.load_mapped(params(n_gpu_layers=(INT, 0)))
