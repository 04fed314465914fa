"""The transports that the tests of this folder run over: the double and the real one."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from kv_transfer.open_transport import open_transport
from kv_transfer.transport import Transport
from tests.kv_transfer.receiving_rank import Elsewhere, Here, memory_of

Receiver = Here | Elsewhere
Start = Callable[[str], Receiver]


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(
    scope="module",
    params=[
        "local",
        pytest.param("host", marks=pytest.mark.rank),
        pytest.param("nixl", marks=pytest.mark.rank),
        pytest.param("nvlink", marks=pytest.mark.gpu),
    ],
)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def device(kind: str) -> torch.device:
    """Where the memory is that transports of this kind move."""
    if kind == "nvlink" and not torch.cuda.is_available():
        pytest.skip("no GPU can be seen")
    return memory_of(kind)


@pytest.fixture(scope="module")
def sending(kind: str, device: torch.device) -> Iterator[Transport]:
    """The transport of this process, shared: a NIXL agent takes half a second."""
    transport = open_transport(kind, "prefill-0", write_bytes=4096, device=device)
    yield transport
    transport.close()


@pytest.fixture(scope="module")
def start(kind: str) -> Start:
    """Starts a receiving rank: in a process of its own, if the transport leaves this one."""

    def started(name: str) -> Receiver:
        return Here(kind, name) if kind == "local" else Elsewhere(kind, name)

    return started


@pytest.fixture(scope="module")
def receiver(start: Start) -> Iterator[Receiver]:
    with start("decode-0") as rank:
        yield rank
