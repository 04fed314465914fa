"""Pushes of random rows between random places, run by the kernel and by its reference.

    TRITON_INTERPRET=1 python -m tests.kernels.pushes

compares them on the CPU, in a process of its own: Triton reads the variable when it is imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.ops.kv_push import launch, reference
from kernels.push_table import Integers, Pieces, row_formats, tabulate

DIGESTS = 5


@dataclass(frozen=True)
class RandomPush:
    """`pieces` with offsets into a memory of `nbytes` instead of addresses."""

    pieces: Pieces
    nbytes: int
    piece_rows: int

    @classmethod
    def of(cls, sizes: Sequence[int], count: int, piece_rows: int, seed: int) -> RandomPush:
        """Pieces of up to `piece_rows` rows, a third of them not aligned where that may be."""
        generator = np.random.default_rng(seed)
        row_bytes = generator.choice(sizes, count)
        rows = generator.integers(1, piece_rows + 1, count)
        room = (rows * row_bytes + 47) // 16 * 16
        step = row_bytes & -row_bytes
        odd = (generator.integers(0, 3, count) == 0) & (row_bytes % 16 > 0)
        order = generator.permutation(count)
        target = np.zeros(count, dtype=np.int64)
        target[order] = np.cumsum(room[order]) - room[order]
        numbers = generator.integers(0, 1 << 38, count) * generator.choice([1, 4], count)
        return cls(
            Pieces(
                source=np.cumsum(room) - room + odd * step,
                target=target,
                rows=rows,
                first=numbers,
                digest=generator.integers(0, DIGESTS, count),
                row_bytes=row_bytes,
            ),
            int(room.sum()),
            piece_rows,
        )

    def memories(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.nbytes)
        source = torch.randint(256, (self.nbytes,), generator=generator, dtype=torch.uint8)
        return source, torch.full((self.nbytes,), 0xA5, dtype=torch.uint8)

    def at(self, source: Tensor, target: Tensor) -> Pieces:
        def moved(offsets: Integers, memory: Tensor) -> Integers:
            return offsets + memory.data_ptr()

        return self.pieces._replace(
            source=moved(self.pieces.source, source), target=moved(self.pieces.target, target)
        )

    def check(self, device: torch.device, programs: int) -> None:
        """The kernel leaves the same bytes and digests as the reference does on the CPU."""
        formats = row_formats(self.pieces.row_bytes.tolist())
        source, expected = self.memories()
        digests, done = _zeros(DIGESTS), _zeros(1)
        reference(tabulate(self.at(source, expected), formats), digests, done, programs)
        for copy, hashed in ((True, True), (False, True), (True, False)):
            here, there = source.to(device), self.memories()[1].to(device)
            found, ended = _zeros(DIGESTS).to(device), _zeros(1).to(device)
            table = tabulate(self.at(here, there), formats)
            table = table.to(device) if device.type == "cuda" else table
            launch(table, found, ended, programs, copy, hashed)
            assert ended.item() == programs
            assert torch.equal(found.cpu(), digests if hashed else _zeros(DIGESTS))
            assert torch.equal(there.cpu(), expected if copy else self.memories()[1])


def _zeros(count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.int64)


if __name__ == "__main__":
    RandomPush.of([288, 68, 34, 7, 4096], 8, 16, seed=1).check(torch.device("cpu"), 2)
    # One program after the other: the first ones claim all that they may, the last find little.
    RandomPush.of([4096], 20, 16, seed=2).check(torch.device("cpu"), 4)
