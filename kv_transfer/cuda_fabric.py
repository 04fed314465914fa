"""GPU memory with a handle that others can map: within a process, a host or a whole NVLink domain.

The driver's virtual memory calls: memory is made, given an address and access, and exported; the
other side imports it and gives it an address of its own. Knows nothing of who shares what.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from kv_transfer.cuda_driver import HANDLE_BYTES, DriverError, call, make_current

_PINNED = 1
_ON_DEVICE = 1
_READ_AND_WRITE = 3
_PIDFD_GETFD = 438  # the number of the system call, on every architecture
_LIBC = ctypes.CDLL(None, use_errno=True)


class Sharing(IntEnum):
    """How far a handle reaches, as the driver numbers its kinds."""

    HOST = 1  # a file descriptor
    DOMAIN = 8  # a fabric handle: bytes, for every host whose GPUs are of one NVLink domain


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _Properties(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("windows", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


class _Access(ctypes.Structure):
    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


@dataclass(frozen=True)
class Mapped:
    """Memory that has an address in this process. `close` it, when nothing uses it any more."""

    address: int
    nbytes: int
    handle: int

    def close(self) -> None:
        call("cuMemUnmap", ctypes.c_uint64(self.address), ctypes.c_size_t(self.nbytes))
        call("cuMemAddressFree", ctypes.c_uint64(self.address), ctypes.c_size_t(self.nbytes))
        call("cuMemRelease", ctypes.c_uint64(self.handle))


def allocate(nbytes: int, device: int, sharing: Sharing) -> Mapped:
    """At least `nbytes`. Raises DriverError, for a domain also where its service does not run."""
    make_current(device)
    properties = _Properties(_PINNED, sharing, _Location(_ON_DEVICE, device))
    step = ctypes.c_size_t()
    call("cuMemGetAllocationGranularity", ctypes.byref(step), ctypes.byref(properties), 0)
    whole = -(-nbytes // step.value) * step.value
    handle = ctypes.c_uint64()
    call(
        "cuMemCreate",
        ctypes.byref(handle), ctypes.c_size_t(whole), ctypes.byref(properties), ctypes.c_uint64(0),
    )  # fmt: skip
    return _map(handle.value, whole, device)


def export(memory: Mapped, sharing: Sharing) -> bytes:
    """HANDLE_BYTES; of a file descriptor, which stays open as long as this process lives."""
    found = ctypes.create_string_buffer(HANDLE_BYTES)
    call(
        "cuMemExportToShareableHandle",
        found, ctypes.c_uint64(memory.handle), ctypes.c_int(sharing), ctypes.c_uint64(0),
    )  # fmt: skip
    return found.raw


def import_(exported: bytes, sharing: Sharing, owner: int, nbytes: int, device: int) -> Mapped:
    """Memory that the process `owner` has exported. Raises DriverError."""
    make_current(device)
    handle = ctypes.c_uint64()
    if sharing is Sharing.HOST:
        fd = _fd_of(owner, int.from_bytes(exported[:4], "little"))
        try:
            source: Any = ctypes.c_void_p(fd)
            call("cuMemImportFromShareableHandle", ctypes.byref(handle), source, int(sharing))
        finally:
            os.close(fd)
    else:
        source = ctypes.create_string_buffer(exported, HANDLE_BYTES)
        call("cuMemImportFromShareableHandle", ctypes.byref(handle), source, int(sharing))
    return _map(handle.value, nbytes, device)


def as_tensor(memory: Mapped, nbytes: int, device: torch.device) -> Tensor:
    """uint8 [nbytes] over memory that the caller keeps."""

    class Described:
        __cuda_array_interface__ = {  # noqa: RUF012  # a protocol, read once
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (memory.address, False),
            "version": 2,
        }

    return torch.as_tensor(Described(), device=device)


def _map(handle: int, nbytes: int, device: int) -> Mapped:
    address = ctypes.c_uint64()
    size = ctypes.c_size_t(nbytes)
    nothing = ctypes.c_uint64(0)
    call("cuMemAddressReserve", ctypes.byref(address), size, ctypes.c_size_t(0), nothing, nothing)
    call("cuMemMap", address, size, ctypes.c_size_t(0), ctypes.c_uint64(handle), nothing)
    access = _Access(_Location(_ON_DEVICE, device), _READ_AND_WRITE)
    call("cuMemSetAccess", address, size, ctypes.byref(access), ctypes.c_size_t(1))
    return Mapped(address.value, nbytes, handle)


def _fd_of(process: int, fd: int) -> int:
    """Another process's open file, here. Raises DriverError without the right to trace it."""
    try:
        of_process = os.pidfd_open(process)
    except OSError as error:
        raise DriverError(f"process {process}: {error.strerror}") from error
    try:
        found: int = _LIBC.syscall(_PIDFD_GETFD, of_process, fd, 0)
    finally:
        os.close(of_process)
    if found < 0:
        raise DriverError(f"file {fd} of process {process}: {os.strerror(ctypes.get_errno())}")
    return found
