"""What every transport promises; the double is held to the same tests as NIXL."""

from __future__ import annotations

import os
import struct
import time

import pytest
import torch

from cluster.errors import ProtocolError, TransferError
from kv_transfer.open_transport import open_transport
from kv_transfer.transport import Transport
from tests.kv_transfer.conftest import Receiver, Start
from tests.kv_transfer.receiving_rank import CELL_BYTES, CELLS, opened

RING_BYTES = 8 * CELLS * CELL_BYTES


@pytest.fixture(scope="module")
def memory(sending: Transport, device: torch.device) -> torch.Tensor:
    """Registered memory of this side, byte n is n % 251."""
    memory = (torch.arange(32768) % 251).byte().to(device)
    sending.register(memory, source_only=True)
    return memory


@pytest.fixture
def peer(sending: Transport, receiver: Receiver) -> str:
    return sending.add_peer(receiver.call("metadata"))


def test_the_path_is_named(sending: Transport, kind: str) -> None:
    paths = {"local": "local/memcpy", "host": "host/cma", "nixl": "nixl/UCX"}
    assert sending.path == {**paths, "nvlink": "nvlink/cuda_ipc", "nixl-vram": "nixl/UCX"}[kind]


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 4097, 10_000, 32_768])
def test_written_bytes_stand_in_the_ring_when_write_returns(
    sending: Transport, memory: torch.Tensor, peer: str, receiver: Receiver, nbytes: int
) -> None:
    sending.write(peer, memory[:nbytes], 1000)
    assert receiver.call("peek", 1000, nbytes) == memory[:nbytes].cpu().numpy().tobytes()


def test_neighbouring_bytes_stay(
    sending: Transport, memory: torch.Tensor, peer: str, receiver: Receiver
) -> None:
    before = receiver.call("peek", 0, RING_BYTES)
    sending.write(peer, memory[7:5007], 60_001)
    after = receiver.call("peek", 0, RING_BYTES)
    assert after[:60_001] == before[:60_001]
    assert after[65_001:] == before[65_001:]


@pytest.mark.parametrize("offset", [-1, RING_BYTES - 15, RING_BYTES, 2**62])
def test_nothing_is_written_outside_the_ring(
    sending: Transport, memory: torch.Tensor, peer: str, offset: int
) -> None:
    with pytest.raises(TransferError, match="are not in the ring of decode-0"):
        sending.write(peer, memory[:16], offset)


def test_only_registered_memory_is_written_from(sending: Transport, peer: str) -> None:
    with pytest.raises(ValueError, match="not in registered memory"):
        sending.write(peer, torch.zeros(16, dtype=torch.uint8), 0)


def test_only_plain_bytes_can_be_registered_and_only_one_ring(
    kind: str, device: torch.device
) -> None:
    transport = opened(kind, "prefill-9", device)
    for wrong in (torch.zeros(4), torch.zeros(2, 2).byte(), torch.zeros(8).byte()[::2]):
        with pytest.raises(ValueError, match="only contiguous uint8"):
            transport.register(wrong)
    plain = torch.zeros(64, dtype=torch.uint8, device=device)
    transport.register(plain)
    transport.register(plain.clone(), source_only=True)
    with pytest.raises(ValueError, match="already has a receive ring"):
        transport.register(plain.clone())
    transport.close()


@pytest.mark.rank
def test_nixl_itself_lets_peers_write_into_the_ring_only() -> None:
    target, writer = open_transport("nixl", "decode-3"), open_transport("nixl", "prefill-3")
    memory = torch.zeros(3 * 65536, dtype=torch.uint8)
    before, ring, after = memory[:65536], memory[65536:131072], memory[131072:]
    target.register(before, source_only=True)
    target.register(ring)
    target.register(after, source_only=True)
    source = torch.ones(64, dtype=torch.uint8)
    writer.register(source, source_only=True)
    header = struct.Struct("<4sHHQQ")  # ends with the ring's address and size
    mark, name, device, address, _ = header.unpack_from(metadata := target.metadata())
    forged = header.pack(mark, name, device, address - 65536, 3 * 65536) + metadata[header.size :]
    peer = writer.add_peer(forged)
    writer.write(peer, source, 65536)
    for offset in (0, 65536 - 32, 2 * 65536 - 32, 2 * 65536):
        with pytest.raises(TransferError, match="nixlNotFoundError"):
            writer.write(peer, source, offset)
    assert int(memory.sum()) == int(ring.sum()) == 64
    writer.close()
    target.close()


