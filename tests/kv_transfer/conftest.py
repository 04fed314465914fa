"""The transports that the tests of this folder run over: the double and the real one."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from kv_transfer.transport import Transport
from tests.kv_transfer.receiving_rank import ON_GPUS, Elsewhere, Here, memory_of, opened

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
        pytest.param("nixl-vram", marks=pytest.mark.gpu),
    ],
)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def device(kind: str) -> torch.device:
    """Where the memory is that transports of this kind move."""
    if kind in ON_GPUS and not torch.cuda.is_available():
        pytest.skip("no GPU can be seen")
    return memory_of(kind)


@pytest.fixture(scope="module")
def sending(kind: str, device: torch.device) -> Iterator[Transport]:
    """The transport of this process, shared: a NIXL agent takes half a second."""
    transport = opened(kind, "prefill-0", device, write_bytes=4096)
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
