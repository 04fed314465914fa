"""Checkpoint folders are checked before anything is read; bad ones are refused whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from model.catalogue import catalogue
from model.census import take_census
from model.checkpoint import INDEX_FILE, CheckpointError, save_checkpoint
from model.spec import ModelSpec
from model.stored import Stored
from model.weights import load_weights, random_weights, write_checkpoint
from tests.model.cases import micro_config

MICRO = ModelSpec.from_dict(micro_config())
TABLE = "layers.1.engram.embed"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(path, MICRO, seed=3, shards=3)
    return path


def rewritten(folder: Path, target: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    """A copy of a checkpoint in one file, after `change`."""
    stored = {k: v for shard in folder.glob("*.safetensors") for k, v in load_file(shard).items()}
    change(stored)
    save_file(stored, target / "model.safetensors")
    return target


def test_everything_wrong_is_said_at_once(folder: Path, tmp_path: Path) -> None:
    def spoil(stored: dict[str, Tensor]) -> None:
        for name in ("norm.weight", "layers.3.attn.wkv.scale"):
            del stored[name]
        stored["layers.0.attn.wq_norm"] = torch.zeros(2)
        stored["model.embed.weight"] = stored["embed.weight"].clone()
        stored["layers.0.attn.attn_sink"] = torch.zeros(4, dtype=torch.bfloat16)
        stored["layers.1.attn.attn_sink"] = torch.zeros(9)

    with pytest.raises(CheckpointError) as caught:
        load_weights(rewritten(folder, tmp_path, spoil), MICRO)
    message = str(caught.value)
    for part in (
        "1 tensors that occur twice (embed.weight)",
        "2 missing tensors (layers.3.attn.wkv.scale, norm.weight)",
        "1 unknown tensors (layers.0.attn.wq_norm)",
        "2 tensors of another type or shape (",
        "layers.0.attn.attn_sink: BF16 [4] instead of F32 [4]",
        "layers.1.attn.attn_sink: F32 [9] instead of F32 [4]",
    ):
        assert part in message
    assert "\n" not in message


def test_many_problems_are_counted_and_some_are_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"missing tensors \(([^,]+, ){6}\.\.\.\)$") as caught:
        load_weights(rewritten(folder, tmp_path, lambda stored: _keep_only(stored, "mtp.")), MICRO)
    expected = sum(len(t.stored(n)) for n, t in catalogue(MICRO, False).items() if n[:4] != "mtp.")
    assert f" {expected} missing tensors (" in str(caught.value)


def _keep_only(stored: dict[str, Tensor], prefix: str) -> None:
    for name in [name for name in stored if not name.startswith(prefix)]:
        del stored[name]


def test_a_model_prefix_is_accepted(folder: Path, tmp_path: Path) -> None:
    def prefix(stored: dict[str, Tensor]) -> None:
        for name in list(stored):
            stored[f"model.{name}"] = stored.pop(name)

    prefixed = load_weights(rewritten(folder, tmp_path, prefix), MICRO)
    name = "layers.5.ffn.experts.2.w2"
    assert torch.equal(prefixed[name], load_weights(folder, MICRO)[name])


def test_vision_may_be_absent_but_only_as_a_whole(folder: Path, tmp_path: Path) -> None:
    def without(stored: dict[str, Tensor], prefixes: tuple[str, ...]) -> None:
        for name in [name for name in stored if name.startswith(prefixes)]:
            del stored[name]

    rewritten(folder, tmp_path, lambda stored: without(stored, ("vision.", "aligner.", "image_")))
    assert set(load_weights(tmp_path, MICRO).names()) == set(catalogue(MICRO, vision=False))
    rewritten(folder, tmp_path, lambda stored: without(stored, ("aligner.",)))
    with pytest.raises(CheckpointError, match=r"4 missing tensors \(aligner\.w1\.bias, "):
        load_weights(tmp_path, MICRO)


def test_a_rank_takes_only_its_share_of_experts(folder: Path) -> None:
    mine = load_weights(folder, MICRO, experts=range(2, 4), draft_experts=range(1))
    experts = {name.rsplit(".", 1)[0] for name in mine.names() if ".experts." in name}
    layers = {f"layers.{i}.ffn.experts.{e}" for i in range(10) for e in (2, 3)}
    assert experts == layers | {f"mtp.{stage}.ffn.experts.0" for stage in range(3)}
    assert mine["layers.0.ffn.shared_experts.w1"].shape == (64, 128)
    with pytest.raises(KeyError, match="belong to another rank"):
        mine["layers.0.ffn.experts.4.w1"]


def test_shards_and_tensors_are_reported_as_they_are_read(folder: Path) -> None:
    seen: list[tuple[int, int, str]] = []
    weights = load_weights(folder, MICRO, progress=lambda *step: seen.append(step))
    assert seen == [(n, 3, f"model-0000{n}-of-00003.safetensors") for n in (1, 2, 3)]
    weights["norm.weight"]
    assert seen[3:] == [(1, len(weights.names()), "norm.weight")]


def test_missing_and_torn_shards_are_named(folder: Path, tmp_path: Path) -> None:
    for name in ("config.json", INDEX_FILE):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    whole = (folder / "model-00001-of-00003.safetensors").read_bytes()
    (tmp_path / "model-00001-of-00003.safetensors").write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match="3 unreadable files") as caught:
        load_weights(tmp_path, MICRO)
    for number in (1, 2, 3):
        assert f"model-0000{number}-of-00003.safetensors: " in str(caught.value)


def test_a_folder_without_shards_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no \*\.safetensors"):
        load_weights(tmp_path, MICRO)


def test_a_table_is_read_by_rows_and_left_on_the_disk(tmp_path: Path) -> None:
    """A sparse file stands for a table that would not fit into memory."""
    rows, width = 30_000_000, MICRO.engram_head_dim
    spec = ModelSpec.from_dict(micro_config(engram_num_embeddings=[rows, 32]))
    starts = _write_zeros(tmp_path / "model.safetensors", spec)
    with (tmp_path / "model.safetensors").open("r+b") as file:  # ones, in the last row
        file.seek(starts[f"{TABLE}.weight"] + (rows - 1) * width)
        file.write(bytes([0x38] * width))
        file.seek(starts[f"{TABLE}.scale"] + rows - 1)
        file.write(bytes([130]))
    before = _resident()
    weights = load_weights(tmp_path, spec)
    found = weights.table_rows(TABLE, torch.tensor([[0, rows - 1]]))
    assert found.shape == (1, 2, width)
    assert set(found[0, 1].tolist()) == {8.0}
    assert not found[0, 0].any()
    assert _resident() - before < 64 << 20
    with pytest.raises(ValueError, match="read it by table_rows"):
        weights[TABLE]


def _write_zeros(path: Path, spec: ModelSpec) -> dict[str, int]:
    """A checkpoint of holes, which take no room on the disk; where each tensor starts."""
    header, starts, end = {}, {}, 0
    for logical, tensor in catalogue(spec, vision=False).items():
        for name, (dtype, shape) in tensor.stored(logical).items():
            starts[name], end = end, end + tensor.stored(logical)[name].nbytes
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [starts[name], end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(file.tell() + end)
    return {name: 8 + len(text) + start for name, start in starts.items()}


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


# ------------------------------------------------------------------ writing


def test_an_interrupted_write_does_not_look_like_a_checkpoint(tmp_path: Path) -> None:
    tensors = {name: t for name, t in catalogue(MICRO).items() if name.startswith("layers.0.attn")}
    complete = random_weights(MICRO, 1)

    def read(name: str, tensor: object) -> Stored:
        if name.endswith("wo_b"):
            raise KeyboardInterrupt
        return complete.stored(name)

    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path, MICRO, tensors, read, shards=2)
    left = {path.name for path in tmp_path.iterdir()}
    assert left <= {"model-00001-of-00002.safetensors"}


def test_a_checkpoint_is_not_written_over_another(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="already holds"):
        write_checkpoint(folder, MICRO, seed=4)


def test_shards_and_index_say_the_same(folder: Path) -> None:
    index = json.loads((folder / INDEX_FILE).read_text())
    assert index["metadata"]["total_size"] == sum(take_census(MICRO).part_bytes.values())
    sizes = []
    for shard in sorted(folder.glob("*.safetensors")):
        names = {name for name, file in index["weight_map"].items() if file == shard.name}
        assert names == set(load_file(shard))
        sizes.append(shard.stat().st_size)
    assert max(sizes) < 1.2 * min(sizes)
    stored = {key for name, one in catalogue(MICRO).items() for key in one.stored(name)}
    assert index["weight_map"].keys() == stored
