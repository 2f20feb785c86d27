"""Architectures of synthetic models: one module each, with the same two functions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import gguf

from toolkit.model.shape import Shape
from toolkit.model.weights import Tensor, Weights


class Architecture(Protocol):
    """What an architecture adds to the common parts: its keys, and its tensors in file order."""

    def add_metadata(self, writer: gguf.GGUFWriter, shape: Shape) -> None: ...

    def tensors(self, shape: Shape, weights: Weights) -> Iterator[Tensor]: ...
