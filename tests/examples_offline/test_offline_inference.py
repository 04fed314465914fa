"""The guide's offline commands, with a small model, and the one line for what cannot be."""

from __future__ import annotations

import json

import pytest

from examples import offline_inference, structured_output_checks
from examples.structured_output_checks import CHECKS

MINI = ["--max_tokens", "2", "--num_samples", "1"]
TINY = ["--model_name", "tandem-tiny", "--load_format", "dummy"]


@pytest.fixture(autouse=True)
def _a_cpu_and_nothing_else_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPINFER_ACCELERATOR", "cpu")
    for name in ("WORLD_SIZE", "RANK", "CUDA_VISIBLE_DEVICES", "DEEPINFER_HF_MODEL_DIR"):
        monkeypatch.delenv(name, raising=False)


def test_sizes_are_derived_and_what_is_done_in_another_way_is_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert offline_inference.main([*MINI, "--ep", "1", "--cp", "2"]) == 0
    told = capsys.readouterr()
    assert "dp 1 x cp 2 = 2 ranks, experts in 2 group(s) of 1" in told.out
    assert "1 samples," in told.out
    assert (
        "note: ranks that run prompts together share their experts, too: 1 group(s) of" in told.err
    )


def test_visible_cards_decide_how_many_ranks_there_are(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert offline_inference.main([*MINI, "--disaggregated"]) == 0
    assert "dp 2 x cp 1 = 2 ranks" in capsys.readouterr().out


def test_long_samples_have_the_guides_lengths_unless_they_are_scaled(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert offline_inference.main([*TINY, "--long_context"]) == 2
    assert capsys.readouterr().err == (
        "offline_inference.py: --long_context takes 20485 positions a sample where tiny has 4096; "
        "--scale 6 divides its lengths so that it fits\n"
    )
    scaled = ["--long_context", "--scale", "1024"]
    assert offline_inference.main([*MINI, *scaled]) == 0
    told = capsys.readouterr().out
    assert "--scale 1024: 17 in, 4 out, not the full lengths" in told
    assert "17 random tokens: 4 tokens, length" in told


def test_another_machine_than_the_first_has_nothing_to_do(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert offline_inference.main(MINI) == 0
    assert capsys.readouterr().out.startswith("machine 1 of 2: its ranks are started, through Ray")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--ep", "6", "--cp", "4"], "--ep 6: dp 1 (derived: 6 // 4, at least 1) x cp 4 make 4"),
        (["--model_name", "tandem-mimi"], "did you mean tandem-mini?"),
        (["--model_name", "tandem-tiny"], "has no checkpoint"),
    ],
)
def test_what_cannot_be_is_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert offline_inference.main(arguments) == 2
    told = capsys.readouterr().err
    assert told.startswith("offline_inference.py: ")
    assert said in told
    assert told.count("\n") == 1


@pytest.mark.parametrize("option", ["--scale", "--num_samples", "--max_tokens", "--max_num_seqs"])
def test_counts_begin_with_one(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        offline_inference.main([option, "0"])
    assert f"{option}: must be a whole number from 1 on, not '0'" in capsys.readouterr().err


def test_an_unknown_variable_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEPINFER_HF_MODEL_DIRS", "x")
    assert offline_inference.main(["--ep", "0"]) == 2
    first = capsys.readouterr().err.splitlines()[0]
    assert first.endswith("is no variable of ours; did you mean DEEPINFER_HF_MODEL_DIR?")


def test_structured_output_is_checked_by_others_than_its_maker() -> None:
    right = {
        "regex": "2031-07",
        "JSON schema": json.dumps({"name": "read_file", "line": 3, "dry_run": False}),
        "EBNF": "edit(1, 22)",
    }
    wrong = {
        "regex": "1999-01",
        "JSON schema": json.dumps({"name": "read_file", "line": True, "dry_run": False}),
        "EBNF": "edit(1",
    }
    for check in CHECKS:
        assert structured_output_checks._holds(check, right[check.name])
        assert not structured_output_checks._holds(check, wrong[check.name])
        assert not structured_output_checks._holds(check, "{")


def test_the_check_runs_on_the_engine_that_has_answered(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*MINI, "--check_structured_output", "--temperature", "0.7"]
    assert offline_inference.main(arguments) == 0
    told = capsys.readouterr().out
    assert [line.split(":")[1].split()[0] for line in told.splitlines() if "output," in line] == [
        "ok"
    ] * 3


def test_an_interruption_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(offline_inference, "LLM", interrupted)
    assert offline_inference.main(MINI) == 130
    assert capsys.readouterr().err.endswith("offline_inference.py: interrupted\n")


@pytest.mark.parametrize("value", ["inf", "nan", "-1"])
def test_a_temperature_that_is_none_is_refused_before_a_model_is_loaded(
    value: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offline_inference, "LLM", None)
    assert offline_inference.main([*MINI, f"--temperature={value}"]) == 2
    assert capsys.readouterr().err.endswith(
        f"offline_inference.py: temperature must be 0 or more, and finite, not {float(value)}\n"
    )
