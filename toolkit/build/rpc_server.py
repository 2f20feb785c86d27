"""An RPC server of llama.cpp. Run by path in an arm's environment; imports nothing of the toolkit.

    python -I rpc_server.py HOST PORT THREADS BYTES

Offers every GPU of the wheel's backends, or else the CPU, and serves until it is killed. Clients share layers out by
the memory that servers say they have, and the CPU says the machine's: with BYTES above 0 it says these. Ends only
when it could not start, with exit code 1.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import signal
import sys
from pathlib import Path
from typing import Any

_DEVICE_CPU, _DEVICE_ACCEL = 0, 3  # enum ggml_backend_dev_type: what is no GPU


def library(directory: Path, stem: str) -> ctypes.CDLL:
    """Load one library by its full path, so that no search path can pick another."""
    for name in (f"lib{stem}.so", f"lib{stem}.dylib", f"{stem}.dll", f"lib{stem}.dll"):
        if (directory / name).exists():
            return ctypes.CDLL(str(directory / name))
    raise SystemExit(f"no library {stem} in {directory}")


def devices(ggml: ctypes.CDLL, base: ctypes.CDLL) -> list[int]:
    """Handles of the devices to offer, as llama.cpp's own server chooses them."""
    ggml.ggml_backend_dev_count.restype = ctypes.c_size_t
    ggml.ggml_backend_dev_get.restype, ggml.ggml_backend_dev_get.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    base.ggml_backend_dev_type.restype, base.ggml_backend_dev_type.argtypes = ctypes.c_int, [ctypes.c_void_p]
    found = [ggml.ggml_backend_dev_get(i) for i in range(ggml.ggml_backend_dev_count())]
    kinds = {device: base.ggml_backend_dev_type(device) for device in found}
    gpus = [device for device in found if kinds[device] not in (_DEVICE_CPU, _DEVICE_ACCEL)]
    return gpus or [device for device in found if kinds[device] == _DEVICE_CPU]


class _Device(ctypes.Structure):
    """The start of struct ggml_backend_device, ggml-backend-impl.h: the same since there are devices."""

    _fields_ = [
        ("get_name", ctypes.c_void_p),
        ("get_description", ctypes.c_void_p),
        ("get_memory", ctypes.c_void_p),
    ]


_SIZE = ctypes.POINTER(ctypes.c_size_t)
_Memory = ctypes.CFUNCTYPE(None, ctypes.c_void_p, _SIZE, _SIZE)  # (device, free, total)
_kept: list[Any] = []  # functions that the library calls


def announce(device: int, base: ctypes.CDLL, nbytes: int) -> None:
    """Make a device of this process say that it has `nbytes`, those that the process holds already not free.

    Raises SystemExit when the library does not take it over.
    """
    used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    left = max(1, nbytes - used)

    def get_memory(_device: int, free: Any, total: Any) -> None:
        free[0], total[0] = left, nbytes

    function = _Memory(get_memory)
    _kept.append(function)
    ctypes.cast(device, ctypes.POINTER(_Device)).contents.get_memory = ctypes.cast(function, ctypes.c_void_p).value
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    base.ggml_backend_dev_memory.restype = None
    base.ggml_backend_dev_memory.argtypes = [ctypes.c_void_p, _SIZE, _SIZE]
    base.ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(total))
    if (free.value, total.value) != (left, nbytes):
        raise SystemExit("this llama.cpp keeps a device's functions elsewhere: its server cannot say its budget")


def main() -> int:
    host, port, threads, nbytes = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    os.dup2(2, 1)  # the library prints its progress to standard output
    # Python would act on an interrupt only after the call below, which does not return.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or spec.origin is None:
        raise SystemExit("no llama_cpp in this environment")
    folder = Path(spec.origin).parent / "lib"
    ggml, base, rpc = library(folder, "ggml"), library(folder, "ggml-base"), library(folder, "ggml-rpc")
    offered = devices(ggml, base)
    if nbytes and base.ggml_backend_dev_type(offered[0]) == _DEVICE_CPU:  # then it is the only one
        announce(offered[0], base, nbytes)
    start = rpc.ggml_backend_rpc_start_server
    start.restype = None
    start.argtypes = [
        *(ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t),
        ctypes.POINTER(ctypes.c_void_p),
    ]
    array = (ctypes.c_void_p * len(offered))(*offered)
    start(f"{host}:{port}".encode(), None, threads, len(offered), array)
    return 1


if __name__ == "__main__":
    sys.exit(main())
