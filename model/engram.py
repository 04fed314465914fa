"""Engram: memory read from hashed n-grams of token ids, added to the streams before a layer.

Hashing looks at compressed ids: tokens that differ in case or accents only are one. Its constants
follow from the config: one ascending run of primes shared by all layers, odd random multipliers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.formats import fake_quant
from kernels.ops.engram import engram_gates, ngram_rows
from model.options import ModelOptions
from model.rows import Rows
from model.spec import ModelSpec
from model.weight_source import WeightSource

# T = padded rows, N = longest n-gram, O = N - 1 orders, h = hash heads, n = streams, D = hidden


@dataclass(frozen=True)
class EngramHash:
    """Constants of one layer: row = hash mod prime + offset, for each order and head."""

    multipliers_N: Tensor
    primes_Oh: Tensor
    offsets_Oh: Tensor

    def rows(self, ids_TN: Tensor) -> Tensor:
        """Table rows [T, O * h] of compressed ids at t, t - 1, ..."""
        return ngram_rows(ids_TN, self.multipliers_N, self.primes_Oh, self.offsets_Oh)


def engram_hashes(spec: ModelSpec) -> dict[int, EngramHash]:
    """By layer."""
    ids = spec.engram_max_ngram_size
    shape = (ids - 1, spec.engram_n_heads)
    bound = np.iinfo(np.int64).max // spec.engram_compressed_vocab_size // 2
    primes = _primes(spec.engram_vocab_size)
    hashes = {}
    for layer in spec.engram_layer_ids:
        draws = np.random.default_rng(10007 * layer).integers(0, bound, ids, dtype=np.int64)
        sizes = torch.tensor([next(primes) for _ in range(math.prod(shape))])
        offsets = sizes.cumsum(0) - sizes
        multipliers = torch.from_numpy(2 * draws + 1)
        hashes[layer] = EngramHash(multipliers, sizes.view(shape), offsets.view(shape))
    return hashes


def _primes(start: int) -> Iterator[int]:
    """Ascending, from `start` on."""
    number = max(start, 2)
    while True:
        if all(number % divisor for divisor in range(2, math.isqrt(number) + 1)):
            yield number
        number += 1


class CompressedIds:
    """Token ids to the ids that Engram hashes; dead positions count as padding."""

    def __init__(self, spec: ModelSpec, token_map: Tensor | None) -> None:
        """`token_map` int64 [V]; None is the identity, for vocabularies that are not compressed."""
        if token_map is None and spec.engram_compressed_vocab_size < spec.vocab_size:
            raise ValueError("this model compresses its vocabulary for Engram: give token_map")
        if token_map is not None and len(token_map) != spec.vocab_size:
            raise ValueError(f"token_map has {len(token_map)} ids, not {spec.vocab_size}")
        pad = spec.engram_pad_token_id
        self._map = token_map
        self._pad = pad if token_map is None else int(token_map[pad])

    def __call__(self, ids: Tensor) -> Tensor:
        """A negative id is a dead position."""
        compressed = ids if self._map is None else self._map[ids]
        return compressed.masked_fill(ids < 0, self._pad)


class Engram:
    def __init__(
        self,
        weights: WeightSource,
        layer: int,
        hashing: EngramHash,
        spec: ModelSpec,
        options: ModelOptions,
    ) -> None:
        prefix = f"layers.{layer}.engram."
        self._read_rows, self._table = weights.table_rows, f"{prefix}embed"
        self._hash = hashing
        self._wkv = weights[f"{prefix}wkv"].t().contiguous()
        self._weight_nD = weights[f"{prefix}q_weight"] * weights[f"{prefix}k_weight"]
        self._eps = torch.tensor(spec.rms_norm_eps, device=self._wkv.device)
        self._fp8 = options.activations == "fp8"

    def __call__(self, streams_TnD: Tensor, ids_TN: Tensor, rows: Rows) -> Tensor:
        """Streams with the memory of each row's n-grams (compressed ids) added, but not at images.

        `ids` are on the host, where large tables stay and rows of them are named. One value is
        added to all streams, each through its own gate.
        """
        count, streams, size = streams_TnD.shape
        memory = self._read_rows(self._table, self._hash.rows(ids_TN)).flatten(1)
        memory = memory.to(streams_TnD.device)
        if self._fp8:
            memory = fake_quant(memory, "fp8")
        projected = (memory @ self._wkv).view(count, streams + 1, size)
        keys_TnD, value_TD = projected[:, :-1], projected[:, -1:]
        gates_Tn = engram_gates(streams_TnD, keys_TnD, self._weight_nD, self._eps)
        if rows.image_rows is not None:
            gates_Tn = gates_Tn.masked_fill(rows.image_rows.unsqueeze(1), 0.0)
        return torch.addcmul(streams_TnD, gates_Tn.unsqueeze(2), value_TD)
