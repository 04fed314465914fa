"""Memory of another process of this host, written through the kernel: no mapping, no copy apart.

Needs the right to trace the other process (the same user, and no stricter ptrace setting).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cluster.errors import ProtocolError, TransferError
from kernels.push_table import Integers, Pieces, row_formats, tabulate
from kv_transfer.process_life import Life
from kv_transfer.reach import Move

_LIBC = ctypes.CDLL(None, use_errno=True)
_MOST_PIECES = 1024  # of one call, IOV_MAX


@dataclass(frozen=True)
class _Address:
    address: int

    def close(self) -> None:
        pass


class _Made:
    def synchronize(self) -> None:
        pass


class _HostMoves:
    """As DeviceMoves, at once."""

    def __init__(self, moves: Sequence[Move], digests: int) -> None:
        self._moves = [
            (move, tabulate(move.pieces, row_formats(np.unique(move.pieces.row_bytes).tolist())))
            for move in moves
        ]
        self._found = torch.zeros(digests, dtype=torch.int64)

    def start(self, number: int, after: Any = None) -> _Made:
        from kernels.ops.kv_push import kv_push  # it needs Triton, and few hosts move rows so

        move, table = self._moves[number]
        found = self._found if move.hashed else torch.zeros_like(self._found)
        kv_push(table, found, torch.zeros(1, dtype=torch.int64), copy=move.copy)
        return _Made()

    def digests(self) -> list[int]:
        found = [value % 2**64 for value in self._found.tolist()]
        self._found.zero_()
        return found


class HostReach:
    path = "host/cma"
    spans_hosts = False

    def takes(self, memory: Tensor) -> bool:
        return memory.device.type == "cpu"

    def export(self, memory: Tensor) -> bytes:
        return memory.data_ptr().to_bytes(8, "little")

    def open(self, exported: bytes, owner: Life) -> _Address:
        if len(exported) != 8:
            raise ProtocolError(f"{len(exported)} bytes are no address of host memory")
        if not owner.is_here:
            raise TransferError(f"process {owner.pid} is on another host")
        return _Address(int.from_bytes(exported, "little"))

    def copy(self, owner: Life, source: int, target: int, nbytes: int) -> None:
        _write(owner, np.array([[source, nbytes]]), np.array([[target, nbytes]]))

    def push(self, owner: Life, pieces: Pieces, digests: int, after: Any = None) -> list[int]:
        nbytes = pieces.rows * pieces.row_bytes
        sources = np.stack([pieces.source, nbytes], axis=1)
        targets = np.stack([pieces.target, nbytes], axis=1)
        for start in range(0, len(nbytes), _MOST_PIECES):
            part = slice(start, start + _MOST_PIECES)
            _write(owner, sources[part], targets[part])
        return self.move(pieces, digests, copy=False) if digests else []

    def prepare_push(self, owner: Life, pieces: Pieces, digests: int) -> Callable[[], list[int]]:
        return partial(self.push, owner, pieces, digests)

    def move(self, pieces: Pieces, digests: int, *, copy: bool = True) -> list[int]:
        moves = self.plan([Move(pieces, copy)], digests)
        moves.start(0)
        return moves.digests()

    def plan(self, moves: Sequence[Move], digests: int) -> _HostMoves:
        return _HostMoves(moves, digests)

    def close(self) -> None:
        pass


def _write(owner: Life, sources: Integers, targets: Integers) -> None:
    """[n, 2] of address and bytes, pair by pair of one size. Raises TransferError."""
    if owner.is_own:
        for (source, nbytes), (target, _) in zip(sources.tolist(), targets.tolist(), strict=True):
            ctypes.memmove(target, source, nbytes)
        return
    wanted = int(sources[:, 1].sum())
    while wanted:
        ours, theirs = np.ascontiguousarray(sources), np.ascontiguousarray(targets)
        done = _LIBC.process_vm_writev(
            owner.pid,
            ctypes.c_void_p(ours.ctypes.data), ctypes.c_ulong(len(ours)),
            ctypes.c_void_p(theirs.ctypes.data), ctypes.c_ulong(len(theirs)),
            ctypes.c_ulong(0),
        )  # fmt: skip
        if done <= 0:
            why = os.strerror(ctypes.get_errno())
            raise TransferError(f"process {owner.pid} cannot be written to ({why})")
        wanted -= done
        sources, targets = _rest(sources, done), _rest(targets, done)


def _rest(pieces: Integers, done: int) -> Integers:
    """What is left when the first `done` bytes are written."""
    before = np.cumsum(pieces[:, 1]) - pieces[:, 1]
    begun = np.clip(done - before, 0, pieces[:, 1])[:, None] * np.array([[1, -1]])
    left: Integers = pieces + begun
    left = left[left[:, 1] > 0]
    return left
