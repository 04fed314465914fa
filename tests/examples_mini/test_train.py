"""Training runs follow one another, on the CPU, with rows of 256 tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("deepseek_recipe")

from examples.mini import feed, train
from examples.mini.corpus import FOLDER, Corpus
from examples.mini.export import export, restore
from examples.mini.feed import FeedSettings
from examples.mini.saved import load
from model.spec import ModelSpec
from model.tokenizer import Tokenizer

CODE = "def double(x):\n    return 2 * x\n\n\n"


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(feed, "lengths", lambda place: {256: 1.0})
    Corpus.of([CODE * 50], Tokenizer.load(FOLDER)).save(tmp_path / "corpus.npz")
    return tmp_path / "corpus.npz"


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_run_goes_on_where_the_one_before_it_ended(tmp_path: Path, corpus: Path) -> None:
    common = ["--corpus", str(corpus), "--tokens", "256", "--workers", "1", "--device", "cpu"]
    first, second, drafted = (tmp_path / name for name in ("first", "second", "drafted"))
    train.main([*common, "--out", str(first), "--seconds", "20", "--until", "0.1"])
    log = [json.loads(line) for line in (first / "log.jsonl").read_text().splitlines()]
    assert log[0]["loss"] == pytest.approx(7.6, abs=0.4)  # ln 2048
    train.main([*common, "--from", str(first), "--out", str(second), "--seconds", "20"])
    _, place = load(ModelSpec.load(FOLDER), second)
    assert place == 1.0
    arguments = ["--from", str(second), "--out", str(drafted), "--seconds", "20", "--draft"]
    train.main([*common, *arguments])
    before, after = (load(ModelSpec.load(FOLDER), one)[0] for one in (second, drafted))
    changed = {
        key
        for key, value in before.values.items()
        if not value.allclose(after.values[key], rtol=1e-4, atol=0)
    }
    assert changed
    assert all(key.startswith("mtp.") for key in changed)
    export(after, ModelSpec.load(FOLDER), tmp_path / "checkpoint")
    restore(tmp_path / "checkpoint")


def test_an_error_of_a_worker_is_raised_in_training(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(place: float, length: int) -> dict[str, float]:
        raise ValueError("no such task")

    monkeypatch.setattr("examples.mini.mixture.shares", broken)
    settings = FeedSettings(FOLDER, corpus, tokens=256, workers=1, seed=1)
    with feed.feed(settings, 0.0) as batches, pytest.raises(ValueError, match="no such task"):
        batches.next(0.0)
