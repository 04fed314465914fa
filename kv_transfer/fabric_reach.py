"""GPU memory of other hosts of one NVLink domain, or of this host, mapped by exported handles.

The same kernel and the same promises as cuda_reach.py, for memory that is made here (`memory`),
because a handle has to be asked for when memory is made. With DOMAIN handles a peer may be on
another host, whose processes cannot be watched from here: their end is the control plane's word.
The DOMAIN form has not been run: it needs GPUs of several hosts in one domain.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from cluster.errors import ProtocolError, StartupError, TransferError
from kv_transfer import cuda_fabric
from kv_transfer.cuda_driver import HANDLE_BYTES, DriverError
from kv_transfer.cuda_fabric import Mapped, Sharing
from kv_transfer.cuda_reach import PROGRAMS, CudaReach
from kv_transfer.process_life import Life
from kv_transfer.reach import Opened

_EXPORTED = struct.Struct(f"<{HANDLE_BYTES}sQQQ")  # handle, bytes in all, offset, owner's address


@dataclass
class _Imported:
    address: int
    _memory: Mapped | None  # none of this process's own

    def close(self) -> None:
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.close()


class FabricReach(CudaReach):
    def __init__(
        self,
        device: torch.device,
        *,
        sharing: Sharing = Sharing.DOMAIN,
        row_bytes: Iterable[int] = (),
        programs: int = PROGRAMS,
    ) -> None:
        super().__init__(device, row_bytes=row_bytes, programs=programs)
        self.sharing = sharing
        self._made: list[Mapped] = []  # kept to the end of the process: tensors lie in it

    @property
    def path(self) -> str:
        return "nvlink/fabric" if self.spans_hosts else "nvlink/vmm"

    @property
    def spans_hosts(self) -> bool:
        return self.sharing is Sharing.DOMAIN

    def memory(self, nbytes: int) -> Tensor:
        """uint8 [nbytes] that can be exported, for a slab or a ring. Raises StartupError."""
        try:
            made = cuda_fabric.allocate(nbytes, self.device.index, self.sharing)
        except DriverError as error:
            raise StartupError(
                f"{self.device} cannot make {nbytes} bytes of memory with a {self.sharing.name} "
                f"handle: {error}"
            ) from error
        self._made.append(made)
        return cuda_fabric.as_tensor(made, nbytes, self.device)

    def export(self, memory: Tensor) -> bytes:
        address = memory.data_ptr()
        for made in self._made:
            if made.address <= address < made.address + made.nbytes:
                handle = cuda_fabric.export(made, self.sharing)
                return _EXPORTED.pack(handle, made.nbytes, address - made.address, address)
        raise StartupError(f"{memory.numel()} bytes were not made by this reach's memory()")

    def open(self, exported: bytes, owner: Life) -> Opened:
        try:
            handle, nbytes, offset, address = _EXPORTED.unpack(exported)
        except struct.error as error:
            raise ProtocolError(f"{len(exported)} bytes name no exported memory") from error
        if owner.is_own:
            return _Imported(address, None)
        if not self.spans_hosts and not owner.is_here:
            raise TransferError(f"process {owner.pid} is on another host")
        try:
            memory = cuda_fabric.import_(handle, self.sharing, owner.pid, nbytes, self.device.index)
        except DriverError as error:
            raise TransferError(
                f"{self.device} cannot map memory of process {owner.pid}: {error}"
            ) from error
        return _Imported(memory.address + offset, memory)
