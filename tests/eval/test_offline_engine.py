"""An evaluation without a server: the same run, over an engine of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cluster.errors import BadRequest
from eval import run_eval
from eval.offline_engine import OfflineEngine
from eval.results import read_results
from offline import LLM, SamplingParams
from tests.tiny import ROOT

AIME = ROOT / "eval" / "samples" / "aime.jsonl"
FIELDS = {"max_tokens": 4, "temperature": 0.0, "top_p": 1.0, "seed": 0}


@pytest.fixture(autouse=True)
def _a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPINFER_ACCELERATOR", "cpu")


@pytest.fixture
async def engine() -> AsyncIterator[OfflineEngine]:
    made = OfflineEngine.of("tandem-mini", concurrency=3, max_tokens=4)
    yield made
    await made.close()


async def test_answers_are_those_of_the_engine_however_many_are_asked_at_once(
    engine: OfflineEngine,
) -> None:
    prompts = ["def add(a, b):", "The capital of Japan is", "alpha", "beta"]
    told = await asyncio.gather(*(engine.say(prompt, FIELDS) for prompt in prompts))
    with LLM("tandem-mini", max_num_seqs=1, max_model_len=256) as llm:
        alone = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    assert [one.text for one in told] == alone
    assert {one.finish for one in told} <= {"stop", "length"}
    with pytest.raises(BadRequest, match="top_p"):
        await engine.say("alpha", FIELDS | {"top_p": 2.0})


def test_a_run_needs_no_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "aime.jsonl"
    run = ["--set", "aime", "--data", str(AIME), "--max-tokens", "2", "--out", str(out)]
    assert run_eval.main([*run, "--offline", "tandem-mini"]) == 0
    settings, results = read_results(out)
    assert (settings["model"], settings["api"], len(results)) == ("tandem-mini", "offline", 4)
    capsys.readouterr()
    assert run_eval.main([*run, "--offline", "tandem-mimi"]) == 2
    assert "other settings (model)" in capsys.readouterr().err


def test_a_model_that_is_not_there_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ["--set", "aime", "--data", str(AIME), "--out", str(tmp_path / "a.jsonl")]
    assert run_eval.main([*run, "--offline", "tandem-mimi"]) == 2
    told = capsys.readouterr().err
    assert "did you mean tandem-mini?" in told
    assert told.count("\n") == 1


def test_what_is_told_to_a_server_is_refused(tmp_path: Path) -> None:
    run = ["--set", "aime", "--data", str(AIME), "--out", str(tmp_path / "a.jsonl")]
    for wrong in (["--model", "m"], ["--api", "chat"], ["--base-url", "http://127.0.0.1:1"]):
        with pytest.raises(SystemExit, match="2"):
            run_eval.main([*run, "--offline", "tandem-mini", *wrong])
