"""Every ctypes call into llama_cpp, feature-detected, values read back. Runs inside an arm's environment.

Imports nothing of the toolkit. Times nothing.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

GGML_MAX_DIMS, GGML_MAX_OP_PARAMS, GGML_MAX_SRC, GGML_MAX_NAME = 4, 64, 10, 64
LAZY_MODES = ("off", "auto", "on")  # enum llama_lazy_mode of llama.h


class LlamaError(Exception):
    """llama.cpp refused, or did not do what was asked."""


class _Tensor(ctypes.Structure):
    """struct ggml_tensor of ggml.h; checked against a known name before it is trusted."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * GGML_MAX_DIMS),
        ("nb", ctypes.c_size_t * GGML_MAX_DIMS),
        ("op", ctypes.c_int),
        ("op_params", ctypes.c_int32 * (GGML_MAX_OP_PARAMS // 4)),
        ("flags", ctypes.c_int32),
        ("src", ctypes.c_void_p * GGML_MAX_SRC),
        ("view_src", ctypes.c_void_p),
        ("view_offs", ctypes.c_size_t),
        ("data", ctypes.c_void_p),
        ("name", ctypes.c_char * GGML_MAX_NAME),
        ("extra", ctypes.c_void_p),
    ]


class _Layer(ctypes.Structure):
    """struct ggml_moe_prefetch_layer of ggml-moe-prefetch.h."""

    _fields_ = [
        ("name", ctypes.c_char * GGML_MAX_NAME),
        *((name, ctypes.c_uint64) for name in ("n_selections", "n_experts", "n_missed", "bytes", "n_late")),
        *((name, ctypes.c_uint64) for name in ("n_in_time", "hint_ns", "wait_ns", "read_ns", "total_ns")),
    ]


class _Params(ctypes.Structure):
    """struct ggml_moe_prefetch_params of ggml-moe-prefetch.h; a build of another version refuses it by its size."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("mode", ctypes.c_int32),
        ("load", ctypes.c_int32),
        ("cache_bytes", ctypes.c_uint64),
        ("lock_bytes", ctypes.c_uint64),
        ("n_readers", ctypes.c_int32),
        ("half_life", ctypes.c_int32),
        ("foresee", ctypes.c_int32),
        ("wide", ctypes.c_int32),
    ]


_SELECTION = re.compile(rb"^ffn_moe_topk-(\d+)$")  # build_moe_ffn in llama-graph.cpp


def library_dir() -> Path:
    """Folder of the shared libraries that this process has loaded."""
    return Path(llama_cpp.__file__).parent / "lib"


def _ggml_base() -> ctypes.CDLL:
    """The ggml-base that libllama itself uses.

    A wheel can hold the same library under several names, and opening another name loads a second copy with a
    state of its own. On POSIX a symbol is looked up in the libraries that libllama depends on.
    """
    return ctypes.CDLL(str(library_dir() / "ggml-base.dll")) if os.name == "nt" else llama_cpp.llama_cpp._lib


class Payload:
    """The MoE prefetch payload of a patched build, by its C API."""

    def __init__(self) -> None:
        lib = _ggml_base()
        self.present = hasattr(lib, "ggml_moe_prefetch_version")
        if not self.present:
            return
        self._lib = lib
        for name, result, args in (
            ("version", ctypes.c_char_p, []),
            ("get_mode", ctypes.c_int, []),
            ("set_mode", ctypes.c_bool, [ctypes.c_int]),
            ("mode_name", ctypes.c_char_p, [ctypes.c_int]),
            ("counter_count", ctypes.c_int, []),
            ("counter_name", ctypes.c_char_p, [ctypes.c_int]),
            ("counter_value", ctypes.c_uint64, [ctypes.c_int]),
            ("counter_reset", None, []),
        ):
            function = getattr(lib, f"ggml_moe_prefetch_{name}")
            function.restype, function.argtypes = result, args

    def version(self) -> str | None:
        """Version of the payload, None in an unpatched build."""
        return self._lib.ggml_moe_prefetch_version().decode() if self.present else None

    def modes(self) -> list[str]:
        """Names of the modes this build has, in the order of their numbers."""
        names: list[str] = []
        while self.present and (name := self._lib.ggml_moe_prefetch_mode_name(len(names))):
            names.append(name.decode())
        return names

    def mode(self) -> str | None:
        """Name of the mode in force."""
        return self.modes()[self._lib.ggml_moe_prefetch_get_mode()] if self.present else None

    def set_mode(self, name: str) -> None:
        """Switch the mode of this process; raises LlamaError when the build has no such mode."""
        if name not in self.modes():
            raise LlamaError(f"this build has no mode {name!r}: it has {self.modes() or 'no payload'}")
        self._lib.ggml_moe_prefetch_set_mode(self.modes().index(name))

    def params(self) -> dict[str, int]:
        """Every setting in force, by the field's name in the C struct; raises LlamaError for a build without them."""
        return {name: getattr(self._params(), name) for name in _fields(_Params) if name != "size"}

    def set_params(self, **changes: int) -> None:
        """Change settings of this process, as `half_life=32`; they hold from the next graph on."""
        params = self._params()
        for name, value in changes.items():
            _set(params, name, value)
        if not self._lib.ggml_moe_prefetch_set_params(ctypes.byref(params)):
            raise LlamaError(f"the payload refuses the settings {changes}")

    def _params(self) -> _Params:
        if not self.present or not hasattr(self._lib, "ggml_moe_prefetch_get_params"):
            raise LlamaError("this build has no payload with settings")
        self._lib.ggml_moe_prefetch_set_params.restype = ctypes.c_bool
        params = _Params()
        self._lib.ggml_moe_prefetch_get_params.restype = ctypes.c_bool
        if not self._lib.ggml_moe_prefetch_get_params(ctypes.byref(params), ctypes.c_size_t(ctypes.sizeof(params))):
            raise LlamaError(
                f"the payload's settings do not have {ctypes.sizeof(params)} bytes: it is of another version"
            )
        return params

    def counters(self) -> dict[str, int] | None:
        """All counters by name since the last reset."""
        if not self.present:
            return None
        lib = self._lib
        return {
            lib.ggml_moe_prefetch_counter_name(i).decode(): lib.ggml_moe_prefetch_counter_value(i)
            for i in range(lib.ggml_moe_prefetch_counter_count())
        }

    def layers(self) -> list[dict[str, Any]] | None:
        """Where the time of each layer went since the last reset, in the order the layers run; times in ms, sums.

        `wait_ms`: the announcing thread waited for reads; `hint_ms`: it asked for them; `read_ms`: from the
        announcement to the end of the last read; `compute_ms`: the rest until the next layer's announcement, so the
        next layer's attention is in it. None for a payload that does not keep them.
        """
        if not self.present or not hasattr(self._lib, "ggml_moe_prefetch_layer_get"):
            return None
        found: list[dict[str, Any]] = []
        layer = _Layer()
        while self._lib.ggml_moe_prefetch_layer_get(len(found), ctypes.byref(layer)):
            compute_ns = max(0, layer.total_ns - layer.wait_ns - layer.hint_ns)
            found.append(
                {
                    "layer": len(found),
                    "name": layer.name.decode(),
                    "selections": layer.n_selections,
                    "experts": layer.n_experts,
                    "missed": layer.n_missed,
                    "bytes": layer.bytes,
                    "late": layer.n_late,
                    "in_time": layer.n_in_time,
                    "hint_ms": layer.hint_ns / 1e6,
                    "wait_ms": layer.wait_ns / 1e6,
                    "read_ms": layer.read_ns / 1e6,
                    "compute_ms": compute_ns / 1e6,
                }
            )
        return found

    def reset(self) -> None:
        if self.present:
            self._lib.ggml_moe_prefetch_counter_reset()


def capture_log(sink: Callable[[str], None]) -> object:
    """Send llama.cpp's log lines to `sink`; the caller keeps the returned object alive, or the process crashes."""

    @llama_cpp.llama_log_callback
    def callback(_level: int, text: bytes, _user: object) -> None:
        sink(text.decode("utf-8", "replace"))

    llama_cpp.llama_log_set(callback, ctypes.c_void_p(0))
    return callback


def _set(params: Any, name: str, value: Any) -> None:
    # a ctypes struct takes any attribute without a word
    if name not in _fields(params):
        raise LlamaError(f"{type(params).__name__} of this binding has no field {name}")
    setattr(params, name, value)
    if getattr(params, name) != value:
        raise LlamaError(f"{type(params).__name__}.{name} is {getattr(params, name)!r}, asked for {value!r}")


def _fields(params: Any) -> set[str]:
    return {name for name, *_ in params._fields_}


def load_mapped(model_params: Any) -> None:
    """The model stays in its mapping: loaded by mmap, and not repacked into anonymous memory."""
    if "load_mode" in _fields(model_params):  # since 2026-07-23
        _set(model_params, "load_mode", llama_cpp.LLAMA_LOAD_MODE_MMAP)
    else:
        _set(model_params, "use_mmap", True)
        _set(model_params, "use_mlock", False)
        if "use_direct_io" in _fields(model_params):  # early 2026; it takes precedence over use_mmap
            _set(model_params, "use_direct_io", False)
    if "use_extra_bufts" in _fields(model_params):  # since 2025-07
        _set(model_params, "use_extra_bufts", False)


def without_flash_attention(context_params: Any) -> None:
    if "flash_attn_type" in _fields(context_params):  # since 2025-08-30
        _set(context_params, "flash_attn_type", 0)  # LLAMA_FLASH_ATTN_TYPE_DISABLED
    else:
        _set(context_params, "flash_attn", False)


class _Override(ctypes.Structure):
    """struct llama_model_tensor_buft_override of llama.h."""

    _fields_ = [("pattern", ctypes.c_char_p), ("buft", ctypes.c_void_p)]


_EXPERTS = rb"\.ffn_(gate|up|down|gate_up)_(ch)?exps"  # names that llama.cpp's own --cpu-moe keeps on the CPU


def experts_on_cpu(model_params: Any) -> object:
    """Keep expert weights in the mapping while layers go to a GPU; the caller keeps the result alive."""
    lib = _ggml_base() if os.name != "nt" else ctypes.CDLL(str(library_dir() / "ggml-base.dll"))
    lib.ggml_backend_cpu_buffer_type.restype = ctypes.c_void_p
    overrides = (_Override * 2)(_Override(_EXPERTS, lib.ggml_backend_cpu_buffer_type()))  # ended by nulls
    _set(model_params, "tensor_buft_overrides", ctypes.addressof(overrides))
    return overrides


def rpc_devices(endpoints: Sequence[str]) -> list[int]:
    """Handles of the devices of RPC servers, HOST:PORT each, in this order.

    Greet the servers first: llama.cpp ends the process at one that does not answer or speaks another version.
    """
    lib = _ggml_base() if os.name != "nt" else ctypes.CDLL(str(library_dir() / "ggml.dll"))
    for name, result, args in (
        ("reg_by_name", ctypes.c_void_p, [ctypes.c_char_p]),
        ("reg_get_proc_address", ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_char_p]),
        ("reg_dev_count", ctypes.c_size_t, [ctypes.c_void_p]),
        ("reg_dev_get", ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t]),
    ):
        function = getattr(lib, f"ggml_backend_{name}")
        function.restype, function.argtypes = result, args
    registry = lib.ggml_backend_reg_by_name(b"RPC")
    if not registry:
        raise LlamaError("this build has no RPC backend")
    address = lib.ggml_backend_reg_get_proc_address(registry, b"ggml_backend_rpc_add_server")
    add_server = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_char_p)(address)
    devices: list[int] = []
    for endpoint in endpoints:
        server = add_server(endpoint.encode())
        if not server:
            raise LlamaError(f"the RPC server {endpoint} offers no device")
        count = lib.ggml_backend_reg_dev_count(server)
        devices += [lib.ggml_backend_reg_dev_get(server, i) for i in range(count)]
    return devices


