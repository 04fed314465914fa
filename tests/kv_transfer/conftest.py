"""The transports that the tests of this folder run over: the double and the real one."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from kv_transfer.open_transport import open_transport
from kv_transfer.transport import Transport
from tests.kv_transfer.receiving_rank import Elsewhere, Here

Receiver = Here | Elsewhere
Start = Callable[[str], Receiver]


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(
    scope="module",
    params=["local", pytest.param("nixl", marks=pytest.mark.rank)],
)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def sending(kind: str) -> Iterator[Transport]:
    """The transport of this process, shared: a NIXL agent takes half a second."""
    transport = open_transport(kind, "prefill-0", write_bytes=4096)
    yield transport
    transport.close()


@pytest.fixture(scope="module")
def start(kind: str) -> Start:
    """Starts a receiving rank: over NIXL in a process of its own."""

    def started(name: str) -> Receiver:
        return Here(kind, name) if kind == "local" else Elsewhere(kind, name)

    return started


@pytest.fixture(scope="module")
def receiver(start: Start) -> Iterator[Receiver]:
    with start("decode-0") as rank:
        yield rank
