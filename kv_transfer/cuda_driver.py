"""The few calls of NVIDIA's driver that torch does not offer: memory that processes share.

With cuda_fabric.py the only file that knows the driver's interface. Loads the driver at
the first call, so that a machine without one can import it.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any, NamedTuple

HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1  # the only flag that cuIpcOpenMemHandle has
_IPC_CAPABLE = 10  # CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE


class DriverError(Exception):
    """What the driver says."""


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_ubyte * HANDLE_BYTES)]


class Range(NamedTuple):
    """An allocation as the driver knows it; torch hands out parts of such."""

    address: int
    nbytes: int


def make_current(device: int) -> None:
    """This thread's driver calls are for `device` from now on. torch does so lazily."""
    call("cuCtxSetCurrent", _context(device))


def is_shareable(address: int) -> bool:
    """Not so for what was allocated in expandable segments."""
    found = ctypes.c_int(0)
    call("cuPointerGetAttribute", ctypes.byref(found), _IPC_CAPABLE, ctypes.c_uint64(address))
    return bool(found.value)


def allocation(address: int) -> Range:
    base, nbytes = ctypes.c_uint64(), ctypes.c_size_t()
    call(
        "cuMemGetAddressRange_v2",
        ctypes.byref(base), ctypes.byref(nbytes), ctypes.c_uint64(address),
    )  # fmt: skip
    return Range(base.value, nbytes.value)


def handle_of(address: int) -> bytes:
    """For other processes of this host: names the whole allocation around `address`."""
    handle = _Handle()
    call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
    return bytes(handle)


def open_handle(handle: bytes) -> int:
    """Where the other process's allocation begins here. Once a handle; not of this process."""
    base = ctypes.c_uint64()
    call(
        "cuIpcOpenMemHandle_v2",
        ctypes.byref(base), _Handle.from_buffer_copy(handle), ctypes.c_uint(_LAZY_PEER_ACCESS),
    )  # fmt: skip
    return base.value


def close_handle(base: int) -> None:
    call("cuIpcCloseMemHandle", ctypes.c_uint64(base))


def copy(target: int, source: int, nbytes: int, stream: int) -> None:
    """Any two addresses that this process knows; done when `stream` has got past it."""
    call(
        "cuMemcpyAsync",
        ctypes.c_uint64(target), ctypes.c_uint64(source), ctypes.c_size_t(nbytes),
        ctypes.c_void_p(stream),
    )  # fmt: skip


@lru_cache
def _context(device: int) -> ctypes.c_void_p:
    """The one that torch uses too."""
    call("cuInit", 0)
    context = ctypes.c_void_p()
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), ctypes.c_int(device))
    return context


@lru_cache
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DriverError(str(error)) from error


def call(name: str, *arguments: Any) -> None:
    """Raises DriverError unless the driver answers with success."""
    driver = _driver()
    result = getattr(driver, name)(*arguments)
    if result:
        text = ctypes.c_char_p()
        driver.cuGetErrorString(result, ctypes.byref(text))
        raise DriverError(f"{name}: {(text.value or b'unknown error').decode()} ({result})")
