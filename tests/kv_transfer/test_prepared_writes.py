"""Writes of NIXL that are made ready before their bytes are there, several under way at once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from cluster.errors import TransferError
from kv_transfer.nixl_transport import NixlTransport
from tests.kv_transfer.receiving_rank import Elsewhere

pytestmark = pytest.mark.rank
PART = 8192


@pytest.fixture(scope="module")
def memory() -> torch.Tensor:
    return (torch.arange(4 * PART) % 251).byte()


@pytest.fixture(scope="module")
def transport(memory: torch.Tensor) -> Iterator[NixlTransport]:
    transport = NixlTransport("prefill-0")
    transport.register(memory, source_only=True)
    yield transport
    transport.close()


def test_several_writes_under_way_all_arrive(
    transport: NixlTransport, memory: torch.Tensor
) -> None:
    with Elsewhere("nixl", "decode-0") as receiver:
        peer = transport.add_peer(receiver.call("metadata"))
        writes = [
            transport.prepare_write(peer, memory[begin : begin + PART], begin)
            for begin in range(0, len(memory), PART)
        ]
        for turn in range(2):  # the same requests, with what stands there by then
            memory += turn
            for one in writes:
                one.start()
            for one in writes:
                while not one.done():
                    pass
                assert one.done()
            assert receiver.call("peek", 0, len(memory)) == memory.numpy().tobytes()
        for one in writes:
            one.close()
        transport.remove_peer(peer)  # would wait for ever for a write that was not ended


def test_a_prepared_write_to_a_peer_that_was_removed_is_an_error(
    transport: NixlTransport, memory: torch.Tensor
) -> None:
    with Elsewhere("nixl", "decode-1") as receiver:
        peer = transport.add_peer(receiver.call("metadata"))
        write = transport.prepare_write(peer, memory[:PART], 0)
        transport.remove_peer(peer)
        with pytest.raises(TransferError, match="is gone"):
            write.start()
        assert write.done()  # nothing is under way
        write.close()
        write.close()


def test_what_write_refuses_is_refused_at_the_start(
    transport: NixlTransport, memory: torch.Tensor
) -> None:
    with pytest.raises(TransferError, match="is gone"):
        transport.prepare_write("nobody", memory, 0)
    with pytest.raises(ValueError, match="not in registered memory"):
        transport.prepare_write("nobody", torch.zeros(8, dtype=torch.uint8), 0)
