"""The paths of a rank on a GPU that reaches nobody directly, on a CPU: the host makes the moves."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from kv_transfer.chosen_transport import ChosenTransport
from kv_transfer.host_reach import HostReach
from kv_transfer.open_transport import open_transport


def open_planned_paths(
    path: str,
    packed: str,
    name: str,
    *,
    write_bytes: int = 1 << 20,
    device: torch.device | None = None,
    row_bytes: Iterable[int] = (),
) -> ChosenTransport:
    """As open_paths: pushes are planned for a whole request, and packed, whatever `path` says."""
    transport = open_transport(packed, name, write_bytes=write_bytes)
    return ChosenTransport(name, None, transport, reach=HostReach())
