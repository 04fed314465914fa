"""A path is what it was measured to be."""

from __future__ import annotations

import logging

import pytest
import torch

from cluster.errors import TransferError
from kv_transfer.local_transport import LocalTransport
from kv_transfer.path_probe import probe


class Wire:
    """A clock that only writes move on: 10 us, and a second a gigabyte."""

    def __init__(self) -> None:
        self.now = 0.0

    def path(self) -> LocalTransport:
        wire = self

        class Timed(LocalTransport):
            def write(self, peer: str, source: torch.Tensor, remote_offset: int) -> None:
                wire.now += 10e-6 + source.numel() / 1e9
                super().write(peer, source, remote_offset)

        return Timed("prefill-0")


@pytest.fixture
def target() -> LocalTransport:
    transport = LocalTransport("decode-0")
    transport.register(torch.zeros(1 << 20, dtype=torch.uint8))
    return transport


def test_latency_and_rate_are_of_the_writes_alone(
    target: LocalTransport, caplog: pytest.LogCaptureFixture
) -> None:
    wire = Wire()
    transport = wire.path()
    source = torch.ones(1 << 20, dtype=torch.uint8)
    transport.register(source, source_only=True)
    peer = transport.add_peer(target.metadata())
    with caplog.at_level(logging.INFO):
        report = probe(transport, peer, source, 0, clock=lambda: wire.now)
    assert report.latency_s == pytest.approx(10e-6 + 4096 / 1e9)
    assert report.gb_per_s == pytest.approx(1.0, rel=0.02)
    assert not report.is_slow
    assert report.path == "local/memcpy"
    assert caplog.messages == [str(report)]
    assert f"{peer} by local/memcpy: 1.0 GB/s at 1024 KiB, 14 us" in str(report)


def test_a_slow_path_is_a_warning_with_what_was_expected(
    target: LocalTransport, caplog: pytest.LogCaptureFixture
) -> None:
    wire = Wire()
    transport = wire.path()
    source = torch.ones(1 << 16, dtype=torch.uint8)
    transport.register(source, source_only=True)
    peer = transport.add_peer(target.metadata())
    report = probe(
        transport, peer, source, 0, path="nixl/UCX", expected_gb_per_s=300, clock=lambda: wire.now
    )
    assert report.is_slow
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().endswith("300 GB/s expected")
    assert "by nixl/UCX" in record.getMessage()


def test_a_peer_that_is_gone_cannot_be_measured(target: LocalTransport) -> None:
    transport = Wire().path()
    source = torch.ones(1 << 16, dtype=torch.uint8)
    transport.register(source, source_only=True)
    peer = transport.add_peer(target.metadata())
    target.close()
    with pytest.raises(TransferError):
        probe(transport, peer, source, 0)
