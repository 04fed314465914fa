"""Engram over tables as they are stored: rows are named, fetched and decoded on the device.

As model/engram.py. Where tables are out of the device's reach, the host looks rows up and the
forward is given their values.
"""

from __future__ import annotations

from torch import Tensor

from kernels.ops.engram_gather import engram_gather
from kernels.ops.fp8_rounded import fp8_rounded
from kernels.ops.joined.engram_mix import engram_mix
from model.engram import EngramHash
from model.options import ModelOptions
from model.packed.ranges import named
from model.packed.rows import PackedRows
from model.packed.weight_source import PackedWeightSource
from model.spec import ModelSpec

# T = rows, N = longest n-gram, O = N - 1 orders, h = hash heads, n = streams, D = hidden


class Engram:
    def __init__(
        self,
        weights: PackedWeightSource,
        layer: int,
        hashing: EngramHash,
        spec: ModelSpec,
        options: ModelOptions,
    ) -> None:
        prefix = f"layers.{layer}.engram."
        self._layer = layer
        self._table = weights.table(f"{prefix}embed")
        device, codes = weights.device, self._table.codes
        self._reachable = codes.device.type == device.type or codes.is_pinned()
        self._host_hash = hashing
        self._hash = EngramHash(
            hashing.multipliers_N.to(device),
            hashing.primes_Oh.to(device),
            hashing.offsets_Oh.to(device),
        )
        self._dtype = weights.dtype
        self._wkv = weights.linear(f"{prefix}wkv")
        self._weight_nD = weights.fp32(f"{prefix}q_weight") * weights.fp32(f"{prefix}k_weight")
        self._eps = spec.rms_norm_eps
        self._fp8 = options.activations == "fp8"

    @property
    def on_device(self) -> bool:
        """Whether the forward can look rows up itself."""
        return self._reachable

    def values(self, ids_TN: Tensor) -> Tensor:
        """[T, O * h * dim] of compressed ids on the host."""
        rows_TX = self._host_hash.rows(ids_TN)
        return engram_gather(self._table.codes, self._table.scales, rows_TX, self._dtype)

    def __call__(
        self, streams_TnD: Tensor, ids_TN: Tensor, rows: PackedRows, images_T: Tensor
    ) -> Tensor:
        """Streams with the memory of each row's n-grams (compressed ids) added, but not at images.

        One value is added to all streams, each through its own gate.
        """
        with named("engram"):
            memory_TX = self._memory(ids_TN, rows)
            projected = self._wkv(fp8_rounded(memory_TX) if self._fp8 else memory_TX)
            return engram_mix(streams_TnD, projected, self._weight_nD, self._eps, images_T)

    def _memory(self, ids_TN: Tensor, rows: PackedRows) -> Tensor:
        if rows.engram is not None:
            return rows.engram[self._layer].to(self._dtype)
        table = self._table
        return engram_gather(table.codes, table.scales, self._hash.rows(ids_TN), self._dtype)