def test_what_is_no_metadata_is_refused(sending: Transport, receiver: Receiver) -> None:
    for wrong in (b"", b"hello", b"TNX1" + b"\xff" * 40, receiver.call("metadata")[1:]):
        with pytest.raises(ProtocolError, match="metadata"):
            sending.add_peer(wrong)


def test_an_unknown_peer_and_a_removed_one_cannot_be_written_to(
    sending: Transport, memory: torch.Tensor, receiver: Receiver
) -> None:
    with pytest.raises(TransferError, match="decode-9 is gone"):
        sending.write("decode-9", memory[:16], 0)
    peer = sending.add_peer(receiver.call("metadata"))
    assert sending.add_peer(receiver.call("metadata")) == peer
    sending.remove_peer(peer)
    sending.remove_peer(peer)
    with pytest.raises(TransferError, match="is gone"):
        sending.write(peer, memory[:16], 0)
    sending.write(sending.add_peer(receiver.call("metadata")), memory[:16], 0)


def test_a_peer_without_a_ring_cannot_be_written_to(
    sending: Transport, memory: torch.Tensor, kind: str, device: torch.device
) -> None:
    other = opened(kind, "prefill-1", device)
    other.register(torch.zeros(64).byte().to(device), source_only=True)
    peer = sending.add_peer(other.metadata())
    with pytest.raises(TransferError, match="not in the ring of prefill-1"):
        sending.write(peer, memory[:16], 0)
    sending.remove_peer(peer)
    other.close()


def test_a_dead_peer_is_known_at_once_and_its_next_life_is_another_peer(
    sending: Transport, memory: torch.Tensor, start: Start
) -> None:
    first = start("decode-7")
    metadata = first.call("metadata")
    old = sending.add_peer(metadata)
    sending.write(old, memory[:16], 0)
    first.die()
    began = time.monotonic()
    with pytest.raises(TransferError, match="decode-7"):
        sending.write(old, memory, 0)
    assert time.monotonic() - began < 2.0
    with start("decode-7") as second:
        new = sending.add_peer(second.call("metadata"))
        assert new != old
        sending.write(new, memory[:16], 0)
        assert second.call("peek", 0, 16) == bytes(range(16))
        with pytest.raises(TransferError):
            sending.write(old, memory[:16], 0)
        assert second.call("peek", 0, 16) == bytes(range(16))
        sending.remove_peer(new)


def test_metadata_of_a_dead_rank_is_refused(sending: Transport, start: Start) -> None:
    gone = start("decode-8")
    metadata = gone.call("metadata")
    gone.die()
    with pytest.raises(TransferError, match="decode-8"):
        sending.add_peer(metadata)


def test_a_closed_transport_leaves_nothing_behind(
    kind: str, device: torch.device, receiver: Receiver
) -> None:
    def threads() -> int:
        return len(os.listdir("/proc/self/task"))

    before = threads()
    transport = opened(kind, "prefill-2", device)
    memory = torch.ones(64).byte().to(device)
    transport.register(memory)
    peer = transport.add_peer(receiver.call("metadata"))
    transport.write(peer, memory, 128)
    transport.close()
    transport.close()
    assert threads() == before
    with pytest.raises(TransferError, match="closed"):
        transport.write(peer, memory, 0)
    with pytest.raises(TransferError, match="closed"):
        transport.metadata()
    with pytest.raises(TransferError, match="closed"):
        transport.add_peer(receiver.call("metadata"))
    assert receiver.call("peek", 128, 64) == b"\1" * 64


def test_an_idle_transport_takes_no_core(
    sending: Transport, memory: torch.Tensor, peer: str
) -> None:
    sending.write(peer, memory[:16], 0)
    before = time.process_time()  # of all threads, NIXL's own too
    time.sleep(0.3)
    assert time.process_time() - before < 0.05


def test_an_unknown_kind_is_an_error() -> None:
    with pytest.raises(ValueError, match="no transport is called 'carrier pigeon'"):
        open_transport("carrier pigeon", "prefill-0")
