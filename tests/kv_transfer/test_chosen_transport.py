"""A pair takes the direct path where it works, and says so loudly where it does not."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from cluster.errors import ProtocolError, StartupError, TransferError
from kernels.push_table import Pieces
from kv_transfer.chosen_transport import ChosenTransport
from kv_transfer.direct_transport import DirectTransport
from kv_transfer.host_reach import HostReach
from kv_transfer.local_transport import LocalTransport
from kv_transfer.open_transport import open_paths
from kv_transfer.process_life import Life, own_life

_MARK_BYTES = 8  # mark and length before the direct part


class Forbidden(HostReach):
    """As where a container has no right to trace other processes."""

    def copy(self, owner: Life, source: int, target: int, nbytes: int) -> None:
        raise TransferError(f"process {owner.pid} cannot be written to (not permitted)")


class Unshared(HostReach):
    """As with expandable segments."""

    def export(self, memory: torch.Tensor) -> bytes:
        raise StartupError("expandable segments cannot be shared")


class Rank:
    """A rank's transport with what it has declared: state, ring and a cell."""

    def __init__(self, name: str, reach: HostReach | None, packed: bool = True) -> None:
        self.transport = ChosenTransport(
            name,
            DirectTransport(name, reach) if reach else None,
            LocalTransport(name) if packed else None,
        )
        self.blocks = torch.zeros(64, dtype=torch.uint8)
        self.slots = torch.zeros(32, dtype=torch.uint8)
        self.cell = torch.arange(16, dtype=torch.uint8)

    def receive(self) -> ChosenTransport:
        self.transport.register(self.cell)
        self.transport.offer(self.blocks, self.slots)
        return self.transport

    def send(self) -> ChosenTransport:
        self.transport.register(self.cell, source_only=True)
        self.transport.push_from(self.blocks, self.slots)
        return self.transport


def from_another_host(metadata: bytes) -> bytes:
    """The same rank as if it ran where its memory cannot be mapped."""
    size = int.from_bytes(metadata[4:8], "little")
    direct, rest = metadata[_MARK_BYTES:][:size], metadata[_MARK_BYTES + size :]
    told = json.loads(direct[4:])
    told["life"]["host"] = "elsewhere"
    moved = direct[:4] + json.dumps(told).encode()
    return metadata[:4] + len(moved).to_bytes(4, "little") + moved + rest


def one_piece(source: int, target: int, rows: int) -> Pieces:
    """Rows of four bytes."""
    columns = [np.array([value]) for value in (source, target, rows, 0, 0, 4)]
    return Pieces(*columns)


@pytest.fixture
def sending() -> Iterator[Rank]:
    rank = Rank("prefill-0", HostReach())
    rank.send()
    yield rank
    rank.transport.close()


@pytest.fixture
def receiving() -> Iterator[Rank]:
    rank = Rank("decode-0", HostReach())
    rank.receive()
    yield rank
    rank.transport.close()


def test_a_pair_that_can_reach_each_other_goes_direct(
    sending: Rank, receiving: Rank, caplog: pytest.LogCaptureFixture
) -> None:
    sender = sending.transport
    with caplog.at_level(logging.INFO):
        peer = sender.add_peer(receiving.transport.metadata())
    assert sender.is_direct(peer)
    assert sender.path_to(peer) == "host/cma"
    assert sender.why(peer) == ""
    assert [record.levelno for record in caplog.records] == [logging.INFO]
    sending.blocks.copy_(torch.arange(64))
    blocks, slots = sender.offered(peer)
    pieces = one_piece(sending.blocks.data_ptr() + 8, blocks.address + 16, 3)
    sender.push(peer, pieces, 0)
    assert receiving.blocks[16:28].tolist() == list(range(8, 20))
    assert not receiving.blocks[:16].any()
    assert not receiving.slots.any()
    assert slots.nbytes == 32


def test_measuring_touches_neither_state_nor_ring(sending: Rank, receiving: Rank) -> None:
    sender = sending.transport
    peer = sender.add_peer(receiving.transport.metadata())
    ring = receiving.cell.clone()
    report = sender.measure(peer)
    assert report.path == "host/cma"
    assert report.gb_per_s > 0
    assert not receiving.blocks.any()
    assert not receiving.slots.any()
    assert torch.equal(receiving.cell, ring)


def test_a_pair_that_cannot_falls_back_with_one_warning(
    sending: Rank, receiving: Rank, caplog: pytest.LogCaptureFixture
) -> None:
    sender = sending.transport
    peer = sender.add_peer(from_another_host(receiving.transport.metadata()))
    assert not sender.is_direct(peer)
    assert sender.path_to(peer) == "local/memcpy"
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "another host" in record.getMessage()
    assert "local/memcpy instead" in record.getMessage()
    assert sender.fallbacks == 1
    sending.cell.fill_(7)
    sender.write(peer, sending.cell, 0)
    assert receiving.cell.tolist() == [7] * 16


