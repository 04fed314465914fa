"""Weights are the same from a seed, from a checkpoint, and to the reference."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from model.spec import ModelSpec
from model.stored import Stored, decode
from model.weights import Weights, load_weights, random_weights, write_checkpoint
from tests.model.cases import micro_config
from tests.model.oracle import oracle

MICRO = ModelSpec.from_dict(micro_config())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(path, MICRO, seed=3, shards=3)
    return path


def values(weights: Weights, name: str) -> Tensor:
    """All values of a tensor, of a table too."""
    if not name.endswith("engram.embed"):
        return weights[name]
    return weights.table_rows(name, torch.arange(len(weights.stored(name).tensor)))


def bytes_of(codes: list[int], width: int) -> Tensor:
    row = torch.zeros(1, width, dtype=torch.uint8)
    row[0, : len(codes)] = torch.tensor(codes, dtype=torch.uint8)
    return row


def scale(code: int) -> Tensor:
    return torch.tensor([[code]], dtype=torch.uint8).view(torch.float8_e8m0fnu)


# ------------------------------------------------------------------ number formats


def test_first_bytes_of_the_published_dense_weight() -> None:
    """`layers.0.attn.wkv` starts with these bytes."""
    weight = bytes_of([0xD8, 0x71, 0xF2, 0x79], 32).view(torch.float8_e4m3fn)
    found = decode(Stored(weight, scale(0x73)), "fp8")
    assert found[0, :2].tolist() == [-0.00390625, 0.03515625]


def test_first_bytes_of_a_published_expert() -> None:
    weight = bytes_of([0xA0, 0xA8, 0xEC, 0x4A], 16).view(torch.int8)
    found = decode(Stored(weight, scale(0x78)), "fp4")
    assert found[0, :4].tolist() == [0.0, -0.0078125, 0.0, -0.0078125]
    assert torch.signbit(found[0, 2])  # a low nibble of 8 is minus zero


def test_every_e4m3_byte_of_a_table_has_its_value() -> None:
    def e4m3(code: int) -> float:
        exponent, mantissa = (code >> 3) & 15, code & 7
        if exponent == 15 and mantissa == 7:
            return math.nan
        size = math.ldexp(8 + mantissa, exponent - 10) if exponent else math.ldexp(mantissa, -9)
        return -size if code & 0x80 else size

    codes = torch.arange(256, dtype=torch.uint8).view(8, 32).view(torch.float8_e4m3fn)
    stored = Stored(codes, torch.full((8, 1), 128, dtype=torch.uint8).view(torch.float8_e8m0fnu))
    expected = torch.tensor([2 * e4m3(code) for code in range(256)]).view(8, 32)
    torch.testing.assert_close(decode(stored, "fp8_rows"), expected, rtol=0, atol=0, equal_nan=True)


# ------------------------------------------------------------------ random weights


def test_a_written_checkpoint_gives_back_the_weights_of_its_seed(folder: Path) -> None:
    loaded, random = load_weights(folder, MICRO), random_weights(MICRO, 3, vision=True)
    assert loaded.names() == random.names()
    assert all(torch.equal(values(loaded, name), values(random, name)) for name in loaded.names())


def test_a_tensor_depends_on_the_seed_and_its_name_alone() -> None:
    first, second, other = (random_weights(MICRO, seed) for seed in (7, 7, 8))
    names = ["layers.4.attn.wq_a", "layers.4.attn.wkv", "layers.4.attn_norm.weight"]
    backwards = {name: second[name] for name in reversed(names)}
    assert all(torch.equal(first[name], backwards[name]) for name in names)
    assert not torch.equal(first[names[0]], other[names[0]])
    assert not torch.equal(first["layers.3.attn.wq_a"], first["layers.4.attn.wq_a"])


def test_random_weights_make_the_mechanisms_count() -> None:
    weights = random_weights(MICRO, 5)
    norm = weights["layers.0.attn_norm.weight"]
    assert 0.05 < norm.std() < 0.2
    assert abs(norm.mean() - 1) < 0.05
    bias, image_bias = weights["layers.0.ffn.gate.bias"], weights["layers.0.ffn.gate.bias_vl"]
    assert not torch.equal(bias, image_bias)
    unit = torch.randn(400, MICRO.hidden_size, generator=torch.Generator().manual_seed(1))
    gate = unit @ weights["layers.0.ffn.experts.0.w1"].T
    assert 0.001 < (gate > MICRO.swiglu_limit).float().mean() < 0.1


def test_values_are_rounded_to_their_stored_format() -> None:
    weights = random_weights(MICRO, 5)
    expert = weights["layers.0.ffn.experts.0.w1"]
    steps = weights.stored("layers.0.ffn.experts.0.w1").scale
    assert steps is not None
    levels = (expert / steps.float().repeat_interleave(32, 1)).abs()
    assert set(levels.flatten().tolist()) == {0, 0.5, 1, 1.5, 2, 3, 4, 6}
    assert torch.equal(weights["embed.weight"], weights["embed.weight"].bfloat16().float())


# ------------------------------------------------------------------ against the reference


def test_the_reference_reads_our_checkpoint_as_we_do(folder: Path) -> None:
    reference = oracle("v41_checkpoint")
    theirs = reference.load_checkpoint(folder, reference.Config.from_json(folder / "config.json"))
    ours = load_weights(folder, MICRO)
    for name in ours.names():
        assert np.array_equal(values(ours, name).double().numpy(), theirs[name]), name


def test_we_read_the_checkpoint_of_the_reference_as_it_does(tmp_path: Path) -> None:
    reference = oracle("v41_checkpoint")
    their_config = reference.Config.from_dict(micro_config())
    theirs = reference.random_checkpoint(their_config, 11, tmp_path, vision=False)
    ours = load_weights(tmp_path, ModelSpec.load(tmp_path))
    assert set(ours.names()) == set(theirs.catalogue)
    for name in ours.names():
        assert np.array_equal(values(ours, name).double().numpy(), theirs[name]), name
