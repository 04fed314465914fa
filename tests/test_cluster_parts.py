"""What the benchmark of a whole cluster launches, reads and calls a match."""

from __future__ import annotations

from math import inf

import pytest

from cluster.config import ClusterConfig, load_config
from cluster.errors import BadRequest
from cluster.launch import DEFAULT_CONFIG
from tests import bench_cluster_gpu
from tests.cluster_parts import BLOCK_TOKENS, Findings, Plan, Shape, in_words, ranks_of
from tests.token_match import Reference, gaps_of, match

TIMELINE = {
    "ttft_s": 1.25,
    "tpot_s": 0.05,
    "events": [
        {"event": "routed", "prefill": "prefill-a/0", "decode": "decode-b/1"},
        {"event": "handed_over", "bytes": 4_000_000, "pushes": 3, "push_s": 0.002}
        | {"hidden_s": 0.001, "tail_s": 0.004, "path": "nixl/UCX"},
        {"event": "taken_over", "decode": "decode-b/1"},
    ],
}


def config_of(part: str, plan: Plan) -> ClusterConfig:
    return load_config(DEFAULT_CONFIG, plan.settings(part, 8100), {})


def gpus_of(config: ClusterConfig) -> float:
    pools = (config.prefill, config.decode)
    return sum(pool.groups * pool.ranks * pool.gpus for pool in pools)


def test_every_part_is_a_configuration_that_fits_one_gpu() -> None:
    asked = {part: gpus_of(config_of(part, Plan())) for part in bench_cluster_gpu.PARTS}
    assert asked.pop("colocated") == 0.5
    assert all(0.9 < gpus <= 1 for gpus in asked.values()), asked


@pytest.mark.parametrize("part", bench_cluster_gpu.PARTS)
def test_a_rehearsal_asks_for_no_gpu(part: str) -> None:
    assert gpus_of(config_of(part, Plan(on_gpu=False))) == 0


def test_the_longest_prompt_and_its_answer_fit_the_model_and_the_blocks() -> None:
    plan = Plan()
    engine = config_of("direct", plan).prefill.engine
    assert plan.long + plan.output == engine.max_length == 32768
    assert engine.num_blocks * BLOCK_TOKENS >= 2 * engine.max_length
    assert max(map(len, plan.pair_prompts().values())) == plan.long
    assert list(Plan(long=20).pair_prompts()) == ["5 tokens", "17 tokens", "20 tokens"]


def test_the_domain_has_68_ranks_that_share_nothing_and_a_prompt_for_each_that_decodes() -> None:
    plan = Plan()
    config = config_of("domain", plan)
    assert (config.prefill.groups, config.prefill.ranks) == (1, 4)
    assert (config.decode.groups, config.decode.ranks) == (8, 8)
    assert not config.prefill.shares_experts
    assert not config.decode.shares_experts
    prompts = plan.domain_prompts()
    assert len(prompts) == 64
    longest = max(map(len, prompts.values()))
    assert longest + plan.few <= config.decode.engine.max_length
    assert len({tuple(prompt) for prompt in prompts.values()}) == 64


def test_each_part_says_by_name_what_has_to_carry_its_state() -> None:
    gpu, cpu = Plan(), Plan(on_gpu=False)
    assert [gpu.expected_path(part) for part in ("direct", "domain", "packed")] == [
        "nvlink/cuda_ipc",
        "nvlink/cuda_ipc",
        "nixl/UCX",
    ]
    assert [cpu.expected_path(part) for part in ("direct", "domain", "packed")] == [
        "host/cma",
        "nixl/UCX",
        "nixl/UCX",
    ]


@pytest.mark.parametrize("text", ["4", "4+8", "0+8x8", "4+8x8x8", "4 + 8x8", "-1+2x2"])
def test_a_shape_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(BadRequest, match="is not a shape such as 4"):
        Shape.parse(text)
    assert str(Shape.parse("1+2x3")) == "1+2x3"


def test_answers_match_or_differ_at_a_tie_or_are_wrong() -> None:
    reference = Reference((7, 8, 9), (1.0, 0.01, 1.0))
    answers = {"same": (7, 8, 9), "tie": (7, 5, 5), "wrong": (7, 8, 5), "short": (7, 8)}
    found = match(dict.fromkeys(answers, reference), answers, margin=0.05)
    assert (found.answers, found.equal, found.ties) == (4, 1, 1)
    assert [line.partition(" ")[0] for line in found.wrong] == ["wrong", "short"]
    assert "differs from token 2 on, with 1 nats between the best two" in str(found)
    strict = match({"tie": reference}, {"tie": (7, 5, 5)}, margin=0.0)
    assert len(strict.wrong) == 1


def test_gaps_are_those_of_the_two_likeliest() -> None:
    assert gaps_of([{"a": -2.0, "b": -0.5, "c": -0.75}, {"a": 0.0}]) == (0.25, inf)


def test_a_request_is_told_in_words_with_its_handoff() -> None:
    assert in_words(TIMELINE) == (
        "TTFT 1,250.0 ms, TPOT 50.00 ms; 4.00 MB in 3 pushes, 2.0 ms (2.00 GB/s), 1.0 of them "
        "hidden; last chunk to accepted 4.0 ms"
    )
    assert in_words(TIMELINE | {"events": []}) == "TTFT 1,250.0 ms, TPOT 50.00 ms"
    assert ranks_of([TIMELINE, TIMELINE], "taken_over", "decode") == {"decode-b/1"}


def test_what_does_not_hold_is_said_under_the_table() -> None:
    findings = Findings("direct", {"up": "3 s"})
    assert str(findings).endswith("up  3 s\n  holds")
    findings.check(False, "other tokens than colocated")
    assert str(findings).endswith("  DOES NOT HOLD: other tokens than colocated")


def test_what_cannot_begin_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_cluster_gpu.main(["--parts", "direct,sideways"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("bench_cluster_gpu: no part is called sideways: colocated, direct")