def test_what_the_kernel_forbids_is_found_by_a_write_not_by_a_push(
    receiving: Rank, caplog: pytest.LogCaptureFixture
) -> None:
    rank = Rank("prefill-0", Forbidden())
    sender = rank.send()
    peer = sender.add_peer(receiving.transport.metadata())
    assert not sender.is_direct(peer)
    assert "not permitted" in sender.why(peer)
    assert caplog.records[0].levelno == logging.WARNING
    sender.close()


def test_memory_that_cannot_be_shared_is_a_warning_if_there_is_another_path(
    sending: Rank, caplog: pytest.LogCaptureFixture
) -> None:
    receiver = Rank("decode-0", Unshared()).receive()
    assert "expandable segments" in caplog.records[0].getMessage()
    peer = sending.transport.add_peer(receiver.metadata(), receiver.why_packed)
    assert "expandable segments" in sending.transport.why(peer)
    receiver.close()
    with pytest.raises(StartupError, match="expandable segments"):
        Rank("decode-1", Unshared(), packed=False).receive()


def test_with_direct_alone_a_pair_that_cannot_is_an_error(receiving: Rank) -> None:
    sender = Rank("prefill-0", Forbidden(), packed=False).send()
    with pytest.raises(TransferError, match=r"not permitted.*transfer.path = \"auto\""):
        sender.add_peer(receiving.transport.metadata())
    sender.close()


def test_where_packed_was_chosen_nobody_is_warned(
    receiving: Rank, caplog: pytest.LogCaptureFixture
) -> None:
    sender = Rank("prefill-0", None).send()
    peer = sender.add_peer(receiving.transport.metadata(), "switched off there")
    assert not sender.is_direct(peer)
    assert not caplog.records
    assert sender.fallbacks == 0
    sender.close()


def test_a_removed_peer_is_gone_on_either_path(sending: Rank, receiving: Rank) -> None:
    sender, metadata = sending.transport, receiving.transport.metadata()
    for told in (metadata, from_another_host(metadata)):
        peer = sender.add_peer(told)
        sender.remove_peer(peer)
        sender.remove_peer(peer)
        with pytest.raises(TransferError, match="is gone"):
            sender.measure(peer, sending.cell)


def test_the_end_of_a_peers_process_can_be_watched_if_it_is_here(
    sending: Rank, receiving: Rank
) -> None:
    metadata = sending.transport.metadata()
    watch = receiving.transport.watch(metadata)
    assert not watch.has_ended
    watch.close()
    with pytest.raises(TransferError, match="another host"):
        receiving.transport.watch(from_another_host(metadata))
    with pytest.raises(TransferError, match="no direct path"):
        receiving.transport.watch(Rank("prefill-1", None).send().metadata())


@pytest.mark.parametrize(
    "wrong",
    [b"", b"TCH2", b"XXXX\0\0\0\0", b"TCH2\4\0\0\0abcd", b"TCH2\xff\0\0\0abcd"],
)
def test_what_is_no_metadata_is_refused(sending: Rank, wrong: bytes) -> None:
    with pytest.raises(ProtocolError, match="metadata"):
        sending.transport.add_peer(wrong)


@pytest.mark.parametrize(("pid", "nbytes"), [(-1, 64), (1 << 40, 64), (None, -1), (None, 10**30)])
def test_impossible_numbers_of_a_peer_are_refused(
    sending: Rank, pid: int | None, nbytes: int
) -> None:
    life, pid = own_life(), os.getpid() if pid is None else pid
    told = {
        "name": "decode-0",
        "id": "decode-0#1",
        "life": {"host": life.host, "pid": pid, "started": life.started},
        "areas": [["00" * 8, nbytes]],
    }
    direct = b"TDR1" + json.dumps(told).encode()
    with pytest.raises(ProtocolError, match="are not a direct transport's metadata"):
        sending.transport.add_peer(b"TCH2" + len(direct).to_bytes(4, "little") + direct)


def test_every_choice_of_path_opens_what_it_says() -> None:
    for path, direct, packed in (
        ("auto", False, True),  # between CPUs
        ("direct", True, False),
        ("packed", False, True),
    ):
        transport = open_paths(path, "local", "prefill-0")
        assert (transport.direct is not None, transport.packed is not None) == (direct, packed)
        transport.close()
    with pytest.raises(StartupError, match="no direct path between meta devices"):
        open_paths("direct", "local", "prefill-0", device=torch.device("meta"))
    fallen = open_paths("auto", "local", "prefill-0", device=torch.device("meta"))
    assert "no direct path" in fallen.why_packed
    fallen.close()
