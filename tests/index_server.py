"""A web server for a static index, on a free port of this machine."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

JSON = "application/vnd.pypi.simple.v1+json"


class Plain(SimpleHTTPRequestHandler):
    """Files as they are: what `python -m http.server` and most hosts for static pages do."""

    def log_message(self, format: str, *args: object) -> None:
        self.server.paths.append(self.path)  # type: ignore[attr-defined]


class Negotiating(Plain):
    """Answers with the JSON page where the client asks for it, as PEP 691 has it."""

    def translate_path(self, path: str) -> str:
        translated = super().translate_path(path)
        if path.endswith("/") and JSON in self.headers.get("Accept", ""):
            return str(Path(translated) / "index.json")
        return translated

    def guess_type(self, path: str) -> str:  # type: ignore[override]
        return JSON if str(path).endswith("index.json") else super().guess_type(path)


@contextlib.contextmanager
def serving(directory: Path, handler: type[Plain] = Plain) -> Iterator[tuple[str, list[str]]]:
    """(address, paths asked for so far)."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(handler, directory=str(directory)))
    server.paths = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", server.paths  # type: ignore[attr-defined]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
