"""What tells two checkpoints of one config apart."""

from __future__ import annotations

from pathlib import Path

import pytest

from model.fingerprint import weights_fingerprint
from model.weights import write_checkpoint
from tests.model.cases import BY_NAME


def written(folder: Path, seed: int) -> Path:
    write_checkpoint(folder, BY_NAME["micro"].spec, seed, vision=False)
    return folder


def test_the_same_weights_have_the_same_fingerprint_wherever_they_lie(tmp_path: Path) -> None:
    one, other = written(tmp_path / "one", 1), written(tmp_path / "other", 1)
    assert weights_fingerprint(one) == weights_fingerprint(other)


def test_other_weights_of_the_same_config_have_another(tmp_path: Path) -> None:
    one, other = written(tmp_path / "one", 1), written(tmp_path / "other", 2)
    assert (one / "config.json").read_text() == (other / "config.json").read_text()
    assert weights_fingerprint(one) != weights_fingerprint(other)


@pytest.mark.parametrize("place", ["first value", "header", "last value"])
def test_a_byte_of_the_header_or_at_the_edges_of_any_shard_shows(
    tmp_path: Path, place: str
) -> None:
    folder = written(tmp_path / "one", 1)
    before = weights_fingerprint(folder)
    for shard in sorted(folder.glob("*.safetensors")):
        data = bytearray(shard.read_bytes())
        header = 8 + int.from_bytes(data[:8], "little")
        spots = {"first value": header, "header": header // 2, "last value": len(data) - 1}
        data[spots[place]] ^= 1
        shard.write_bytes(data)
        assert weights_fingerprint(folder) != before
        before = weights_fingerprint(folder)
