"""Memory of GPUs of one host, mapped once by CUDA IPC and written by a kernel, over NVLink.

Works between processes that see one GPU each. Everything goes through a stream of its own, of
high priority: the programs of a push are few and must not wait behind those of a whole forward.
Knows nothing of rings and names.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cluster.errors import ProtocolError, StartupError, TransferError
from kernels.push_table import Pieces, PushTable, row_formats, tabulate
from kv_transfer import cuda_driver
from kv_transfer.cuda_driver import DriverError
from kv_transfer.device_moves import DeviceMoves
from kv_transfer.process_life import Life
from kv_transfer.reach import Move, Opened

_EXPORTED = struct.Struct(f"<{cuda_driver.HANDLE_BYTES}sQQ")  # handle, offset, owner's address
PROGRAMS = 32  # of 132 multiprocessors of an H200: 0.92 of the copy engine


@dataclass
class _Mapping:
    """One allocation of another process; several memories may lie in it."""

    base: int
    users: int = 0


@dataclass
class _Mapped:
    address: int
    _close: Callable[[], None] = field(repr=False)
    _open: bool = True

    def close(self) -> None:
        if self._open:
            self._open = False
            self._close()


class CudaReach:
    def __init__(
        self, device: torch.device, *, row_bytes: Iterable[int] = (), programs: int = PROGRAMS
    ) -> None:
        """Compiles its kernels for rows of these sizes now, some seconds; for others when they
        come. Raises StartupError without such a device."""
        if not torch.cuda.is_available():
            raise StartupError("no CUDA device can be seen by this process")
        self.device = torch.device("cuda", device.index or 0)
        self.programs = programs
        self._formats = row_formats(row_bytes)
        self._lock = threading.Lock()  # of the mappings, and of handing work to the stream
        self._mappings: dict[bytes, _Mapping] = {}
        self._stream = torch.cuda.Stream(self.device, priority=-1)  # type: ignore[no-untyped-call]
        if self._formats:
            for copy, hashed in ((True, True), (False, True), (True, False)):
                moves = self.plan([Move(_NOTHING, copy, hashed)], 1)
                moves.start(0)
                moves.digests()

    @property
    def path(self) -> str:
        return "nvlink/cuda_ipc"

    @property
    def spans_hosts(self) -> bool:
        return False

    def takes(self, memory: Tensor) -> bool:
        return memory.device == self.device

    def export(self, memory: Tensor) -> bytes:
        address = memory.data_ptr()
        try:
            cuda_driver.make_current(self.device.index)
            if not cuda_driver.is_shareable(address):
                raise StartupError(
                    f"{memory.numel()} bytes on {self.device} cannot be shared with other "
                    "processes: they were allocated in expandable segments; unset "
                    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True for ranks"
                )
            whole = cuda_driver.allocation(address)
            handle = cuda_driver.handle_of(whole.address)
        except DriverError as error:
            raise StartupError(f"memory of {self.device} cannot be shared: {error}") from error
        return _EXPORTED.pack(handle, address - whole.address, address)

    def open(self, exported: bytes, owner: Life) -> Opened:
        try:
            handle, offset, address = _EXPORTED.unpack(exported)
        except struct.error as error:
            raise ProtocolError(f"{len(exported)} bytes name no memory of a GPU") from error
        if owner.is_own:
            return _Mapped(address, lambda: None)
        if not owner.is_here:
            raise TransferError(f"process {owner.pid} is on another host")
        with self._lock:
            mapping = self._mappings.get(handle)
            if mapping is None:
                try:
                    cuda_driver.make_current(self.device.index)
                    mapping = _Mapping(cuda_driver.open_handle(handle))
                except DriverError as error:
                    raise TransferError(
                        f"{self.device} cannot map memory of process {owner.pid}: {error}"
                    ) from error
                self._mappings[handle] = mapping
            mapping.users += 1
        return _Mapped(mapping.base + offset, lambda: self._unmap(handle))

    def copy(self, owner: Life, source: int, target: int, nbytes: int) -> None:
        """By the device's copy engine: bytes in one run need no kernel."""
        try:
            with self._lock:
                cuda_driver.make_current(self.device.index)
                cuda_driver.copy(target, source, nbytes, self._stream.cuda_stream)
                done = self._stream.record_event()
            done.synchronize()
        except (DriverError, RuntimeError) as error:
            raise TransferError(
                f"copying {nbytes} bytes to process {owner.pid}: {error}"
            ) from error

    def push(self, owner: Life, pieces: Pieces, digests: int, after: Any = None) -> list[int]:
        try:
            return self.move(pieces, digests, after=after)
        except RuntimeError as error:
            raise TransferError(f"pushing rows to process {owner.pid}: {error}") from error

    def prepare_push(self, owner: Life, pieces: Pieces, digests: int) -> Callable[[], list[int]]:
        moves = self.plan([Move(pieces)], digests)

        def push() -> list[int]:
            try:
                moves.start(0)
                return moves.digests()
            except RuntimeError as error:
                raise TransferError(f"pushing rows to process {owner.pid}: {error}") from error

        return push

    def move(
        self, pieces: Pieces, digests: int, *, after: Any = None, copy: bool = True
    ) -> list[int]:
        """Any pieces whose addresses this process knows; without `copy` they are only hashed."""
        if not (self._formats or len(pieces.rows)):
            return [0] * digests
        moves = self.plan([Move(pieces, copy)], digests)
        moves.start(0, after)
        return moves.digests()

    def plan(self, moves: Sequence[Move], digests: int) -> DeviceMoves:
        return DeviceMoves(
            moves, digests, tabulated=self._tabulated, stream=self._stream, lock=self._lock,
            programs=self.programs,
        )  # fmt: skip

    def _tabulated(self, pieces: Pieces) -> PushTable:
        try:
            return tabulate(pieces, self._formats)
        except ValueError:  # rows of a size that was not announced: another kernel
            sizes = {form.row_bytes for form in self._formats} | set(pieces.row_bytes.tolist())
            self._formats = row_formats(sizes)
            return tabulate(pieces, self._formats)

    def close(self) -> None:
        with self._lock:
            for mapping in self._mappings.values():
                cuda_driver.close_handle(mapping.base)
            self._mappings.clear()

    def _unmap(self, handle: bytes) -> None:
        with self._lock:
            mapping = self._mappings.get(handle)
            if mapping is None:
                return
            mapping.users -= 1
            if not mapping.users:
                del self._mappings[handle]
                cuda_driver.make_current(self.device.index)
                cuda_driver.close_handle(mapping.base)


_NOTHING = Pieces(*(torch.zeros(0, dtype=torch.int64).numpy() for _ in Pieces._fields))
