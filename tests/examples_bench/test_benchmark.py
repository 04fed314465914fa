"""The benchmark: its figures follow from its times, and each command of the guide runs."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from examples import benchmark
from examples.bench import subject
from examples.bench.point import Ran, lines, point
from examples.bench.routing import Routing
from examples.bench.settings import Settings, routing_of
from examples.bench.timing import Times
from kernels.accelerator import CPU

SETTINGS = Settings(
    tag="t",
    requests=64,
    context=131072,
    nextn=3,
    acceptance=0.75,
    prefill_tokens=4096,
    chunk_tokens=512,
    yoco_keep=0,
    prompt_mode="text",
    image_size=800,
    images=4,
    routing=Routing(),
    warmup=0,
    steps=1,
    scale=1,
)
RAN = Ran("m", "random", "cpu", "CPU", "2", 1, 1)
MINI = ["--steps", "1", "--warmup", "0", "--context_length", "48"]


@pytest.fixture(autouse=True)
def _a_cpu_and_nothing_else_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPINFER_ACCELERATOR", "cpu")
    for name in ("WORLD_SIZE", "RANK", "CUDA_VISIBLE_DEVICES", "DEEPINFER_USE_NEXTN_DECODE"):
        monkeypatch.delenv(name, raising=False)


def _run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[str, list[dict[str, Any]]]:
    assert benchmark.main([*MINI, *arguments]) == 0
    told = capsys.readouterr().out
    return told, [json.loads(line) for line in told.splitlines() if line.startswith("{")]


def _point(phase: Any, settings: Settings = SETTINGS) -> dict[str, Any]:
    return point(phase, settings, RAN, Times.of([0.05, 0.5, 0.01]), 422)


def test_decode_counts_full_acceptance_and_converts_it() -> None:
    told = _point("decode")
    assert told["step_ms"] == 50.0
    assert told["tau"] == 3.25
    assert told["full_tokens_per_s_gpu"] == pytest.approx(64 * 4 / 0.05)
    assert told["full_tokens_per_s_user"] == pytest.approx(4 / 0.05)
    assert told["tokens_per_s_gpu"] == pytest.approx(64 * 3.25 / 0.05)
    assert told["tokens_per_s_user"] == pytest.approx(3.25 / 0.05)
    assert told["measured"] == "a step that verifies 4 rows a request, and one draft block"
    (line,) = lines([told])
    assert "5120.0 tokens/s a GPU, 80.00 a user at full acceptance; at 0.75" in line
    plain = _point("decode", replace(SETTINGS, nextn=0))
    assert plain["full_tokens_per_s_gpu"] == plain["tokens_per_s_gpu"] == pytest.approx(1280)


def test_prefill_and_encoder_count_what_went_in() -> None:
    assert _point("prefill")["tokens_per_s_gpu"] == pytest.approx(4096 / 0.05)
    several = _point("prefill", replace(SETTINGS, context=1000))
    assert several["batch_tokens"] == 4000  # four whole prompts
    assert _point("encoder")["images_per_s_gpu"] == pytest.approx(4 / 0.05)
    assert _point("encoder")["positions_an_image"] == 422


def test_decode_and_prefill_are_measured_beside_each_other(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "deep" / "points.jsonl"
    table, told = _run(capsys, "--decode_num_requests", "2", "--nextn", "2", "--json", str(file))
    assert [one["phase"] for one in told] == ["decode", "prefill"]
    assert "mini, checkpoint weights, CPU; ep_size 1 = 1 machine(s) x 1 card(s)" in table
    assert (told[0]["requests"], told[0]["nextn"], told[0]["tau"]) == (2, 2, 2.5)
    assert told[0]["step_ms"] > 0
    assert [json.loads(line) for line in file.read_text().splitlines()] == told


def test_lengths_are_scaled_only_when_told(capsys: pytest.CaptureFixture[str]) -> None:
    long = ["--context_length", "131072", "--yoco_clip", "--phase", "prefill"]
    assert benchmark.main([*MINI, *long]) == 2
    assert capsys.readouterr().err == (
        "benchmark.py: --context_length 131072 does not fit mini, which has 32768 positions; "
        "--scale 4 divides it so that it does\n"
    )
    table, (told,) = _run(capsys, *long, "--scale", "2048")
    assert "note: --scale 2048: lengths are divided by it" in table
    assert (told["context"], told["scale"], told["yoco_keep"]) == (64, 2048, 76)


def test_an_image_goes_through_the_encoder_and_into_the_prompt(
    capsys: pytest.CaptureFixture[str],
) -> None:
    tiny = ["--model_name", "tandem-tiny"]
    table, told = _run(
        capsys, *tiny, "--prompt_mode", "image", "--image_size", "80", "--images", "2"
    )
    assert table.startswith("tiny, random weights")
    assert [one["phase"] for one in told] == ["decode", "prefill", "encoder"]
    assert told[1]["prompt_mode"] == "image"
    assert told[2]["positions_an_image"] == 8  # 80 -> 84 pixels, 6 patches, 2 cells: 2 * 3 + 2


def test_a_model_without_an_encoder_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert benchmark.main(["--phase", "encoder"]) == 2
    assert capsys.readouterr().err.startswith("benchmark.py: mini has no vision encoder")


def test_a_trace_names_the_backend_of_each_op(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    _run(capsys, "--phase", "decode", "--routing", "balanced", "--profile", str(tmp_path / "t.x"))
    events = json.loads((tmp_path / "t-decode.json").read_text())["traceEvents"]
    names = {event["name"] for event in events}
    assert {"rms_norm [torch]", "expert_mlp [torch]", "route [torch]"} <= names


@pytest.mark.full  # two more processes import torch
def test_visible_cards_are_ranks_that_measure_together(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    table, (told,) = _run(capsys, "--phase", "decode", "--decode_num_requests", "1")
    assert told["ranks"] == 2
    assert "ep_size 2 = 1 machine(s) x 2 card(s)" in table
    assert "ranks hold all experts each" in table


def test_the_processors_time_may_be_the_clock(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEPINFER_USE_NEXTN_DECODE", "1")
    assert benchmark.main([*MINI, "--phase", "decode", "--clock", "cpu"]) == 0
    told = capsys.readouterr()
    assert told.err == ""  # it reads that variable, so there is nothing to say
    assert "note: times are processor time" in told.out
    assert json.loads(told.out.splitlines()[-1])["nextn"] == 1


def test_variables_force_routing_and_flags_come_first() -> None:
    balanced = {"DEEPINFER_FORCE_LOAD_BALANCE": "1"}
    skewed = balanced | {"DEEPINFER_FORCE_IMBALANCE_RATIO": "1.5"}
    assert routing_of(None, None, 4, {}).kind == "natural"
    assert routing_of(None, None, 4, balanced).kind == "balanced"
    assert routing_of(None, None, 4, skewed) == Routing("skewed", 1.5, 4)
    assert routing_of("natural", None, 4, skewed).kind == "natural"
    with pytest.raises(ValueError, match="is for --routing skewed"):
        routing_of("balanced", 2.0, 4, {})


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--nextn", "9"], "a draft block of this model has 5 tokens"),
        (["--model_name", "nothing"], "is no folder"),
        (["--imbalance", "20"], "an imbalance of 20.0 cannot be"),
    ],
)
def test_what_cannot_be_is_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert benchmark.main([*MINI, *arguments]) == 2
    told = capsys.readouterr().err
    assert said in told
    assert told.count("\n") == 1


def test_drafts_are_not_fewer_than_none(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit, match="2"):
        benchmark.main([*MINI, "--nextn", "-1"])
    assert "must be a whole number from 0 on, not '-1'" in capsys.readouterr().err
    monkeypatch.setenv("DEEPINFER_USE_NEXTN_DECODE", "-1")
    assert benchmark.main(MINI) == 2


def test_state_that_does_not_fit_is_refused_with_numbers_before_any_memory_is_taken(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subject, "free_bytes", lambda accelerator: 10_000_000)
    monkeypatch.setattr(subject, "open_memory", None)
    many = ["--phase", "decode", "--decode_num_requests", "100000"]
    assert benchmark.main([*MINI, *many]) == 2
    told = capsys.readouterr().err
    assert re.fullmatch(
        r"benchmark\.py: state of 100000 requests of \d+ tokens takes \d+\.\d GB, and 0\.0 GB are "
        r"free: \d+ such requests would fit\n",
        told,
    ), told


def test_a_machine_has_some_memory_left() -> None:
    assert 1 << 20 < subject.free_bytes(CPU) < 1 << 50


def test_an_interruption_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(job: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(benchmark, "measure", interrupted)
    assert benchmark.main(MINI) == 130
    assert capsys.readouterr().err == "benchmark.py: interrupted\n"
