"""The compressor of a KV source: from the attention input to compressed rows and index keys.

With ratio 2 a row pools positions 2j and 2j + 1; while the second is not there yet, the first one's
values wait in the cache (the field TAIL). With ratio 1 every position is a row. A row stands at
its first position.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.ops.compress import compress
from kernels.ops.rope import rope
from model.cache import Cache
from model.norm import RMSNorm
from model.rows import Ints, Rows, pad_rows
from model.spec import ModelSpec
from model.state import TAIL, compressed, index_keys
from model.weight_source import WeightSource

# T = padded rows, R = requests, N = completed groups, D = hidden size, d = head size


@dataclass(frozen=True)
class Groups:
    """The groups that a forward completes; `count` of them, padded to N."""

    count: int
    numbers: Tensor  # [count]
    requests: Tensor  # [count]
    last: Ints  # [count] row of each group's last position
    last_N: Tensor
    turns_N1P: Tensor  # rotation of its first position

    @classmethod
    def of(cls, rows: Rows, ratio: int) -> Groups:
        positions = rows.positions_T[: rows.count]
        last = ((positions + 1) % ratio == 0).nonzero()[0]
        numbers = positions[last] // ratio
        return cls(
            len(last),
            rows.tensor(numbers),
            rows.tensor(rows.requests_T[last]),
            last,
            rows.tensor(pad_rows(last)),
            rows.turns_of(pad_rows(numbers * ratio), True),
        )


@dataclass(frozen=True)
class Pairs:
    """Where ratio 2 finds the first position of each group, and which positions stay open."""

    tail_requests_R: Tensor
    tail_rows_R: Tensor  # row of the pending position before each chunk; -1 where there is none
    first_N: Tensor  # into the R tails, then the T rows
    open: Tensor  # rows whose values may have to wait
    open_requests: Tensor
    open_positions: Tensor

    @classmethod
    def of(cls, rows: Rows) -> Pairs:
        last_N = pad_rows(rows.plan(Groups.of, 2).last)
        starts_R, requests = rows.starts_R, len(rows.starts_R)
        request_N = rows.requests_T[last_N]
        from_tail_N = rows.positions_T[last_N] == starts_R[request_N]
        first_N = np.where(from_tail_N, request_N, requests + last_N - 1)
        newest = rows.newest(1, False)
        open_ = newest[rows.positions_T[newest] % 2 == 0]
        return cls(
            rows.tensor(np.arange(requests)),
            rows.tensor(np.where(starts_R % 2 == 1, starts_R - 1, -1)),
            rows.tensor(np.maximum(first_N, 0)),
            rows.tensor(open_),
            rows.tensor(rows.requests_T[open_]),
            rows.tensor(rows.positions_T[open_]),
        )


class Compressor:
    def __init__(self, weights: WeightSource, layer: int, spec: ModelSpec) -> None:
        prefix = f"layers.{layer}.attn."
        self._layer, self._ratio = layer, spec.compress_ratios[layer]
        parts = [weights[f"{prefix}compressor.wkv.weight"]]
        if self._ratio == 2:
            parts.append(weights[f"{prefix}compressor.wgate.weight"])
        self._project_DX = torch.cat(parts).t().contiguous()
        self._norm = RMSNorm(weights, f"{prefix}compressor.norm", spec)
        self._key = weights[f"{prefix}indexer.wk.weight"].t().contiguous()
        self._key_norm = RMSNorm(weights, f"{prefix}indexer.k_norm", spec)

    def __call__(self, x_TD: Tensor, rows: Rows, cache: Cache) -> None:
        """Write the compressed rows and index keys of the groups that these rows complete."""
        projected_TX = rows.collect(x_TD @ self._project_DX)
        rows = rows.whole
        groups = rows.plan(Groups.of, self._ratio)
        if self._ratio == 2:
            latents_Nd = self._pool(projected_TX, rows, groups, cache)
        else:
            latents_Nd = projected_TX.index_select(0, groups.last_N)
        if not groups.count:
            return
        latents_Nd = self._norm(latents_Nd)
        keys = self._key_norm(latents_Nd @ self._key)
        for field, values in (
            (index_keys(self._ratio), keys),  # of the latents as they are before their rotation
            (compressed(self._ratio), latents_Nd),
        ):
            turned = rope(values.unsqueeze(1), groups.turns_N1P).squeeze(1)[: groups.count]
            cache.write(field, self._layer, groups.requests, groups.numbers, turned)
        cache.rows_are_final(self._layer)

    def _pool(self, projected_TX: Tensor, rows: Rows, groups: Groups, cache: Cache) -> Tensor:
        pairs = rows.plan(Pairs.of)
        tails_RX = cache.read(TAIL, self._layer, pairs.tail_requests_R, pairs.tail_rows_R)
        waiting = projected_TX.index_select(0, pairs.open)
        cache.write(TAIL, self._layer, pairs.open_requests, pairs.open_positions, waiting)
        first_NX = torch.cat([tails_RX, projected_TX]).index_select(0, pairs.first_N)
        last_NX = projected_TX.index_select(0, groups.last_N)
        return compress(*first_NX.chunk(2, 1), *last_NX.chunk(2, 1))
