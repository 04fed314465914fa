"""A model folder becomes a model: the same one from files and from a seed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from model.compressed_vocab import compress_vocabulary
from model.dense_cache import DenseCache
from model.load import load_model, token_map
from model.prompt import run_prompt
from model.spec import ModelSpec
from model.state import state_fields
from model.tokenizer import Tokenizer
from model.transformer import Transformer
from model.weights import write_checkpoint
from tests.model.cases import TINY, micro_config

PROMPT = [3, 200, 7, 9, 9, 120, 31]


def logits(model: Transformer) -> torch.Tensor:
    return run_prompt(model, DenseCache(state_fields(model.spec), 1), PROMPT)


def folder_with(path: Path, raw: dict[str, object]) -> ModelSpec:
    (path / "config.json").write_text(json.dumps(raw))
    return ModelSpec.load(path)


def tiny_with_compressed_ids(path: Path, compressed: int) -> ModelSpec:
    raw = json.loads(TINY.read_text(encoding="utf-8"))
    raw["text_config"]["engram_compressed_vocab_size"] = compressed
    shutil.copyfile(TINY.with_name("tokenizer.json"), path / "tokenizer.json")
    return folder_with(path, raw)


def test_files_and_their_seed_give_the_same_model(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, ModelSpec.from_dict(micro_config()), seed=6)
    from_files = logits(load_model(tmp_path, weights="checkpoint"))
    from_seed = logits(load_model(tmp_path, weights="random", seed=6))
    assert torch.equal(from_files, from_seed)
    assert not torch.equal(from_seed, logits(load_model(tmp_path, weights="random", seed=7)))


def test_progress_is_heard_of_to_the_last_tensor(tmp_path: Path) -> None:
    folder_with(tmp_path, micro_config())
    heard: list[tuple[int, int, str]] = []
    load_model(tmp_path, weights="random", progress=lambda *step: heard.append(step))
    done, total, _ = heard[-1]
    assert [step[0] for step in heard] == list(range(1, done + 1))
    assert total - done == 2  # the two tables, which are read by rows


def test_an_uncompressed_vocabulary_needs_no_tokenizer(tmp_path: Path) -> None:
    assert token_map(tmp_path, folder_with(tmp_path, micro_config())) is None


def test_a_compressed_vocabulary_follows_from_the_tokenizer(tmp_path: Path) -> None:
    expected = compress_vocabulary(Tokenizer.load(TINY.parent))
    spec = tiny_with_compressed_ids(tmp_path, int(expected.max()) + 1)
    assert 1000 < spec.engram_compressed_vocab_size < 2048
    found = token_map(tmp_path, spec)
    assert found is not None
    assert torch.equal(found, expected)
    assert int(found[2]) == 2


def test_another_tokenizer_than_the_models_is_refused(tmp_path: Path) -> None:
    spec = tiny_with_compressed_ids(tmp_path, 1000)
    with pytest.raises(ValueError, match=r"2048 ids, \d+ when compressed; config\.json says 2048"):
        token_map(tmp_path, spec)
