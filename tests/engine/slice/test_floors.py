"""Floors against what the model is known to weigh, and against a count by hand."""

from __future__ import annotations

import pytest

from engine.slice.config import REAL, slice_spec
from engine.slice.floors import Cost, Rates, StepShape, costs
from model.catalogue import catalogue
from model.census import take_census
from model.spec import ModelSpec

RATES = Rates(bytes_per_s=4e12, operations_per_s=800e12, link_bytes_per_s=50e9)
ONE_ROW = StepShape.decode(1, 8192, {})


def total(found: list[Cost], op: str, part: str | None = None) -> Cost:
    some = [one for one in found if one.op == op and part in (None, one.part)]
    return Cost(
        None,
        op,
        part or "all",
        sum(one.nbytes for one in some),
        sum(one.operations for one in some),
        sum(one.linked for one in some),
    )


def test_a_row_of_decode_reads_every_matrix_of_the_slice_once() -> None:
    spec = slice_spec()
    read = sum(cost.nbytes for cost in costs(spec, ONE_ROW))
    stored = 0
    for name, tensor in catalogue(spec, vision=False).items():
        idle = name.startswith("mtp.") and "main_proj" not in name and "attn.wkv" not in name
        if idle or name == "embed.weight" or name.endswith("engram.embed"):
            continue
        if ".experts." in name and int(name.split(".")[4]) >= spec.num_experts_per_tok:
            continue
        stored += sum(part.nbytes for part in tensor.stored(name).values())
    assert stored < read < 1.02 * stored  # and little more: activations and rows of state


def test_attention_of_one_row_reads_the_rows_it_sees() -> None:
    """Layer 3 of the real shape: 128 window rows of 528 bytes, 512 compressed ones of 288."""
    attention = [one for one in costs(slice_spec(), ONE_ROW) if one.op == "attention"]
    wide = 64 * 512
    assert attention[3].nbytes == 128 * 528 + 512 * 288 + 2 * wide * 2
    assert attention[3].operations == 4 * (128 + 512) * wide
    assert attention[0].operations == 4 * 128 * wide


def test_operations_of_decode_are_twice_the_active_parameters_of_the_real_model() -> None:
    spec = ModelSpec.load(REAL)
    found = costs(spec, ONE_ROW)
    sides = ("attention", "index", "observe")  # that are no products by matrices of the model
    products = sum(one.operations for one in found if one.op not in sides)
    assert products == pytest.approx(2 * take_census(spec).active.decode, rel=2e-3)
    assert total(found, "attention").operations == pytest.approx(3.2e9, rel=0.06)
    assert total(found, "index", "scores").operations == pytest.approx(0.44e9, rel=0.03)


def test_rows_of_one_request_share_its_keys_and_rows_of_two_do_not() -> None:
    spec = slice_spec()
    together = total(costs(spec, StepShape([8192], [2])), "index", "scores")
    apart = total(costs(spec, StepShape([8192, 8192], [1, 1])), "index", "scores")
    assert together.operations == pytest.approx(apart.operations, rel=1e-3)
    assert together.nbytes < 0.6 * apart.nbytes


def test_after_the_cut_only_kept_rows_cost() -> None:
    spec = slice_spec(engram=False)
    whole, cut = (costs(spec, StepShape([0], [16384], kept)) for kept in (None, 140))

    def seconds(found: list[Cost]) -> float:
        return sum(one.seconds(RATES) for one in found)

    assert 1.8 < seconds(whole) / seconds(cut) < 2.1
    assert total(cut, "compress").operations == total(whole, "compress").operations


def test_a_count_of_experts_replaces_the_expectation() -> None:
    spec = slice_spec()
    even = total(costs(spec, StepShape.decode(64, 40, {})), "experts")
    few = total(costs(spec, StepShape.decode(64, 40, dict.fromkeys(range(4), 8))), "experts")
    assert few.nbytes == pytest.approx(even.nbytes / 4, rel=0.01)


def test_the_slower_of_three_ways_is_the_floor() -> None:
    assert Cost(None, "", "", 4e12).seconds(RATES) == 1
    assert Cost(None, "", "", 4e12, 1600e12).seconds(RATES) == 2
    assert Cost(None, "", "", 4e12, 1600e12, 150e9).seconds(RATES) == 3
