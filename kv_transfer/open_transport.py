"""Transports by the name that the configuration gives them."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from kv_transfer.direct_transport import DirectTransport
from kv_transfer.host_reach import HostReach
from kv_transfer.local_transport import LocalTransport
from kv_transfer.transport import Transport

_CPU = torch.device("cpu")


def open_transport(
    kind: str,
    name: str,
    *,
    write_bytes: int = 1 << 20,
    device: torch.device = _CPU,
    row_bytes: Iterable[int] = (),
) -> Transport:
    """The transport of one rank, for memory on `device`.

    "nixl" goes anywhere; "nvlink" is for GPUs of one host that map each other's memory; "host"
    for processes of one host; "local" within one process. "auto": each pair of GPUs by nvlink
    where that works, with a warning and by NIXL where it does not; NIXL alone for a CPU.

    A rank that keeps its `name` when it starts again replaces its earlier life at its peers.
    Over NIXL, writes go in pieces of at most `write_bytes`; `row_bytes` are the sizes of rows
    that will be pushed over nvlink. Raises StartupError if it cannot start, ValueError for an
    unknown kind.
    """
    match kind:
        case "local":
            return LocalTransport(name)
        case "host":
            return DirectTransport(name, HostReach())
        case "nvlink":
            return _nvlink(name, device, row_bytes)
        case "auto" if device.type == "cuda":
            from kv_transfer.chosen_transport import ChosenTransport

            direct = _nvlink(name, device, row_bytes)
            return ChosenTransport(direct, _nixl(name, write_bytes, device))
        case "nixl" | "auto":
            return _nixl(name, write_bytes, device)
        case _:
            raise ValueError(
                f"no transport is called {kind!r}; there are auto, nvlink, nixl, host and local"
            )


def _nixl(name: str, write_bytes: int, device: torch.device) -> Transport:
    from kv_transfer.nixl_transport import NixlTransport  # here: importing it takes a second

    return NixlTransport(name, write_bytes=write_bytes, device=device)


def _nvlink(name: str, device: torch.device, row_bytes: Iterable[int]) -> DirectTransport:
    from kv_transfer.cuda_reach import CudaReach  # here: Triton's driver is for GPU machines

    return DirectTransport(name, CudaReach(device, row_bytes=row_bytes))
