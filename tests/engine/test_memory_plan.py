"""What a configuration takes, against sums made by hand from the published sizes of the model."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from cluster.config import ClusterConfig, load_config
from cluster.errors import StartupError
from engine.memory_plan import Experts, GpuMemory, RankMemory, plan_lines, plan_memory
from engine.plan_command import add_plan, parse_bytes
from kv_transfer.blocks import BlockPool
from kv_transfer.layout import Layout
from kv_transfer.ring import ReceiveRing
from kv_transfer.slab import Slab
from model.census import take_census
from model.spec import ModelSpec
from model.state import state_fields

ROOT = Path(__file__).parents[2]
DOMAIN = ROOT / "deploy" / "configs" / "scale_up_domain.toml"
REAL = ROOT / "deploy" / "models" / "deepseek-v41-flash"
LENGTH = 131_072
H200 = GpuMemory(141 * 10**9, 0.9)

# One routed expert: three matrices of 2304 x 5120 in fp4 (half a byte) with a scale per 32 values.
EXPERT = 3 * 2304 * 5120 // 2 + 3 * 2304 * 5120 // 32
# A block of 128 positions: 64 rows in each of three layers of ratio 2, 128 rows in one of ratio 1,
# each row 512 values (256 B + 32 scales) and an index key of 128 values (64 B + 4 scales).
BLOCK = (3 * 64 + 128) * (256 + 32 + 64 + 4)
# A slot: windows of 128 rows in 40 layers and 3 draft stages, 512 e4m3 values and 16 scales each;
# and in each of the three layers of ratio 2 an open pair, 2 x 512 floats.
SLOT = 43 * 128 * (512 + 16) + 3 * 2 * 512 * 4


def plans(config: ClusterConfig, experts: Experts = "shared") -> dict[str, RankMemory]:
    found = plan_memory(config, ModelSpec.load(REAL), length=LENGTH, experts=experts)
    return {plan.pool: plan for plan in found}


def test_the_large_configuration_is_what_the_hand_says() -> None:
    prefill, decode = plans(load_config(DOMAIN)).values()
    assert EXPERT == 18_800_640
    assert prefill.weights["weights: 96 of 384 experts a layer"] == 40 * 96 * EXPERT
    assert decode.weights["weights: 48 of 384 experts a layer"] == 40 * 48 * EXPERT
    assert (decode.block_bytes, decode.slot_bytes) == (BLOCK, SLOT)
    assert decode.state == {
        "state: 32,768 blocks": 32_768 * BLOCK,
        "state: 256 slots": 256 * SLOT,
    }
    assert decode.transfer == {"receive ring: 16 segments": 1 << 30}
    assert prefill.transfer == {"staging: 16 cells": 16 * (16 << 20)}  # of four requests
    assert decode.nbytes == sum(decode.parts.values())
    # 298.6 GB of backbone less 40 x 384 experts; the first output projections are bf16 values, of
    # 8 groups of 1024 outputs and 4096 inputs, and not a byte each with a scale a 32 x 32 block
    stored, first = 298_624_579_008 - 40 * 384 * EXPERT, 8 * 1024 * 4096
    dense = decode.weights["weights: all but routed experts"]
    assert stored == 9_846_748_608
    assert dense == stored + 40 * (2 * first - first - first // 1024)


def test_in_float32_every_weight_is_four_bytes() -> None:
    config = load_config(DOMAIN, ["model.dtype=float32", "decode.ep=1"])
    decode = plans(config)["decode"]
    parameters = take_census(ModelSpec.load(REAL)).parameters
    assert sum(decode.weights.values()) == 4 * (parameters["backbone"] + parameters["drafter"])
    on_cpus = plans(load_config(DOMAIN, ["decode.gpus=0", "decode.ep=1"]))["decode"]
    assert on_cpus.weights == decode.weights


def test_what_lives_within_a_step_grows_with_its_rows() -> None:
    small, large = (
        plans(load_config(DOMAIN, [f"decode.engine.max_rows={rows}"]))["decode"].steps
        for rows in (8, 16)
    )
    assert large["steps: logits"] == 2 * small["steps: logits"] == 2 * 4 * 4 * 8 * 129_280
    assert sum(large.values()) > sum(small.values())


def test_state_and_ring_are_what_a_rank_really_takes() -> None:
    config = load_config(ROOT / "deploy" / "configs" / "local.toml", (), {})
    spec = ModelSpec.load(ROOT / config.model.path)
    (decode,) = (one for one in plan_memory(config, spec, length=100) if one.pool == "decode")
    sizes, moves = config.decode.engine, config.transfer
    slab = Slab(Layout(state_fields(spec), config.model.block_tokens), 8, 3)
    assert decode.block_bytes * 8 == slab.blocks.numel()
    assert decode.slot_bytes * 3 == slab.slots.numel()
    assert (decode.num_blocks, decode.num_slots) == (sizes.num_blocks, sizes.num_slots)
    ring = ReceiveRing(moves.ring_bytes, moves.cell_bytes, moves.cells)
    assert sum(decode.transfer.values()) == ring.memory.numel()
    leased = BlockPool(8, 1, config.model.block_tokens).lease(100)
    assert decode.blocks_of_one == len(leased.block_ids) == 7


def test_requests_are_bounded_by_blocks_then_by_slots() -> None:
    config = load_config(DOMAIN)
    decode = plans(config)["decode"]
    assert decode.blocks_of_one == 1024
    assert decode.requests == 32  # 32,768 blocks of 128 tokens
    few = load_config(DOMAIN, ["decode.engine.num_slots=5"])
    assert plans(few)["decode"].requests == 5


def test_memory_that_is_left_would_hold_so_many_more() -> None:
    decode = plans(load_config(DOMAIN))["decode"]
    left = int(0.9 * 141e9) - decode.fixed_bytes
    assert decode.most_requests(H200) == left // (1024 * BLOCK + SLOT) == 648


def test_a_rank_that_holds_every_expert_does_not_fit_and_the_error_has_the_numbers() -> None:
    decode = plans(load_config(DOMAIN), experts="whole")["decode"]
    assert decode.weights["weights: 384 of 384 experts a layer"] == 40 * 384 * EXPERT
    with pytest.raises(StartupError) as refused:
        decode.check(H200)
    said = str(refused.value)
    assert "decode: a rank needs 306.5 GB of GPU memory" in said
    assert "of 141.0 GB 90% may be planned, 126.9 GB" in said
    assert "decode.ranks is 8" in said
    assert decode.most_requests(H200) == 0


def test_the_advice_of_too_many_blocks_is_a_number_that_fits() -> None:
    decode = plans(load_config(DOMAIN, ["decode.engine.num_blocks=2000000"]))["decode"]
    with pytest.raises(
        StartupError, match=r"lower decode.engine.num_blocks to ([\d,]+)"
    ) as refused:
        decode.check(H200)
    number = str(refused.value).rsplit(" to ", 1)[1].replace(",", "")
    plans(load_config(DOMAIN, [f"decode.engine.num_blocks={number}"]))["decode"].check(H200)
    one_more = load_config(DOMAIN, [f"decode.engine.num_blocks={int(number) + 1}"])
    with pytest.raises(StartupError):
        plans(one_more)["decode"].check(H200)


def test_a_pool_without_groups_takes_nothing() -> None:
    assert set(plans(load_config(DOMAIN, ["prefill.groups=0"]))) == {"decode"}


def test_experts_that_do_not_divide_are_rounded_up() -> None:
    prefill = plans(load_config(DOMAIN, ["prefill.ranks=5"]))["prefill"]
    assert prefill.weights["weights: 77 of 384 experts a layer"] == 40 * 77 * EXPERT


def test_redundant_experts_count_and_ranks_that_share_nothing_hold_all() -> None:
    asked = ["decode.extra_experts=30", "prefill.ep=1"]  # 384 + 32 on eight ranks
    prefill, decode = plans(load_config(DOMAIN, asked)).values()
    assert decode.weights["weights: 52 of 384 experts a layer"] == 40 * 52 * EXPERT
    assert prefill.weights["weights: 384 of 384 experts a layer"] == 40 * 384 * EXPERT


def test_the_table_names_every_part_and_the_pool_total() -> None:
    found = tuple(plans(load_config(DOMAIN)).values())
    text = "\n".join(plan_lines(found, LENGTH, H200))
    assert "decode, 8 x 8 ranks" in text
    assert "32 a rank, 2,048 in the pool" in text
    for part, nbytes in found[1].parts.items():
        assert any(part in line and f"{nbytes:,}" in line for line in text.splitlines())


def command(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_plan(parser.add_subparsers())
    return parser.parse_args(["plan", *words])


def test_the_command_prints_and_then_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    words = (str(DOMAIN), "--model", str(REAL), "--gpu-memory", "80GB")
    options = command(*words, "--set", "prefill.ranks=2")
    with pytest.raises(StartupError, match="prefill: a rank needs"):
        options.run(options)
    assert "left of 90% of 80.0 GB" in capsys.readouterr().out
    options = command(str(DOMAIN), "--model", str(REAL), "--json")
    assert options.run(options) == 0
    told = json.loads(capsys.readouterr().out)
    assert [pool["requests"] for pool in told["pools"]] == [16, 32]


def test_sizes_are_read_with_decimal_and_binary_units() -> None:
    sizes = ("141GB", "80 GiB", "1.5mb", "7")
    assert [parse_bytes(text) for text in sizes] == [141 * 10**9, 80 << 30, 1_500_000, 7]
    for wrong in ("141 Gb/s", "much", "-3GB"):
        with pytest.raises(argparse.ArgumentTypeError, match="is not a size"):
            parse_bytes(wrong)


@pytest.mark.parametrize("words", [("--length", "0"), ("--share", "1.5")])
def test_impossible_questions_are_refused(words: tuple[str, str]) -> None:
    options = command(str(DOMAIN), "--model", str(REAL), *words)
    with pytest.raises(ValueError, match=r"at least one token|at most 1"):
        options.run(options)
