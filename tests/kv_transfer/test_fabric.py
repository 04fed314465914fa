"""Memory shared by exported handles between two processes on GPUs of this host."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from multiprocessing.connection import Connection

import numpy as np
import pytest
import torch

from cluster.errors import StartupError
from kernels.push_table import Pieces
from kv_transfer.cuda_fabric import Sharing
from kv_transfer.direct_transport import DirectTransport
from kv_transfer.fabric_reach import FabricReach

pytestmark = pytest.mark.gpu

RING_BYTES = 1 << 20
OFFERED_BYTES = 3 << 20


def receive(pipe: Connection) -> None:
    """A rank whose memory was made to be exported; answers with what stands there."""
    reach = FabricReach(torch.device("cuda", 0), sharing=Sharing.HOST)
    transport = DirectTransport("decode-0", reach)
    ring, offered = reach.memory(RING_BYTES).zero_(), reach.memory(OFFERED_BYTES).zero_()
    torch.cuda.synchronize()
    transport.register(ring)
    transport.offer(offered)
    pipe.send_bytes(transport.metadata())
    while pipe.recv_bytes():
        torch.cuda.synchronize()
        pipe.send_bytes(torch.cat([ring, offered]).cpu().numpy().tobytes())


@pytest.fixture
def pipe() -> Iterator[Connection]:
    if not torch.cuda.is_available():
        pytest.skip("no GPU can be seen")
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=receive, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    yield ours
    ours.send_bytes(b"")
    process.join(20)


def test_bytes_and_rows_arrive_in_memory_of_another_process(pipe: Connection) -> None:
    reach = FabricReach(torch.device("cuda", 0), sharing=Sharing.HOST)
    transport = DirectTransport("prefill-0", reach)
    source = torch.randint(256, (1 << 20,), dtype=torch.uint8, device="cuda")
    transport.register(source, source_only=True)
    assert pipe.poll(60)
    peer = transport.add_peer(pipe.recv_bytes())
    transport.write(peer, source[:5000], 64)
    (area,) = transport.offered(peer)
    order = np.random.default_rng(0).permutation(1024)
    rows = np.arange(1024) * 528
    one = np.ones(1024, dtype=np.int64)
    pieces = Pieces(
        source=rows + source.data_ptr(), target=order * 528 + area.address, rows=one,
        first=rows, digest=0 * one, row_bytes=528 * one,
    )  # fmt: skip
    transport.push(peer, pieces, 1)
    pipe.send_bytes(b"?")
    assert pipe.poll(60)
    found = np.frombuffer(pipe.recv_bytes(), dtype=np.uint8)
    sent = source.cpu().numpy()
    assert np.array_equal(found[64:5064], sent[:5000])
    landed = found[RING_BYTES:][: 1024 * 528].reshape(1024, 528)
    assert np.array_equal(landed[order], sent[: 1024 * 528].reshape(1024, 528))
    assert transport.path == "nvlink/vmm"
    transport.close()


def test_memory_from_elsewhere_cannot_be_exported() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU can be seen")
    reach = FabricReach(torch.device("cuda", 0), sharing=Sharing.HOST)
    transport = DirectTransport("prefill-1", reach)
    with pytest.raises(StartupError, match="were not made by"):
        transport.register(torch.zeros(64, dtype=torch.uint8, device="cuda"))
    transport.close()
