"""A step as numbers: what the leader of a context-parallel team tells those who compute with it.

Rows of the batch, and where the state of each request lies. Everything is int64 in one vector, so
nothing that arrives is unpickled or evaluated. What images show comes beside it, as rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kv_transfer.blocks import Blocks
from model.batch import ForwardBatch

# T = rows of the step, R = requests, L = rows whose logits are wanted, n = Engram's longest n-gram

Ints = npt.NDArray[np.int64]
_SIZES = 6  # T, R, L, n, width of an image row or 0, length of all block tables


@dataclass(frozen=True)
class LentBlocks:
    """Blocks and slot that another rank has leased, for its own slab and, alike, for this one."""

    block_table: Ints
    slot: int

    @property
    def block_ids(self) -> tuple[int, ...]:
        return tuple(self.block_table.tolist())


@dataclass(frozen=True)
class ContextStep:
    batch: ForwardBatch
    leases: Sequence[Blocks]

    @property
    def image_width(self) -> int:
        """Of a row of what images show; 0: the batch has none."""
        given_TD = self.batch.embeddings_TD
        return 0 if given_TD is None else given_TD.shape[1]

    def numbers(self) -> Ints:
        batch = self.batch
        embedded_T = batch.embedded_T
        if embedded_T is None:
            embedded_T = torch.zeros(batch.num_rows, dtype=torch.bool)
        tables = [lease.block_table for lease in self.leases]
        sizes = (
            batch.num_rows,
            batch.num_requests,
            len(batch.logit_rows),
            batch.ngrams_Tn.shape[1],
            self.image_width,
            sum(map(len, tables)),
        )
        parts = (
            *(batch.token_ids_T, batch.positions_T, batch.requests_T),
            *(batch.images_T, embedded_T, batch.ngrams_Tn),
            *(batch.starts_R, batch.counts_R, batch.window_starts_R, batch.logit_rows),
        )
        return np.concatenate(
            [
                np.array(sizes, np.int64),
                *(part.numpy().astype(np.int64).ravel() for part in parts),
                np.array([lease.slot for lease in self.leases], np.int64),
                np.array([len(table) for table in tables], np.int64),
                *tables,
            ]
        )

    @classmethod
    def of(cls, numbers: Ints, embeddings_TD: Tensor | None = None) -> ContextStep:
        """What `numbers` said. Raises ValueError for a vector that is not one."""
        rows, requests, wanted, ngram, _, blocks = numbers[:_SIZES].tolist()
        lengths = (*[rows] * 5, rows * ngram, *[requests] * 3, wanted, requests, requests, blocks)
        if sum(lengths) != len(numbers) - _SIZES:
            raise ValueError(f"a step of {sum(lengths)} numbers, not {len(numbers) - _SIZES}")
        parts = np.split(numbers[_SIZES:], np.cumsum(lengths)[:-1])
        *geometry, slots, table_lengths, tables = parts
        ids, positions, owners, images, embedded, ngrams, starts, counts, windows, logit_rows = (
            torch.from_numpy(np.ascontiguousarray(part)) for part in geometry
        )
        batch = ForwardBatch(
            token_ids_T=ids,
            positions_T=positions,
            requests_T=owners,
            images_T=images.bool(),
            ngrams_Tn=ngrams.view(rows, ngram),
            starts_R=starts,
            counts_R=counts,
            window_starts_R=windows,
            logit_rows=logit_rows,
            embeddings_TD=embeddings_TD,
            embedded_T=embedded.bool(),
        )
        lent = np.split(tables, np.cumsum(table_lengths)[:-1]) if requests else []
        return cls(batch, [LentBlocks(*one) for one in zip(lent, slots.tolist(), strict=True)])


def image_width(numbers: Ints) -> int:
    return int(numbers[4])


def num_rows(numbers: Ints) -> int:
    return int(numbers[0])
