"""Commands print what they promise, and compute what the independent reference computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model.census import take_census
from model.checkpoint import INDEX_FILE
from model.commands import main
from model.spec import ModelSpec
from model.weights import load_weights
from tests.model.cases import micro_config
from tests.model.oracle import oracle

MODELS = Path(__file__).parents[2] / "deploy" / "models"
TINY = MODELS / "tiny"
IDS = ",".join(str((37 * i * i + 11 * i + 5) % 250) for i in range(41))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the micro model, as random-checkpoint writes it."""
    plain, path = (tmp_path_factory.mktemp("models") / name for name in ("plain", "random"))
    plain.mkdir()
    (plain / "config.json").write_text(json.dumps(micro_config()))
    (plain / "tokenizer.json").write_text("any")
    main(["random-checkpoint", str(plain / "config.json"), str(path), "--seed", "5"])
    return path


def saved(path: Path) -> dict[str, Any]:
    with np.load(path) as arrays:
        return dict(arrays)


# ------------------------------------------------------------------ folders


def test_inspect_needs_only_a_config(capsys: pytest.CaptureFixture[str]) -> None:
    main(["inspect", str(MODELS / "deepseek-v41-flash" / "config.json")])
    out = capsys.readouterr().out
    for number in ("763,205,315,794", "510,286,023,000", "96,085", "890 bytes", "119,560,192"):
        assert number in out
    assert "no shards here" in out


def test_inspect_speaks_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["inspect", str(folder), "--json", "--length", "1001"])
    report = json.loads(capsys.readouterr().out)
    spec = ModelSpec.load(folder)
    assert report["parameters"] == take_census(spec).parameters
    assert report["handoff"]["length"] == 1001
    assert report["checkpoint"] == "complete, 2 shards"
    assert report["fingerprint"] == spec.fingerprint


def test_a_random_checkpoint_is_a_whole_model_folder(folder: Path, tmp_path: Path) -> None:
    names = {path.name for path in folder.iterdir()}
    shards = {f"model-0000{number}-of-00002.safetensors" for number in (1, 2)}
    assert names == {"config.json", "tokenizer.json", INDEX_FILE} | shards
    assert (folder / "tokenizer.json").read_text() == "any"
    text_only = tmp_path / "text"
    main(["random-checkpoint", str(folder), str(text_only), "--no-vision", "--shards", "1"])
    weights = load_weights(text_only, ModelSpec.load(text_only))
    assert "image_start" not in weights
    assert "image_start" in load_weights(folder, ModelSpec.load(folder))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["inspect", "{tmp}"], "No such file"),
        (["inspect", "{tmp}/bad.json"], "bad.json: Expecting property name"),
        (["inspect", "{tmp}/empty.json"], "empty.json: config.json has no text_config"),
        (["inspect", "{folder}", "--length", "-1"], "--length is at least 1, not -1"),
        (["random-checkpoint", "{folder}", "{folder}"], "already holds"),
        (["random-checkpoint", "{folder}", "{tmp}/x", "--shards", "0"], "--shards is at least 1"),
        (["build-tokenizer", "{tmp}/x", "--source", "{tmp}/bad.json"], "is not V4's"),
        (["logits", "{tiny}", "--ids", "1", "--out", "{tmp}/x.npz"], "holds no *.safetensors"),
        (["logits", "{tiny}", "--ids", "1,2048", "--out", "{tmp}/x.npz"], "ids go from 0 to 2047"),
        (["draft", "{folder}", "--ids", ""], "a prompt needs at least one id"),
        (["draft", "{folder}", "--ids", "1,256"], "ids go from 0 to 255; found [256]"),
        (["draft", "{folder}", "--ids", "1,2", "--chunks", "1"], "chunks [1] do not add up to"),
        (["draft", "{folder}", "--ids", "1,2", "--keep", "0"], "keep is at least 1, not 0"),
        (["draft", "{folder}", "--ids", "1", "--images", "1"], "image positions go from 0 to 0"),
    ],
)
def test_mistakes_are_one_clear_line(
    folder: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "empty.json").write_text("{}")
    places = {"tmp": tmp_path, "folder": folder, "tiny": TINY}
    with pytest.raises(SystemExit) as caught:
        main([argument.format(**places) for argument in arguments])
    assert message in str(caught.value.code)
    assert "\n" not in str(caught.value.code)


def test_ids_that_are_no_numbers_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["draft", str(TINY), "--ids", "1,two"])
    assert "'1,two' is not a list of numbers, as 1,2,3" in capsys.readouterr().err


# ------------------------------------------------------------------ against the reference


@pytest.mark.parametrize(
    "options",
    [
        "--chunks 7,1,20,13",
        "--keep 7 --chunks 30,3,8 --truncation mask --images 3,4,5,9,36",
        "--keep 18 --cut-window full --images 8,9,10,24 --chunks 10,31",
        "--activations fp8 --wo-a fp8",
    ],
)
def test_logits_and_drafts_are_those_of_the_reference(
    folder: Path, tmp_path: Path, options: str
) -> None:
    arguments = ["draft", str(folder), "--ids", IDS, *options.split()]
    main([*arguments, "--out", str(tmp_path / "ours.npz")])
    oracle("v41_oracle").main([*arguments, "--out", str(tmp_path / "theirs.npz")])
    ours, theirs = saved(tmp_path / "ours.npz"), saved(tmp_path / "theirs.npz")
    assert ours.keys() == theirs.keys()
    for name in ("ids", "positions", "anchor", "draft_tokens"):
        assert np.array_equal(ours[name], theirs[name]), name
    difference = {name: np.abs(ours[name] - theirs[name]) for name in ours}
    if "fp8" in options:  # values near a rounding boundary go either way, all over the model
        assert difference["logits"].mean() < 0.2  # between fp8 and exact it is 0.6
        return
    assert np.median(difference["logits"]) < 1e-5
    for name in ("logits", "draft_logits", "draft_confidence"):
        assert difference[name].max() < 0.05, name  # now and then a cached value goes either way
