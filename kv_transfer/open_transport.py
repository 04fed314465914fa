"""Transports by the names that the configuration gives them."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch

from cluster.errors import StartupError
from kv_transfer.chosen_transport import ChosenTransport
from kv_transfer.direct_transport import DirectTransport
from kv_transfer.host_reach import HostReach
from kv_transfer.local_transport import LocalTransport
from kv_transfer.reach import Reach
from kv_transfer.transport import Transport

logger = logging.getLogger(__name__)

_CPU = torch.device("cpu")
_TRIED_BYTES = 1 << 21


def open_paths(
    path: str,
    packed: str,
    name: str,
    *,
    write_bytes: int = 1 << 20,
    device: torch.device = _CPU,
    row_bytes: Iterable[int] = (),
) -> ChosenTransport:
    """What a rank whose request state is on `device` reaches its peers by.

    `path`: "auto" goes direct between devices where a pair can, and else by `packed`, with a
    warning; "direct" and "packed" go one way only. `packed` is "nixl" or "local", between memories
    of the device if it can, else of the host; `row_bytes` are the sizes of rows that will be
    pushed. Raises StartupError for a path that cannot be had.

    Between CPUs "auto" is packed: measured, a direct handoff is no quicker there, because hashing
    is most of both, and it needs the right to trace other processes, which containers lack.
    """
    if device.type == "cpu":
        if path == "direct":
            return ChosenTransport(name, _direct(name, device, row_bytes), None)
        return ChosenTransport(name, None, open_transport(packed, name, write_bytes=write_bytes))
    direct, why = None, ""
    if path != "packed":
        try:
            direct = _direct(name, device, row_bytes)
        except StartupError as error:
            if path == "direct":
                raise
            logger.warning("%s: %s; all peers take the packed path", name, error)
            why = str(error)
    if path == "direct":
        return ChosenTransport(name, direct, None)
    reach: Reach | None = None
    try:
        reach = direct.reach if direct else _reach(device, row_bytes)
        other = _between_devices(packed, name, device)
    except StartupError as error:
        logger.warning("%s: %s; what is packed goes through host memory", name, error)
        device, reach = _CPU, None
        other = open_transport(packed, name, write_bytes=write_bytes)
    return ChosenTransport(name, direct, other, why_packed=why, cells=device, reach=reach)


def _between_devices(packed: str, name: str, device: torch.device) -> Transport:
    """Raises StartupError also for memory that it turns out not to take."""
    transport = open_transport(packed, name, device=device)
    try:
        memory = torch.zeros(_TRIED_BYTES, dtype=torch.uint8, device=device)
        transport.register(memory, source_only=True)
    except (StartupError, ValueError) as error:
        transport.close()
        raise StartupError(f"{transport.path} takes no memory of {device}: {error}") from error
    return transport


def open_transport(
    kind: str,
    name: str,
    *,
    write_bytes: int = 1 << 20,
    device: torch.device = _CPU,
    row_bytes: Iterable[int] = (),
) -> Transport:
    """One transport, for memory on `device`.

    "nixl" goes anywhere; "nvlink" is for GPUs of one host that map each other's memory; "host"
    for processes of one host; "local" within one process.

    A rank that keeps its `name` when it starts again replaces its earlier life at its peers.
    Over NIXL, writes go in pieces of at most `write_bytes`; `row_bytes` are the sizes of rows
    that will be pushed over nvlink. Raises StartupError if it cannot start, ValueError for an
    unknown kind.
    """
    match kind:
        case "local":
            return LocalTransport(name)
        case "host":
            return _direct(name, _CPU, ())
        case "nvlink":
            return _direct(name, device, row_bytes)
        case "nixl":
            return _nixl(name, write_bytes, device)
        case _:
            raise ValueError(
                f"no transport is called {kind!r}; there are nixl, nvlink, host and local"
            )


def _direct(name: str, device: torch.device, row_bytes: Iterable[int]) -> DirectTransport:
    return DirectTransport(name, _reach(device, row_bytes))


def _reach(device: torch.device, row_bytes: Iterable[int]) -> Reach:
    match device.type:
        case "cpu":
            return HostReach()
        case "cuda":
            from kv_transfer.cuda_reach import CudaReach  # here: Triton's driver is for GPUs

            return CudaReach(device, row_bytes=row_bytes)
        case _:
            raise StartupError(f"there is no direct path between {device.type} devices yet")


def _nixl(name: str, write_bytes: int, device: torch.device) -> Transport:
    from kv_transfer.nixl_transport import NixlTransport  # here: importing it takes a second

    return NixlTransport(name, write_bytes=write_bytes, device=device)
