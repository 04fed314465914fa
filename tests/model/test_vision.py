"""The vision encoder against a float64 reference that shares no code with it."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from kernels.ops.grid_rope import grid_rope, grid_turns
from kernels.ops.patch_attention import patch_attention
from model.load import load_model
from model.spec import ModelSpec
from model.vision import VisionEncoder
from model.vision_spec import VisionSpec
from model.weights import Weights, random_weights, write_checkpoint
from tests.model.cases import BY_NAME, TINY
from tests.model.vision_reference import Floats, encode

RAW = json.loads(TINY.read_text(encoding="utf-8"))
SPEC = ModelSpec.from_dict(RAW)
SIZES = ((84, 84), (14, 14), (28, 140), (126, 98), (70, 14), (14, 854), (854, 14), (42, 56))
"""(height, width): whole and broken cells, one patch, one row, one column, the most positions."""


@cache
def weights() -> Weights:
    return random_weights(SPEC, 3, vision=True)


@cache
def encoder() -> VisionEncoder:
    assert SPEC.vision is not None
    with torch.inference_mode():
        return VisionEncoder(weights(), SPEC.vision)


def picture(height: int, width: int, seed: int = 0) -> npt.NDArray[np.uint8]:
    noise = np.random.default_rng(seed * 7919 + height * 1009 + width)
    return noise.integers(0, 256, (height, width, 3), dtype=np.uint8)


def run(pixels: npt.NDArray[np.uint8]) -> Tensor:
    with torch.inference_mode():
        return encoder()(torch.from_numpy(pixels))


def stored(name: str) -> Floats:
    return weights()[name].double().numpy()


@pytest.mark.parametrize(("height", "width"), SIZES)
def test_it_equals_the_reference(height: int, width: int) -> None:
    pixels = picture(height, width)
    wanted = encode(pixels, RAW["vision_config"], stored)
    found = run(pixels).double().numpy()
    assert found.shape == wanted.shape
    assert np.abs(wanted[1]).max() > 0.3  # a cell
    assert np.abs(found - wanted).max() < 5e-6


def test_an_image_has_the_same_bits_alone_and_after_others() -> None:
    alone = [run(picture(*size)) for size in SIZES]
    again = [run(picture(*size)) for size in reversed(SIZES)]
    for one, other in zip(alone, reversed(again), strict=True):
        assert torch.equal(one, other)


def test_every_pixel_counts_and_so_does_its_place() -> None:
    pixels = picture(42, 84)
    before = run(pixels)
    for place in ((0, 0, 0), (41, 83, 2), (20, 50, 1)):
        changed = pixels.copy()
        changed[place] ^= 128
        assert not torch.equal(run(changed)[1], before[1]), place
    assert not torch.equal(run(pixels[:, ::-1].copy())[1:3].flip(0), before[1:3])
    assert not torch.equal(run(picture(84, 42))[1:3], before[1:3])


def test_the_learned_vectors_stand_at_start_row_ends_and_end() -> None:
    rows = run(picture(84, 126))
    assert len(rows) == 2 * (3 + 1) + 2
    assert torch.equal(rows[0], weights()["image_start"])
    assert torch.equal(rows[4], weights()["image_newline"])
    assert torch.equal(rows[8], weights()["image_newline"])
    assert torch.equal(rows[9], weights()["image_end"])


@pytest.mark.parametrize(
    ("size", "why"),
    [
        ((84, 80), "80 x 84 pixels is not made of whole patches of 14"),
        ((0, 14), "not made of whole patches"),
        ((14, 2604), "2604 x 14 pixels takes 65 positions"),
        ((336, 336), r"336 x 336 pixels takes 74 positions; at most 64"),
        ((42 * 32, 42), r"takes 66 positions"),
    ],
)
def test_a_size_that_cannot_be_is_refused_with_the_numbers(size: tuple[int, int], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        run(np.zeros((*size, 3), np.uint8))


@pytest.mark.parametrize("patches", [1, 37, 700])
def test_every_patch_attends_to_all(patches: int) -> None:
    torch.manual_seed(3)
    q, k, v = (torch.randn(patches, 2, 8) for _ in range(3))
    found = patch_attention(q, k, v)
    logits = torch.einsum("nhd,mhd->hnm", q.double(), k.double()) / 8**0.5
    wanted = torch.einsum("hnm,mhd->nhd", logits.softmax(-1), v.double())
    assert (found.double() - wanted).abs().max() < 1e-6


def test_patches_turn_by_row_and_by_column() -> None:
    quarter = torch.tensor([torch.pi / 2], dtype=torch.float64)
    x = torch.tensor([1.0, 2.0, 3.0, 4.0]).expand(4, 1, 4)
    turned = grid_rope(x, *grid_turns(2, 2, quarter))
    wanted = [[1, 2, 3, 4], [1, -4, 3, 2], [-3, 2, 1, 4], [-3, -4, 1, 2]]
    assert torch.allclose(turned[:, 0], torch.tensor(wanted).float(), atol=1e-6)


def test_a_vision_config_that_cannot_be_is_refused_by_name() -> None:
    raw = dict(RAW["vision_config"])
    with pytest.raises(ValueError, match="num_attention_heads"):
        VisionSpec.from_dict(raw | {"num_attention_heads": 5})
    del raw["patch_size"], raw["min_pixels"]
    with pytest.raises(ValueError, match="lacks min_pixels, patch_size"):
        VisionSpec.from_dict(raw)


def test_a_model_of_text_has_no_vision() -> None:
    text = {key: value for key, value in RAW.items() if key != "vision_config"}
    assert ModelSpec.from_dict(text).vision is None
    assert SPEC.vision is not None
    assert replace(SPEC.vision, max_image_tokens=74).grid(336, 336).positions == 74


def test_a_checkpoint_brings_the_encoder_where_it_is_wanted(tmp_path: Path) -> None:
    spec = BY_NAME["one_ratio"].spec
    assert spec.vision is not None
    write_checkpoint(tmp_path / "all", spec, 3)
    write_checkpoint(tmp_path / "text", spec, 3, vision=False)
    with torch.inference_mode():
        loaded = load_model(tmp_path / "all", weights="checkpoint", vision=True)
        made = VisionEncoder(random_weights(spec, 3, vision=True), spec.vision)
        pixels = torch.from_numpy(picture(42, 56))
        assert loaded.vision is not None
        assert torch.equal(loaded.vision(pixels), made(pixels))
        assert load_model(tmp_path / "all", weights="checkpoint").vision is None
        assert load_model(tmp_path / "text", weights="checkpoint", vision=True).vision is None
