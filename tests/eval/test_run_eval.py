"""A whole evaluation over the real HTTP server and a fake engine: run, cut off, gone on with."""

from __future__ import annotations

import asyncio
import io
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.errors import BadRequest, ClusterError, NoRoom, WorkerLost
from cluster.messages import Request, unpack_ids
from cluster.progress_bar import ProgressBar
from eval import run_eval, score
from eval.endpoint import Chat, Endpoint, Said
from eval.results import BadResults, Result, open_results, read_results
from eval.sets import SETS, read_questions
from tests.cluster.fake_engine import TOKENIZER, FakeEngine, serving, with_http
from tests.tiny import ROOT

SAMPLES = ROOT / "eval" / "samples"
AIME = SAMPLES / "aime.jsonl"
RIGHT = {"divisible by 7": 14, "2^{20}": 576, "hypotenuse": 41, "LEVEL": 30}
CONFIG = with_http(max_concurrent=16, max_body_bytes=1 << 16)


def solver(wrong: Sequence[str] = ()) -> FakeEngine:
    """Knows the answers, but for those whose problem has one of `wrong` in it."""

    def answer_to(request: Request) -> list[int]:
        prompt = TOKENIZER.decode(unpack_ids(request.prompt))
        (number,) = [number for part, number in RIGHT.items() if part in prompt]
        number += any(part in prompt for part in wrong)
        return TOKENIZER.encode(rf"So it is \boxed{{{number}}}.")

    engine = FakeEngine(finish="stop")
    engine.answer_to = answer_to
    return engine


async def run(url: str, out: Path, *more: str) -> int:
    arguments = ["--set", "aime", "--data", str(AIME), "--base-url", url, "--out", str(out), *more]
    arguments += ["--max-tokens", "200"]
    return await asyncio.to_thread(run_eval.main, arguments)


async def test_a_run_asks_everything_once_and_scores_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine, out = solver(wrong=["LEVEL"]), tmp_path / "deep" / "aime.jsonl"
    async with serving(engine, CONFIG) as url:
        assert await run(url + "/v1", out, "--samples", "2", "--concurrency", "3") == 0
    assert len(engine.requests) == 8
    assert sorted(request.sampling.seed for request in engine.requests) == [0] * 4 + [1] * 4
    told = capsys.readouterr()
    assert "Pass@1 75.0 %" in told.out
    assert "4 questions, 8 answers; 0 without an answer in it, 0 cut" in told.out
    assert "8/8  6 right" in told.err
    assert score.main([str(out), "--wrong"]) == 0
    assert "sample-4, sample 0: 31, not 30" in capsys.readouterr().out


async def test_a_run_goes_on_where_it_was_and_nothing_counts_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "aime.jsonl"
    async with serving(first := solver(), CONFIG) as url:
        assert await run(url, out, "--limit", "2") == 0
        assert len(first.requests) == 2
    lines = out.read_text().splitlines(keepends=True)
    out.write_text("".join(lines) + lines[-1] + lines[-1][:25])  # written twice, and cut off
    async with serving(second := solver(), CONFIG) as url:
        assert await run(url, out) == 0
        assert len(second.requests) == 2
        assert await run(url, out) == 0
        assert len(second.requests) == 2
        assert await run(url, out, "--samples", "3") == 0
        assert len(second.requests) == 2 + 8
    _, results = read_results(out)
    assert set(Counter((one.id, one.sample) for one in results).values()) == {1}
    assert len(results) == 12
    assert "Pass@1 100.0 %" in capsys.readouterr().out


async def test_results_of_other_settings_are_not_mixed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "aime.jsonl"
    async with serving(solver(), CONFIG) as url:
        assert await run(url, out) == 0
        assert await run(url, out, "--temperature", "0.5") == 2
    assert "other settings (temperature)" in capsys.readouterr().err


async def test_what_could_not_be_had_is_asked_for_the_next_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, broken = tmp_path / "aime.jsonl", solver()
    broken.error = ClusterError("it broke")
    async with serving(broken, CONFIG) as url:
        assert await run(url, out) == 1
    told = capsys.readouterr().err
    assert "it broke" in told
    assert "4 answers are missing" in told
    async with serving(solver(), CONFIG) as url:
        assert await run(url, out) == 0


def test_two_runs_do_not_share_a_file(tmp_path: Path) -> None:
    out = tmp_path / "aime.jsonl"
    with (
        open_results(out, {"set": "aime"}),
        pytest.raises(BadResults, match="another run"),
        open_results(out, {"set": "aime"}),
    ):
        pass


def test_a_file_that_was_cut_off_anywhere_can_be_gone_on_with(tmp_path: Path) -> None:
    out, settings = tmp_path / "r.jsonl", {"set": "aime"}
    one = Result("q", 0, "integer", "1", "Answer: \u00e9 1", "stop", 3)
    with open_results(out, settings) as results:
        results.add(one)
    whole = out.read_bytes()
    for length in range(len(whole) + 1):
        out.write_bytes(whole[:length])
        with open_results(out, settings) as results:
            if not results.done:
                results.add(one)
        assert read_results(out) == (settings, [one])


