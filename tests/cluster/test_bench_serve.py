"""`tandem bench`: loads are as asked, figures are right, and it runs against a real server."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from cluster.bench.command import add_bench, render
from cluster.bench.drive import drive, poster
from cluster.bench.load import LOWEST_ID, Lengths, Load
from cluster.bench.record import Goal, Record, percentile, summarise
from cluster.bench_http import measure
from cluster.errors import BadRequest, NoRoom, TransferError, Unavailable
from tests.cluster.fake_engine import TOKENIZER, FakeEngine, serving, with_http

ANSWER = TOKENIZER.encode("one two three four five")
LOAD = Load(12, 3, None, Lengths(4, 8), Lengths(2, 5))


def test_equal_seeds_are_equal_loads_within_their_lengths() -> None:
    bodies = list(LOAD.bodies())
    assert bodies == list(LOAD.bodies())
    assert len(bodies) == 12
    assert {len(body["prompt"]) for body in bodies} <= set(range(4, 9))
    assert {body["max_tokens"] for body in bodies} <= set(range(2, 6))
    assert all(LOWEST_ID <= one <= LOAD.highest_id for body in bodies for one in body["prompt"])
    assert len({tuple(body["prompt"]) for body in bodies}) == 12


def test_arrivals_of_an_open_loop_keep_the_rate() -> None:
    many = Load(20_000, 1, 50.0, Lengths(1, 1), Lengths(1, 1))
    times = list(many.arrivals())
    gaps = [after - before for before, after in pairwise(times)]
    assert sum(gaps) / len(gaps) == pytest.approx(1 / 50, rel=0.03)
    assert sum(gap > 2 / 50 for gap in gaps) / len(gaps) == pytest.approx(0.1353, abs=0.01)
    assert set(LOAD.arrivals()) == {0.0}


@pytest.mark.parametrize("text", ["", "x", "0", "9-3", "1-2-3", "-4"])
def test_lengths_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(BadRequest):
        Lengths.parse(text)
    assert Lengths.parse("3-9") == Lengths(3, 9)


def test_the_figures_of_a_run_by_hand() -> None:
    fast = Record(1.0, [1.1, 1.2, 1.3], 1.3, 10, 3)
    slow = Record(1.0, [2.0, 3.0], 3.0, 10, 5)
    lost = Record(2.0, [2.1], 2.5, error="WorkerLost: gone")
    told = summarise([fast, slow, lost], Goal(ttft_s=0.5, tpot_s=0.2))
    assert (told.requests, told.errors) == (3, {"WorkerLost: gone": 1})
    assert told.duration_s == 2.0
    assert (told.requests_per_s, told.goodput_per_s, told.output_tokens_per_s) == (1.0, 0.5, 4.0)
    assert told.ttft_ms == pytest.approx({"mean": 550, "p50": 100, "p90": 1000, "p99": 1000})
    assert told.tpot_ms["p99"] == pytest.approx(250)
    assert told.gap_ms["mean"] == pytest.approx(400)
    assert "gone" in render({"here": told})
    twice = summarise([Record(1.0, [1.2, 1.4, 1.6], 1.6, 10, 3)], Goal())
    once = summarise([fast], Goal())
    assert "TTFT p50 x2.00" in render({"a": once, "b": twice})
    assert summarise([lost], Goal()).ttft_ms == {}


def test_percentiles_are_values_that_occurred() -> None:
    values = [float(value) for value in range(1, 101)]
    assert [percentile(values, one) for one in (50, 90, 99, 100)] == [50, 90, 99, 100]
    assert percentile([7.0], 99) == 7.0


async def test_a_closed_loop_never_has_more_running_than_clients() -> None:
    running, most = 0, 0

    async def post(body: Mapping[str, Any]) -> AsyncGenerator[bytes, None]:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        yield b'{"choices":[{"text":"a"}]}'
        yield b'{"choices":[],"usage":{"prompt_tokens":4,"completion_tokens":1}}'
        yield b"[DONE]"
        running -= 1

    progress: list[int] = []
    records = await drive(LOAD, post, more={}, progress=lambda told: progress.append(len(told)))
    assert most == LOAD.concurrency
    assert len(records) == len(progress) == LOAD.requests
    assert not any(record.error for record in records)


async def test_against_a_server_errors_are_counted_and_not_raised() -> None:
    engine = FakeEngine(ANSWER)
    async with serving(engine, with_http(max_concurrent=64)) as url:
        open_loop = Load(6, 1, 500.0, Lengths(4, 4), Lengths(3, 3))
        records = await drive(open_loop, poster(url, None), more={"ignore_eos": True})
        assert [record.output_tokens for record in records] == [3] * 6
        assert all(record.ttft_s and record.tpot_s is not None for record in records)
        assert all(request.sampling.ignore_stop for request in engine.requests)
        engine.error = TransferError("lost")
        (late,) = await drive(
            Load(1, 1, None, Lengths(4, 4), Lengths(3, 3)), poster(url, None), more={}
        )
        assert late.error == "TransferError: lost"
        engine.answer, engine.error = (), NoRoom("full")
        (full,) = await drive(
            Load(1, 1, None, Lengths(4, 4), Lengths(3, 3)), poster(url, None), more={}
        )
        assert full.error == "NoRoom: HTTP 429: full"


def bench(*words: str) -> int:
    parser = argparse.ArgumentParser()
    add_bench(parser.add_subparsers())
    options = parser.parse_args(["bench", *words])
    return int(options.run(options))


async def test_the_command_compares_and_writes_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = FakeEngine(ANSWER)
    written = tmp_path / "result.json"
    words = ["--requests", "3", "--prompt-tokens", "4-6", "--output-tokens", "3"]
    async with serving(engine, with_http(max_concurrent=64)) as url:
        words += ["--url", url, "--compare", "colocated", "--json", str(written)]
        assert await asyncio.to_thread(bench, *words) == 0
    told = json.loads(written.read_text())
    assert set(told["results"]) == {url, "colocated"}
    assert told["results"]["colocated"]["output_tokens"] == 9
    assert engine.colocated == [False] * 5 + [True] * 5  # two of each are the warm-up
    shown = capsys.readouterr().out
    assert f"colocated against {url}" in shown
    assert "TTFT" in shown


def test_the_command_says_when_nobody_answers() -> None:
    with pytest.raises(Unavailable, match="nobody answers"):
        bench("--url", "http://127.0.0.1:1", "--requests", "1")


def test_the_http_benchmark_has_figures() -> None:
    cost = measure(200, rounds=3)
    assert cost.first_byte_ms > 0
    assert 0 < cost.token_us < 10_000


@pytest.mark.parametrize(
    "wrong", [["--concurrency", "0"], ["--requests", "0"], ["--rate", "-1"], ["--rate", "nan"]]
)
def test_a_load_that_cannot_be_is_refused_before_it_starts(wrong: list[str]) -> None:
    parser = argparse.ArgumentParser()
    add_bench(parser.add_subparsers())
    options = parser.parse_args(["bench", "--url", "http://127.0.0.1:1", *wrong])
    with pytest.raises(BadRequest):
        options.run(options)
