"""Tensors of a synthetic model, each with the recipe that makes its bytes, and the codes that prescribe its routing.

Every position of a routing trace has a token of its own. Its embedding has one spike in a reserved dimension of
the residual stream. The rows of all matrices that write to the residual stream are zero in reserved dimensions,
so the spike passes unchanged through all layers, and the routers read nothing else. RMS normalisation scales all
logits of a token alike, so their order is the prescribed one. With early routing (see `early`) there are as many
spikes as banks, and each router sees one of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as GGMLType
from numpy.typing import NDArray

from toolkit.model.blocks import random_blocks
from toolkit.model.early import BANKS, Early
from toolkit.model.routing import Trace

_SPIKE = 8.0  # of a code, beside random dimensions of rms 1
_MARGIN, _SPREAD = 8.0, 2.0  # router logits at rms 1: others in (-1, 0], chosen in (MARGIN, MARGIN + SPREAD]


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """One tensor to be written; `make` turns a random stream into its data."""

    name: str
    shape: tuple[int, ...]  # in elements, slowest dimension first
    type: GGMLType
    make: Callable[[np.random.BitGenerator], NDArray[Any]]

    @property
    def byte_shape(self) -> tuple[int, ...]:
        block, block_bytes = gguf.GGML_QUANT_SIZES[self.type]
        return (*self.shape[:-1], self.shape[-1] // block * block_bytes)

    @property
    def nbytes(self) -> int:
        return math.prod(self.byte_shape)


class Weights:
    """Makes the tensors of one model: `embd` wide, `n_vocab` tokens, of which `tokens` are the forced ones."""

    def __init__(
        self, trace: Trace, *, embd: int, n_vocab: int, tokens: Sequence[int], dense: GGMLType, early: Early | None
    ) -> None:
        self.trace, self.embd, self.n_vocab, self.dense, self._early = trace, embd, n_vocab, dense, early
        self._banks = BANKS if early else 1
        self._bank = -(-len(tokens) // 32) * 32  # one dimension a position, in whole blocks; the banks are at the end
        self._reserved = self._banks * self._bank
        # A forced token has its position's code, all others share the codes in turn.
        self._position = np.arange(n_vocab) % len(tokens)
        self._position[list(tokens)] = np.arange(len(tokens))

    def matrix(
        self, name: str, *shape: int, type: GGMLType | None = None, gain: float = 1.0, to_residual: bool = False
    ) -> Tensor:
        """Random weights [..., out, in] that change the rms of their input by `gain`.

        One that writes `to_residual` has zeros in its last rows, those of the reserved dimensions.
        """
        kind = self.dense if type is None else type

        def make(bits: np.random.BitGenerator) -> NDArray[Any]:
            data = random_blocks(bits, shape, kind, rms=gain * shape[-1] ** -0.5)
            if to_residual:
                data[..., shape[-2] - self._reserved :, :] = 0  # all types here read a block of zero bytes as zeros
            return data

        return Tensor(name=name, shape=shape, type=kind, make=make)

    def constant(self, name: str, values: NDArray[np.float32]) -> Tensor:
        """Given weights."""
        return Tensor(name=name, shape=values.shape, type=GGMLType.F32, make=lambda _: values)

    def norm(self, name: str, n: int) -> Tensor:
        """A norm that scales nothing."""
        return self.constant(name, np.ones(n, dtype=np.float32))

    def router_norm(self, name: str, layer: int) -> Tensor:
        """The norm before a layer's router: it scales nothing, and hides every bank but the layer's own."""
        values = np.ones(self.embd, dtype=np.float32)
        codes = values[self.embd - self._reserved :].reshape(self._banks, self._bank)
        codes[np.arange(self._banks) != layer % self._banks] = 0
        return self.constant(name, values)

    def normal(self, name: str, *shape: int, rms: float) -> Tensor:
        """Normally distributed weights [..., out, in]."""

        def make(bits: np.random.BitGenerator) -> NDArray[np.float32]:
            values: NDArray[np.float32] = np.random.Generator(bits).standard_normal(shape, dtype=np.float32)
            return values * np.float32(rms)

        return Tensor(name=name, shape=shape, type=GGMLType.F32, make=make)

    def embedding(self, name: str) -> Tensor:
        """Random rows with a code at their end."""

        def make(bits: np.random.BitGenerator) -> NDArray[Any]:
            spikes = np.zeros((len(self.trace.experts), self._bank), dtype=np.float32)
            np.fill_diagonal(spikes, _SPIKE)
            spikes = np.tile(spikes, self._banks)
            codes = gguf.quants.quantize(spikes, self.dense)
            data = random_blocks(bits, (self.n_vocab, self.embd), self.dense, rms=1.0)
            data[:, -codes.shape[1] :] = codes[self._position]
            return data

        return Tensor(name=name, shape=(self.n_vocab, self.embd), type=self.dense, make=make)

    def router(self, name: str, layer: int) -> Tensor:
        """Scores [expert, in] whose best are the layer's prescribed experts, in their order.

        In the banks that the one or two layers before show: the early logits.
        """
        n_positions, _, top_k = self.trace.experts.shape

        def make(bits: np.random.BitGenerator) -> NDArray[np.float32]:
            logits = -np.random.Generator(bits).random((n_positions, self.trace.n_expert), dtype=np.float32)
            chosen = _MARGIN + _SPREAD * np.arange(top_k, 0, -1, dtype=np.float32) / top_k
            np.put_along_axis(logits, self.trace.experts[:, layer].astype(np.int64), chosen[None], axis=1)
            weight = np.zeros((self.trace.n_expert, self.embd), dtype=np.float32)
            ahead = [] if self._early is None else [early[:, layer] for early in self._early.logits]
            for distance, scores in enumerate([logits, *ahead]):
                first = self.embd - self._reserved + (layer - distance) % self._banks * self._bank
                weight[:, first : first + n_positions] = scores.T / _SPIKE
            return weight

        return Tensor(name=name, shape=(self.trace.n_expert, self.embd), type=GGMLType.F32, make=make)

    def hash_table(self, name: str, layer: int) -> Tensor:
        """Expert ids [token, k]: the layer's prescribed experts by token id."""
        experts = self.trace.experts[:, layer].astype(np.int32)
        return Tensor(
            name=name,
            shape=(self.n_vocab, experts.shape[1]),
            type=GGMLType.I32,
            make=lambda _: experts[self._position],
        )

    def constant_gate(self, name: str) -> Tensor:
        """Weights that give every token the same logit before normalisation, 1, from its code alone."""
        values = np.zeros(self.embd, dtype=np.float32)
        values[self.embd - self._reserved :] = 1 / _SPIKE
        return self.constant(name, values)