def _check_layout(model_params: Any, context_params: Any) -> None:
    """Defaults that are certain in every llama.cpp: a ctypes struct that does not match shows other values."""
    seen = (
        model_params.vocab_only,
        model_params.check_tensors,
        context_params.n_batch,
        context_params.n_ubatch,
    )
    if seen != (False, False, 2048, 512):
        raise LlamaError(f"the binding's structs do not match its library: defaults read back as {seen}")


class Session:
    """One model, mapped and not repacked, with one context of one sequence.

    With `n_gpu_layers`, the last layers without their experts are on GPUs. With `rpc`, every layer is on these
    servers; the mapping here is read to send them their weights. `lazy_mode` is one of LAZY_MODES, None the default.
    """

    def __init__(
        self,
        model: str,
        *,
        n_ctx: int,
        n_batch: int,
        n_ubatch: int,
        n_threads: int,
        n_gpu_layers: int = 0,
        lazy_mode: str | None = None,
        trace: bool = False,
        rpc: Sequence[str] = (),
    ) -> None:
        llama_cpp.llama_backend_init()
        model_params = llama_cpp.llama_model_default_params()
        context_params = llama_cpp.llama_context_default_params()
        _check_layout(model_params, context_params)

        _set(model_params, "n_gpu_layers", 999 if rpc else n_gpu_layers)
        if n_gpu_layers:
            self._overrides = experts_on_cpu(model_params)
        if rpc:
            devices = rpc_devices(rpc)
            self._devices = (ctypes.c_void_p * (len(devices) + 1))(*devices)  # ended by a null
            _set(model_params, "devices", ctypes.addressof(self._devices))
        load_mapped(model_params)
        if lazy_mode is not None:
            _set(model_params, "lazy_mode", LAZY_MODES.index(lazy_mode))

        _set(context_params, "n_ctx", n_ctx)
        _set(context_params, "n_batch", n_batch)
        _set(context_params, "n_ubatch", n_ubatch)
        _set(context_params, "n_threads", n_threads)
        _set(context_params, "n_threads_batch", n_threads)
        without_flash_attention(context_params)
        _set(context_params, "no_perf", True)

        self.selected: list[tuple[int, np.ndarray]] = []
        if trace:
            # the selection can be in a GPU's memory
            self._get = _ggml_base().ggml_backend_tensor_get
            self._get.restype, self._get.argtypes = None, [ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_size_t] * 2]
            self._callback = llama_cpp.llama_cpp.ggml_backend_sched_eval_callback(self._on_node)
            context_params.cb_eval = self._callback

        self._model = llama_cpp.llama_model_load_from_file(os.fsencode(model), model_params)
        if not self._model:
            raise LlamaError(f"llama.cpp could not load {model}")
        self._context = llama_cpp.llama_init_from_model(self._model, context_params)
        if not self._context:
            raise LlamaError(f"llama.cpp could not make a context of {n_ctx} tokens for {model}")
        self._vocab = llama_cpp.llama_model_get_vocab(self._model)
        self.n_vocab = llama_cpp.llama_vocab_n_tokens(self._vocab)
        self._n_batch = n_batch
        self._batch = llama_cpp.llama_batch_init(n_batch, 0, 1)
        self._evaluated = False  # anything, since the context was made or emptied

    def _on_node(self, pointer: int, ask: bool, _user: object) -> bool:
        tensor = ctypes.cast(pointer, ctypes.POINTER(_Tensor)).contents
        found = _SELECTION.match(tensor.name)
        if ask or found is None:
            return found is not None
        n_used, n_tokens = tensor.ne[0], tensor.ne[1]
        ids = np.empty((n_tokens, n_used), dtype=np.int32)
        for i in range(n_tokens):
            # a view of the sorted row of all experts: rows are nb[1] apart
            self._get(pointer, ids[i].ctypes.data, i * tensor.nb[1], n_used * ids.itemsize)
        self.selected.append((int(found.group(1)), ids))
        return True

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a text, with the model's own begin-of-sequence rule."""
        data = text.encode()
        room = len(data) + 8
        tokens = (llama_cpp.llama_token * room)()
        n = llama_cpp.llama_tokenize(self._vocab, data, len(data), tokens, room, True, False)
        if n < 0:
            raise LlamaError(f"tokenizer needs {-n} tokens for {len(data)} bytes")
        return list(tokens[:n])

    def restart(self) -> None:
        """Forget every evaluated token, so that the next one is the first of a sequence."""
        if self._evaluated:
            llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
            self._evaluated = False

    def decode(self, tokens: list[int], position: int) -> None:
        """Evaluate tokens at the given positions of the sequence and wait; only the last one gives logits."""
        if len(tokens) > self._n_batch:
            raise LlamaError(f"{len(tokens)} tokens in a batch of {self._n_batch}")
        batch = self._batch
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            if not 0 <= token < self.n_vocab:
                raise LlamaError(f"token {token} is outside the vocabulary of {self.n_vocab}")
            batch.token[i] = token
            batch.pos[i] = position + i
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = 0
            batch.logits[i] = i == len(tokens) - 1
        self._evaluated = True
        result = llama_cpp.llama_decode(self._context, batch)
        if result != 0:
            raise LlamaError(f"llama_decode returned {result} at position {position}")
        llama_cpp.llama_synchronize(self._context)

    def logits(self) -> np.ndarray:
        """Logits of the last evaluated token, float32 [n_vocab], valid until the next decode."""
        pointer = llama_cpp.llama_get_logits_ith(self._context, -1)
        return np.ctypeslib.as_array(pointer, shape=(self.n_vocab,))

    def take_selected(self) -> dict[int, np.ndarray]:
        """Expert ids chosen since the last call, by layer: int32 [token, n_expert_used], physical batches joined."""
        taken, self.selected = self.selected, []
        layers = sorted({layer for layer, _ in taken})
        return {layer: np.concatenate([ids for other, ids in taken if other == layer]) for layer in layers}

    def close(self) -> None:
        llama_cpp.llama_batch_free(self._batch)
        llama_cpp.llama_free(self._context)
        llama_cpp.llama_model_free(self._model)
