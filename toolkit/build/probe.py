"""What loaded libraries say about themselves. Run by path in another interpreter; imports nothing of the toolkit.

    python -I probe.py libraries DIR    the shared libraries in DIR
    python -I probe.py binding          the llama_cpp package installed in this environment

Prints one JSON object.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

# Defaults that every llama.cpp since 2025 has, spread over the whole struct: a binding whose ctypes struct
# is laid out differently reads other values.
MODEL_DEFAULTS = {"split_mode": (1,), "main_gpu": (0,), "n_gpu_layers": (-1, 0, 999)}
CONTEXT_DEFAULTS = {
    "n_ctx": (512,),
    "n_batch": (2048,),
    "n_ubatch": (512,),
    "rope_freq_base": (0.0,),
    "yarn_ext_factor": (-1.0,),
    "type_k": (1,),
    "type_v": (1,),
    "offload_kqv": (True,),
}


def library(directory: Path, stem: str) -> ctypes.CDLL:
    """Load one library by its full path, so that no search path can pick another."""
    for name in (f"lib{stem}.so", f"lib{stem}.dylib", f"{stem}.dll", f"lib{stem}.dll"):
        if (directory / name).exists():
            return ctypes.CDLL(str(directory / name))
    raise OSError(f"no library {stem} in {directory}")


def text(lib: ctypes.CDLL, function: str) -> str | None:
    """Result of a `const char * f(void)`, None when the library has no such function."""
    if not hasattr(lib, function):
        return None
    symbol = getattr(lib, function)
    symbol.restype, symbol.argtypes = ctypes.c_char_p, []
    return str(symbol().decode())


def libraries(directory: Path) -> dict[str, Any]:
    """Commit compiled in, payload version (None without a payload), names in the backend registry."""
    ggml, base = library(directory, "ggml"), library(directory, "ggml-base")
    ggml.ggml_backend_reg_count.restype = ctypes.c_size_t
    ggml.ggml_backend_reg_get.restype, ggml.ggml_backend_reg_get.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    base.ggml_backend_reg_name.restype, base.ggml_backend_reg_name.argtypes = (
        ctypes.c_char_p,
        [ctypes.c_void_p],
    )
    handles = [ggml.ggml_backend_reg_get(i) for i in range(ggml.ggml_backend_reg_count())]
    return {
        "commit": text(base, "ggml_commit"),
        "payload": text(base, "ggml_moe_prefetch_version"),
        "registers": [base.ggml_backend_reg_name(handle).decode() for handle in handles],
        "system_info": text(library(directory, "llama"), "llama_print_system_info"),
    }


def mapped() -> list[str] | None:
    """Shared libraries of llama.cpp in this process, None where the system does not list mappings."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    paths = {line.split(maxsplit=5)[5] for line in lines if len(line.split(maxsplit=5)) == 6}
    return sorted(p for p in paths if Path(p).name.startswith(("libllama", "libggml", "libmtmd")))


def drift(params: ctypes.Structure, defaults: dict[str, tuple[Any, ...]]) -> list[str]:
    """Fields whose default is impossible: the struct of the binding is not the one of the library."""
    name = type(params).__name__
    found = [
        f"{name}.{field} reads {getattr(params, field)!r}"
        for field, possible in defaults.items()
        if getattr(params, field) not in possible
    ]
    raw = bytes(params)
    for field, kind, *_ in params._fields_:
        offset = getattr(type(params), field).offset
        if kind is ctypes.c_bool and raw[offset] > 1:
            found.append(f"{name}.{field} is the byte {raw[offset]}, not a bool")
    return found


def binding() -> dict[str, Any]:
    """Where llama_cpp and its libraries were loaded from, their versions, and whether structs match."""
    import llama_cpp

    directory = Path(llama_cpp.__file__).resolve().parent / "lib"
    return {
        **libraries(directory),
        "module": llama_cpp.__file__,
        "version": importlib.metadata.version("llama_cpp_python"),
        "mapped": mapped(),
        "drift": drift(llama_cpp.llama_model_default_params(), MODEL_DEFAULTS)
        + drift(llama_cpp.llama_context_default_params(), CONTEXT_DEFAULTS),
    }


if __name__ == "__main__":
    print(json.dumps(libraries(Path(sys.argv[2])) if sys.argv[1] == "libraries" else binding()))
