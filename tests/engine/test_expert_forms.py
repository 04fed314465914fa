"""Slots over weights as values, and over weights as stored: the same rows, the same moves."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.experts import LayerSlots, ValueForm
from engine.stored_experts import StoredForm
from kernels.ops import packed_experts
from model.options import ModelOptions
from model.packed.weights import PackedWeights, from_weights
from model.weights import Weights, random_weights
from tests.groups import tiny_spec

SPEC, OPTIONS = tiny_spec(), ModelOptions()
PREFIX = "layers.1.ffn.experts."


@pytest.fixture(scope="module")
def weights() -> Weights:
    return random_weights(SPEC, seed=5)


@pytest.fixture(scope="module")
def packed(weights: Weights) -> PackedWeights:
    return from_weights(weights, torch.device("cpu"), torch.float32)


def rows(count: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(count)
    x_ND = torch.randn(count, SPEC.hidden_size, generator=draw)
    return x_ND, torch.rand(count, generator=draw)


def test_both_forms_compute_the_same(weights: Weights, packed: PackedWeights) -> None:
    held, (x_ND, shares_N) = [2, 0, 2], rows(7)
    slots_N = np.array([0, 1, 2, 2, 1, 0, 1])
    values = LayerSlots(ValueForm(weights, SPEC, OPTIONS), PREFIX, held)
    stored = LayerSlots(StoredForm(packed, SPEC, OPTIONS), PREFIX, held)
    expected_ND = values(x_ND, slots_N, shares_N)
    torch.testing.assert_close(stored(x_ND, slots_N, shares_N), expected_ND, rtol=1e-4, atol=1e-5)
    assert stored.no_rows().shape == values.no_rows().shape == (0, SPEC.hidden_size)


def test_a_stored_expert_moves_with_its_name_and_half_a_byte_a_weight(
    packed: PackedWeights,
) -> None:
    layer = LayerSlots(StoredForm(packed, SPEC, OPTIONS), PREFIX, [0, 1])
    other = LayerSlots(StoredForm(packed, SPEC, OPTIONS), PREFIX, [3, 1])
    moved = other.copy_of(3)
    assert moved is not None
    weights = 3 * SPEC.moe_intermediate_size * SPEC.hidden_size
    assert moved.nbytes == weights // 2 + weights // 32
    assert layer.fits(3, moved)
    assert not layer.fits(1, moved)
    layer.put(0, moved)
    assert layer.holds(0, 3)
    assert layer.copy_of(0) is None
    x_ND, shares_N = rows(2)
    first = np.zeros(2, np.int64)
    assert torch.equal(layer(x_ND, first, shares_N), other(x_ND, first, shares_N))


def test_the_op_of_stored_experts_is_its_reference_on_a_cpu(packed: PackedWeights) -> None:
    x_ND, shares_N = rows(5)
    chosen_N1 = torch.tensor([[0], [1], [1], [0], [1]])
    given = (x_ND, chosen_N1, shares_N.unsqueeze(1), *packed.experts(PREFIX, range(2)))
    limit = SPEC.swiglu_limit
    found = packed_experts.packed_experts(*given, limit=limit)
    assert torch.equal(found, packed_experts.reference(*given, limit=limit))
