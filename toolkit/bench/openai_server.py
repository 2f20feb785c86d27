"""llama-cpp-python's OpenAI server with its model mapped and not repacked. Runs inside an arm's environment.

Usage: openai_server.py HOST PORT MODEL [OPTION...]; options are those of `python -m llama_cpp.server`. Writes one JSON
line to standard output once requests are answered, or one with `error`. Beside the server's own routes, GET /moe-madv
gives mode and counters. Imports only its neighbour `llama_api.py`, by path: this environment has no toolkit.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import socket
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import llama_cpp.llama_cpp as binding
import uvicorn
from llama_cpp.server.app import create_app
from llama_cpp.server.cli import add_args_from_model, parse_model_from_args
from llama_cpp.server.settings import ModelSettings, ServerSettings, Settings

# The server would lock the whole model in memory, and keep the logits of every position.
_DEFAULTS = ("--use_mmap", "true", "--use_mlock", "false", "--logits_all", "false")


def _llama_api() -> ModuleType:
    spec = importlib.util.spec_from_file_location("moe_madv_llama_api", Path(__file__).with_name("llama_api.py"))
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def keep_mapped(api: ModuleType) -> None:
    """Change the parameters that `Llama` starts from: no argument of it reaches repacking, or where experts go."""
    defaults = binding.llama_model_default_params

    def mapped() -> Any:
        params = defaults()
        api.load_mapped(params)
        params.keep = api.experts_on_cpu(params)  # lives as long as the parameters that point to it
        return params

    binding.llama_model_default_params = mapped


def main() -> None:
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # no library writes before or after our line

    def say(**row: Any) -> None:
        print(json.dumps(row), file=out, flush=True)

    host, port, model, *options = sys.argv[1:]
    parser = argparse.ArgumentParser(prog="llama_cpp.server")
    add_args_from_model(parser, Settings)
    args = parser.parse_args(["--model", model, *_DEFAULTS, *options])
    if args.lora_path:
        parser.error("--lora_path: with it the binding reads the whole model into memory of its own")
    try:
        # before the model is loaded, which takes minutes
        listener = socket.create_server((host, int(port)))
    except OSError as e:
        say(error=f"cannot listen on {host}:{port}: {e.strerror}")
        sys.exit(1)
    api = _llama_api()
    keep_mapped(api)
    payload = api.Payload()
    app = create_app(
        server_settings=parse_model_from_args(ServerSettings, args),
        model_settings=[parse_model_from_args(ModelSettings, args)],
    )

    @app.get("/moe-madv")
    def state() -> dict[str, Any]:
        return {"payload": payload.version(), "mode": payload.mode(), "counters": payload.counters()}

    address = "{}:{}".format(*listener.getsockname())
    say(url=f"http://{address}", payload=payload.version(), mode=payload.mode())
    uvicorn.Server(uvicorn.Config(app)).run(sockets=[listener])


if __name__ == "__main__":
    main()
