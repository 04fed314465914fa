"""Text to ids and back, whole and in pieces, against the tokenizers library itself."""

from __future__ import annotations

import json

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from cluster.api.detokenizer import Detokenizer
from cluster.api.text import Tokenizer, load_tokenizer
from cluster.errors import StartupError
from tests.cluster.fake_engine import MODEL, TOKENIZER

LIBRARY = tokenizers.Tokenizer.from_file(str(MODEL / "tokenizer.json"))
ADDED = LIBRARY.get_added_tokens_decoder()
VOCAB = LIBRARY.get_vocab_size()
ODD = "\U0001fae0\u9f9c\u00e9\U0001f1e9\U0001f1ea"  # 1 to 4 bytes, and a flag of two characters


def pieces(token_ids: list[int]) -> list[str]:
    text = Detokenizer(TOKENIZER)
    return [*(text.feed([token_id]) for token_id in token_ids), text.finish()]


@given(st.text())
def test_text_comes_back_whole_and_in_pieces(text: str) -> None:
    text = text.encode(errors="replace").decode()
    token_ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(token_ids) == text
    assert "".join(pieces(token_ids)) == text


@given(st.lists(st.integers(0, VOCAB - 1)))
def test_any_ids_decode_as_the_library_decodes_them(token_ids: list[int]) -> None:
    plain = [token_id for token_id in token_ids if token_id not in ADDED]
    assert TOKENIZER.decode(plain) == LIBRARY.decode(plain)
    assert "".join(pieces(token_ids)) == TOKENIZER.decode(token_ids)


def test_no_piece_ends_inside_a_character() -> None:
    shown = pieces(TOKENIZER.encode(ODD))
    assert "".join(shown) == ODD
    assert not any("\ufffd" in piece for piece in shown)
    assert "" in shown  # some tokens only begin a character


def test_a_cut_inside_a_character_shows_one_replacement() -> None:
    cut = TOKENIZER.encode("a\U0001fae0")[:-1]
    assert "".join(pieces(cut)) == TOKENIZER.decode(cut) == "a\ufffd"


def test_special_spellings_typed_by_a_user_stay_text() -> None:
    for token_id, token in ADDED.items():
        assert token_id in LIBRARY.encode(token.content).ids
        token_ids = TOKENIZER.encode(token.content)
        assert not set(token_ids) & set(ADDED)
        assert TOKENIZER.decode(token_ids) == token.content


def test_special_tokens_are_not_shown_and_other_added_ones_are() -> None:
    special = next(number for number, token in ADDED.items() if token.special)
    shown = next(number for number, token in ADDED.items() if not token.special)
    assert TOKENIZER.decode([special, shown]) == ADDED[shown].content


def test_padded_ids_above_the_tokenizer_are_known_and_silent() -> None:
    tree = json.loads((MODEL / "tokenizer.json").read_text())
    padded = Tokenizer(tree, vocab_size=VOCAB + 7)
    assert padded.decode([VOCAB + 6]) == ""


def test_another_kind_of_tokenizer_is_refused() -> None:
    with pytest.raises(StartupError, match="ByteLevel"):
        Tokenizer({"decoder": {"type": "Metaspace"}}, 10)
    with pytest.raises(StartupError, match=r"tokenizer\.json"):
        load_tokenizer("no-such-folder")
