"""The row of llama.cpp's llama-bench: its fields, their order and their types, as of the pinned llama.cpp.

Source: `test::get_fields` and `get_field_type` in tools/llama-bench/llama-bench.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TEXT, BOOL, INT, REAL = str, bool, int, float

FIELDS: dict[str, type] = {
    "build_commit": TEXT,
    "build_number": INT,
    "cpu_info": TEXT,
    "gpu_info": TEXT,
    "backends": TEXT,
    "model_filename": TEXT,
    "model_type": TEXT,
    "model_size": INT,
    "model_n_params": INT,
    "n_batch": INT,
    "n_ubatch": INT,
    "n_threads": INT,
    "cpu_mask": TEXT,
    "cpu_strict": BOOL,
    "poll": INT,
    "type_k": TEXT,
    "type_v": TEXT,
    "n_gpu_layers": INT,
    "n_cpu_moe": INT,
    "split_mode": TEXT,
    "main_gpu": INT,
    "no_kv_offload": BOOL,
    "flash_attn": INT,
    "devices": TEXT,
    "tensor_split": TEXT,
    "tensor_buft_overrides": TEXT,
    "load_mode": TEXT,
    "lazy_mode": TEXT,
    "embeddings": BOOL,
    "no_op_offload": INT,
    "no_host": BOOL,
    "repack": BOOL,
    "fit_target": INT,
    "fit_min_ctx": INT,
    "n_prompt": INT,
    "n_gen": INT,
    "n_depth": INT,
    "test_time": TEXT,
    "avg_ns": INT,
    "stddev_ns": INT,
    "avg_ts": REAL,
    "stddev_ts": REAL,
}

# In json and jsonl only, after the fields.
SAMPLES = ("samples_ns", "samples_ts")

# What a row measured; everything before these says under which configuration.
_MEASURED = ("n_prompt", "n_gen", "n_depth", "test_time", "avg_ns", "stddev_ns", "avg_ts", "stddev_ts", *SAMPLES)
CONFIGURATION = tuple(name for name in FIELDS if name not in _MEASURED)

# Without these a row says nothing.
REQUIRED = ("build_commit", "model_filename", "n_prompt", "n_gen", "avg_ts")


def test_name(row: Mapping[str, Any]) -> str:
    """pp512, tg128, pp512+tg128, with ` @ d4096` for a depth."""
    n_prompt, n_gen, n_depth = row["n_prompt"], row["n_gen"], row.get("n_depth") or 0
    parts = [f"pp{n_prompt}"] * (n_prompt > 0) + [f"tg{n_gen}"] * (n_gen > 0)
    return "+".join(parts) + (f" @ d{n_depth}" if n_depth else "")
