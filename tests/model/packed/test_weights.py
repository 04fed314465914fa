"""Weights as they are stored: each form of a matrix multiplies as its values do, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from model.catalogue import TensorSpec, catalogue
from model.packed import weights as forms
from model.packed.random_weights import random_packed
from model.packed.weights import BlockLinear, PackedWeights, SideBySide, from_weights
from model.random_tensors import mean_and_std
from model.weights import Weights, random_weights
from tests.groups import tiny_spec

SPEC = tiny_spec()
CPU = torch.device("cpu")
FP8 = ("layers.2.attn.wq_a", "layers.2.attn.wkv")
BF16 = "layers.2.attn.indexer.wk.weight"


@pytest.fixture(scope="module")
def values() -> Weights:
    return random_weights(SPEC, seed=3)


@pytest.fixture(scope="module")
def packed(values: Weights) -> PackedWeights:
    return from_weights(values, CPU, torch.float64)


@pytest.fixture
def as_on_a_gpu(values: Weights) -> PackedWeights:
    """Quantised matrices stay codes; references multiply with them here."""
    made = from_weights(values, CPU, torch.bfloat16)
    made._keeps_codes = True
    return made


def rows_for(weight: Tensor) -> Tensor:
    draw = torch.Generator().manual_seed(0)
    return torch.randint(-4, 5, (5, weight.shape[1]), generator=draw).double()


def test_neighbours_are_one_product_of_the_values_side_by_side(
    packed: PackedWeights, values: Weights
) -> None:
    weight = torch.cat([values[name] for name in FP8]).double()
    x = rows_for(weight)
    torch.testing.assert_close(packed.linear(*FP8)(x), x @ weight.T, rtol=1e-15, atol=1e-13)


def test_codes_of_neighbours_are_one_matrix_and_stand_for_the_same_values(
    as_on_a_gpu: PackedWeights, values: Weights
) -> None:
    weight = torch.cat([values[name] for name in FP8]).double()
    linear = as_on_a_gpu.linear(*FP8)
    assert isinstance(linear, BlockLinear)
    exact = linear(torch.eye(weight.shape[1], dtype=torch.float64))
    assert torch.equal(exact, weight.T)


def test_matrices_without_a_common_form_are_multiplied_apart(
    as_on_a_gpu: PackedWeights, values: Weights
) -> None:
    name = "layers.2.attn.indexer.weights_proj.weight"
    linear = as_on_a_gpu.linear(FP8[0], name)
    assert isinstance(linear, SideBySide)
    x = rows_for(values[name]).bfloat16()
    both, width = linear(x), len(values[FP8[0]])
    left, right = both[:, :width], both[:, width:]
    assert torch.equal(left, (x.float() @ values[FP8[0]].T).bfloat16())
    torch.testing.assert_close(right.float(), x.float() @ values[name].T, rtol=2**-7, atol=1e-2)


def test_a_matrix_whose_last_block_is_cut_off_has_no_neighbour_in_its_product(
    as_on_a_gpu: PackedWeights,
) -> None:
    cut_off = TensorSpec("fp8", (40, SPEC.hidden_size))
    tensors = {**as_on_a_gpu._tensors, FP8[0]: cut_off}
    as_on_a_gpu._tensors = tensors
    assert not as_on_a_gpu._joins(*FP8)
    assert as_on_a_gpu._joins(FP8[1], FP8[1])


def test_groups_of_outputs_have_their_own_inputs(packed: PackedWeights, values: Weights) -> None:
    name, groups = "layers.0.attn.wo_a", SPEC.o_groups
    weight = values[name].double()
    found = packed.grouped(name, groups)
    for group, part in enumerate(weight.chunk(groups)):
        assert torch.equal(found[group], part.T)


def test_experts_are_the_stored_codes_of_the_experts_asked_for(
    as_on_a_gpu: PackedWeights, values: Weights
) -> None:
    prefix, asked = "layers.1.ffn.experts.", (3, 0)
    gate_up, down = as_on_a_gpu.experts(prefix, asked)
    for place, expert in enumerate(asked):
        both = torch.cat([values[f"{prefix}{expert}.{part}"] for part in ("w1", "w3")])
        assert torch.equal(gate_up.decoded()[place], both)
        assert torch.equal(down.decoded()[place], values[f"{prefix}{expert}.w2"])
        alone = as_on_a_gpu.expert(f"{prefix}{expert}.")
        assert torch.equal(alone[0].codes, gate_up.codes[place])
        assert torch.equal(alone[1].scales, down.scales[place])


def test_a_table_that_is_too_large_for_pinned_memory_stays_where_it_is(
    values: Weights, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(forms, "MOST_PINNED", 10)
    name = f"layers.{SPEC.engram_layer_ids[0]}.engram.embed"
    for_a_gpu = PackedWeights(values.stored, values.specs, torch.device("cuda"), torch.bfloat16)
    table = for_a_gpu.table(name)
    assert not table.codes.is_pinned()
    assert name in caplog.text
    stored = values.stored(name)
    assert torch.equal(table.codes, stored.tensor.view(torch.uint8))


def test_what_is_not_there_is_said_by_name(packed: PackedWeights) -> None:
    with pytest.raises(KeyError, match=r"layers\.99"):
        packed.linear("layers.99.attn.wq_a")


def test_made_up_weights_have_the_magnitudes_of_the_others() -> None:
    made = random_packed(SPEC, CPU, seed=1)
    for name, tensor in catalogue(SPEC, vision=False).items():
        if tensor.kind not in ("fp8", "fp4") or "engram" in name:
            continue
        _, std = mean_and_std(name, tensor)
        assert 0.4 * std < float(made.matrix(name).std()) < 2.5 * std, name
        assert bool(made.matrix(name).isfinite().all())


def test_made_up_weights_are_the_same_each_time_they_are_asked_for() -> None:
    made, again = random_packed(SPEC, CPU, seed=1), random_packed(SPEC, CPU, seed=1)
    other = random_packed(SPEC, CPU, seed=2)
    assert torch.equal(made.matrix(FP8[0]), again.matrix(FP8[0]))
    assert not torch.equal(made.matrix(FP8[0]), other.matrix(FP8[0]))
