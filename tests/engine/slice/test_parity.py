"""The packed forward of the slice agrees with its references, op by op and layer by layer.

Bounds. A bf16 number has 8 significant bits, so rounding to it changes a value by u = 2 ** -8 at
most and by 0.42 u in the root mean square over all mantissas: less than u / 2 of the norm of a
tensor. Products of bf16, FP8 and FP4 values are exact in float32, and its sums of up to 2 ** 14 of
them add less than 2 ** -17. So an op that rounds its result once is within u / 2 of its reference,
one that also rounds what lies between two products (softmax weights, hidden values) within
sqrt(2) u / 2, and one whose result stays float32 within 2 ** -12.

A layer's streams are rounded after each of its two sublayers. Of a sublayer's branch, some ten
results are rounded in turn, and all of them could end up in the streams: errors of independent
roundings add up as squares, so sqrt(2 + 2 * 10) u / 2 bounds a layer that begins with equal streams
and makes the same choices. Of those each forward's own are compared too: near the last that is
chosen scores are close together, and index queries are rounded to FP4, whose steps of a quarter to
a half turn some of a difference of u into one of a step. So most are the same, and not all.

On a CPU, where ops are their own references, both forwards are in float32: nothing separates them.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from engine.slice.config import slice_spec
from engine.slice.run import Slice, Step
from engine.slice.state import SliceState
from model.options import ModelOptions
from model.packed.random_weights import random_packed
from tests.engine.slice.parity import Call, compared, followed, kept, replaced

U = 2.0**-8
ONE_ROUNDING, TWO_ROUNDINGS, FLOAT32 = U / 2, 2**0.5 * U / 2, 2.0**-12
LAYER = (2 + 2 * 10) ** 0.5 * U / 2
SAME_CHOICES = 0.75
OPS = {
    "packed_attention": TWO_ROUNDINGS,
    "packed_experts": TWO_ROUNDINGS,
    "index_scores": FLOAT32,
    "position_turns": FLOAT32,
    # shares of rows, or of bytes, that may lie on an edge
    "route_top": 2.0**-8,
    "index_topk": 2.0**-8,
    "select": 2.0**-8,
    "rope_pack": 2.0**-10,
    "norm_rope_pack": 2.0**-10,
    "pack_index_keys": 2.0**-10,
    # nothing is computed
    "row_addresses": 0.0,
    "position_addresses": 0.0,
    "window_addresses": 0.0,
    "put_rows": 0.0,
    "take_rows": 0.0,
    "engram_gather": 0.0,
}
"""By op; any other rounds its result once."""


@dataclass(frozen=True)
class Place:
    tiny: bool
    low: torch.dtype
    device: torch.device
    contexts: tuple[int, ...]  # one of them beyond what candidates narrow
    chunk: int
    experts: str  # the op that computes them

    def slice(self, dtype: torch.dtype) -> Slice:
        """Equal weights and state each time, in their stored form."""
        spec = slice_spec(tiny=self.tiny)
        weights = random_packed(spec, self.device, 1, dtype=dtype)
        state = SliceState.random(
            spec,
            self.device,
            requests=2,
            length=max(self.contexts) + 128,
            block_tokens=16 if self.tiny else 128,
        )
        return Slice.random(spec, ModelOptions(), weights, state)


TINY = Place(True, torch.float32, torch.device("cpu"), (33, 90), 40, "expert_mlp")
REAL = Place(False, torch.bfloat16, torch.device("cuda", 0), (2048, 20000), 130, "packed_experts")
PLACES = [
    pytest.param(TINY, id="tiny, cpu"),
    pytest.param(REAL, id="real shapes, gpu", marks=pytest.mark.gpu),
]


@pytest.mark.parametrize("place", PLACES)
def test_every_op_of_a_step_and_of_a_chunk_is_its_reference(place: Place) -> None:
    errors = op_errors(place)
    assert {"packed_attention", place.experts, "route_top", "begin_sublayer"} <= errors.keys()
    bounds = {op: OPS.get(op, ONE_ROUNDING) for op in errors}
    assert not {op: error for op, error in errors.items() if error > bounds[op]}


@pytest.mark.parametrize("place", PLACES)
def test_every_layer_is_the_same_in_float32(place: Place) -> None:
    low, exact = place.slice(place.low), place.slice(torch.float32)
    for context in place.contexts:
        found = layer_errors(low.decode(2, context), exact.decode(2, context))
        assert len(found.streams) == 4
        assert max(found.streams) < LAYER
        assert min(found.choices) > SAME_CHOICES


def test_a_layer_that_is_wrong_is_found() -> None:
    low, exact = TINY.slice(torch.float32), TINY.slice(torch.float32)
    ours, theirs = low.decode(2, 90), exact.decode(2, 90)

    def wrong() -> Tensor:
        with replaced(lambda name, op: shifted(op) if name == "packed_attention" else op):
            return ours()

    assert max(layer_errors(ours, theirs).streams) == 0
    assert max(layer_errors(wrong, theirs).streams) > LAYER


def shifted(op: Call) -> Call:
    """An op whose results are a quarter too large."""
    return lambda *args, **kwargs: op(*args, **kwargs) * 1.25


def op_errors(place: Place) -> dict[str, float]:
    """The worst of each op, over decode steps and a chunk."""
    low = place.slice(place.low)
    steps = [low.decode(2, context) for context in place.contexts]
    steps.append(low.prefill(place.chunk, place.chunk))
    with compared() as found:
        for step in steps:
            step()
    errors: dict[str, float] = defaultdict(float)
    for one in found:
        errors[one.op] = max(errors[one.op], one.error)
    return dict(errors)


class LayerErrors(NamedTuple):
    streams: list[float]  # of each layer, relative to what it leaves; of the row worst off
    choices: list[float]  # of each choice of rows or experts, the share that both made


def layer_errors(ours: Step, theirs: Step) -> LayerErrors:
    with kept() as passed:
        ours()
    with followed(passed, torch.float32) as own:
        theirs()
    errors = []
    for (_, one), (_, other) in zip(passed.residuals, own.residuals, strict=True):
        gap_Tn = (one.streams_TnD.float() - other.streams_TnD).flatten(1)
        errors.append(float((gap_Tn.norm(dim=1) / other.streams_TnD.flatten(1).norm(dim=1)).max()))
    shares = [same_share(*pair) for pair in zip(passed.choices, own.choices, strict=True)]
    return LayerErrors(errors, shares)


def same_share(one: Any, other: Any) -> float:
    """Of the numbers that were chosen, how many both chose."""
    rows, others = (
        (choice if isinstance(choice, Tensor) else choice[0]).tolist() for choice in (one, other)
    )
    both = sum(len(set(row) & set(own)) for row, own in zip(rows, others, strict=True))
    return both / sum(len(set(row)) for row in rows)