@pytest.mark.parametrize("content", [b"my notes", b"a line\nand half of one", b"\xff\xfe"])
def test_a_file_of_something_else_is_left_as_it_is(content: bytes, tmp_path: Path) -> None:
    out = tmp_path / "notes.txt"
    out.write_bytes(content)
    with pytest.raises(BadResults, match="no file of results"), open_results(out, {}):
        pass
    assert out.read_bytes() == content
    assert score.main([str(out)]) == 1


def test_results_that_cannot_be_written_are_told_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--set", "aime", "--data", str(AIME), "--base-url", "http://127.0.0.1:1"]
    assert run_eval.main([*arguments, "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("arguments", [["--data", "absent.jsonl"], []])
def test_without_data_it_says_what_is_needed(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--out", str(tmp_path / "o.jsonl"), "--base-url", "http://127.0.0.1:1"]
    assert run_eval.main(["--set", "gpqa", *arguments, *out]) == 2
    assert "'Correct Answer'" in capsys.readouterr().err
    assert score.main([str(tmp_path / "o.jsonl")]) == 1


@pytest.mark.parametrize("main", [run_eval.main, score.main])
def test_help_names_every_option(main: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert "python eval/score.py" in capsys.readouterr().out


# ------------------------------------------------------------------ endpoint


class Failing:
    def __init__(self, *errors: ClusterError) -> None:
        self.errors = list(errors)

    async def say(self, prompt: str, fields: dict[str, Any]) -> Said:
        if self.errors:
            raise self.errors.pop(0)
        return Said("yes", "stop", 1)

    async def close(self) -> None: ...


async def test_what_may_pass_is_tried_again_and_what_is_wrong_is_not() -> None:
    passing = Failing(NoRoom("full", retry_after_s=0.001), WorkerLost("gone"))
    async with Endpoint(passing, first_wait_s=0.001) as endpoint:
        assert (await endpoint.say("p", {})).text == "yes"
    wrong = Failing(BadRequest("no such field"))
    async with Endpoint(wrong, first_wait_s=0.001) as endpoint:
        with pytest.raises(BadRequest):
            await endpoint.say("p", {})


async def test_chat_sends_one_message_and_reads_what_comes_back() -> None:
    asked: list[dict[str, Any]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(json.loads(request.content))
        message = {"role": "assistant", "content": "Answer: B", "reasoning_content": "A? B."}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return httpx.Response(200, json={"choices": [choice], "usage": {"completion_tokens": 9}})

    chat = Chat("http://test", "key", 5.0)
    chat._http = httpx.AsyncClient(transport=httpx.MockTransport(answer))
    assert await chat.say("Which?", {"seed": 1}) == Said("Answer: B", "stop", 9)
    assert asked == [{"messages": [{"role": "user", "content": "Which?"}], "seed": 1}]
    chat._http = httpx.AsyncClient(
        transport=httpx.MockTransport(lambda request: httpx.Response(429, text="full"))
    )
    with pytest.raises(NoRoom, match="full"):
        await chat.say("Which?", {})


def test_the_bar_shows_how_far_it_is_and_how_long_it_takes() -> None:
    now = 0.0
    out = io.StringIO()
    bar = ProgressBar(20, out, done=10, clock=lambda: now)
    for step in range(10):
        now = 6.0 * (step + 1)
        bar.step(f"{step} right")
    bar.end()
    lines = out.getvalue().splitlines()
    assert lines[0] == f"[{'#' * 18}{'-' * 12}] 12/20  1 right  0:48 left"
    assert lines[-1] == f"[{'#' * 30}] 20/20  9 right  0:00 left"


def test_the_samples_are_whole_sets() -> None:
    for name, file in (("aime", "aime.jsonl"), ("gpqa", "gpqa.csv"), ("hle", "hle.jsonl")):
        assert len(read_questions(SETS[name], SAMPLES / file).questions) >= 3


def test_an_interruption_is_one_line_and_keeps_what_was_answered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def interrupted(*_: Any) -> list[str]:
        raise KeyboardInterrupt

    monkeypatch.setattr(run_eval, "ask_all", interrupted)
    words = ["--set", "aime", "--data", str(AIME), "--base-url", "http://127.0.0.1:1"]
    assert run_eval.main([*words, "--out", str(tmp_path / "aime.jsonl")]) == 130
    assert capsys.readouterr().err == (
        "run_eval.py: interrupted; the same command goes on from here\n"
    )
    assert (tmp_path / "aime.jsonl").is_file()


@pytest.mark.parametrize("option", ["--temperature", "--top-p", "--timeout"])
@pytest.mark.parametrize("value", ["inf", "nan", "-1", "hot"])
def test_a_number_that_json_cannot_say_is_refused(
    option: str, value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--set", "aime", "--data", str(AIME), "--base-url", "http://127.0.0.1:1"]
    with pytest.raises(SystemExit):
        run_eval.main([*words, "--out", str(tmp_path / "a.jsonl"), f"{option}={value}"])
    assert f"must be a finite number from 0 on, not '{value}'" in capsys.readouterr().err
