"""A pair takes the direct path where it works, and says so loudly where it does not."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest
import torch

from cluster.errors import ProtocolError, TransferError
from kv_transfer.chosen_transport import ChosenTransport
from kv_transfer.direct_transport import DirectTransport
from kv_transfer.host_reach import HostReach
from kv_transfer.local_transport import LocalTransport

_MARK_BYTES = 8  # mark and length before the direct part


def chosen(name: str) -> ChosenTransport:
    return ChosenTransport(DirectTransport(name, HostReach()), LocalTransport(name))


def from_another_host(metadata: bytes) -> bytes:
    """The same rank as if it ran where its memory cannot be mapped."""
    size = int.from_bytes(metadata[4:8], "little")
    direct, rest = metadata[_MARK_BYTES:][:size], metadata[_MARK_BYTES + size :]
    told = json.loads(direct[4:])
    told["life"]["host"] = "elsewhere"
    moved = direct[:4] + json.dumps(told).encode()
    return metadata[:4] + len(moved).to_bytes(4, "little") + moved + rest


@pytest.fixture
def ring() -> torch.Tensor:
    return torch.zeros(64, dtype=torch.uint8)


@pytest.fixture
def sender() -> Iterator[ChosenTransport]:
    transport = chosen("prefill-0")
    yield transport
    transport.close()


@pytest.fixture
def receiver(ring: torch.Tensor) -> Iterator[ChosenTransport]:
    transport = chosen("decode-0")
    transport.register(ring)
    yield transport
    transport.close()


def test_a_pair_that_can_map_each_other_goes_direct(
    sender: ChosenTransport,
    receiver: ChosenTransport,
    ring: torch.Tensor,
    caplog: pytest.LogCaptureFixture,
) -> None:
    source = torch.arange(16, dtype=torch.uint8)
    sender.register(source, source_only=True)
    with caplog.at_level(logging.INFO):
        peer = sender.add_peer(receiver.metadata())
    assert sender.is_direct(peer)
    assert sender.path_to(peer) == "host/cma"
    assert [record.levelno for record in caplog.records] == [logging.INFO]
    sender.write(peer, source, 8)
    assert torch.equal(ring[8:24], source)


def test_a_pair_that_cannot_falls_back_with_a_warning(
    sender: ChosenTransport,
    receiver: ChosenTransport,
    ring: torch.Tensor,
    caplog: pytest.LogCaptureFixture,
) -> None:
    source = torch.arange(16, dtype=torch.uint8)
    sender.register(source, source_only=True)
    peer = sender.add_peer(from_another_host(receiver.metadata()))
    assert not sender.is_direct(peer)
    assert sender.path_to(peer) == "local/memcpy"
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "another host" in record.getMessage()
    assert "local/memcpy instead" in record.getMessage()
    sender.write(peer, source, 8)
    assert torch.equal(ring[8:24], source)


def test_a_removed_peer_is_gone_on_either_path(
    sender: ChosenTransport, receiver: ChosenTransport
) -> None:
    source = torch.zeros(16, dtype=torch.uint8)
    sender.register(source, source_only=True)
    for metadata in (receiver.metadata(), from_another_host(receiver.metadata())):
        peer = sender.add_peer(metadata)
        sender.remove_peer(peer)
        sender.remove_peer(peer)
        with pytest.raises(TransferError, match="is gone"):
            sender.write(peer, source, 0)


@pytest.mark.parametrize("wrong", [b"", b"TCH1", b"XXXX\0\0\0\0", b"TCH1\4\0\0\0abcd"])
def test_what_is_no_metadata_is_refused(sender: ChosenTransport, wrong: bytes) -> None:
    with pytest.raises(ProtocolError, match="metadata"):
        sender.add_peer(wrong)
