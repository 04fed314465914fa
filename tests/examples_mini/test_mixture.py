"""Packed rows: documents apart, answers learned in full, prompts hardly."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

pytest.importorskip("deepseek_recipe")

from examples.mini.chat import ChatEncoder
from examples.mini.corpus import FOLDER, Corpus
from examples.mini.mixture import Packer, RowArrays, lengths, shares
from model.tokenizer import Tokenizer

LINES = "def f(x):\n    return x + 1\n" * 40


@pytest.fixture(scope="module")
def encoder() -> ChatEncoder:
    return ChatEncoder(FOLDER)


@pytest.fixture(scope="module")
def rows(encoder: ChatEncoder) -> RowArrays:
    corpus = Corpus.of([LINES, LINES], encoder.tokenizer)
    return Packer(encoder, corpus, Random(1)).rows(3, 2048, 0.5)


def test_documents_begin_at_even_positions_and_follow_one_another(rows: RowArrays) -> None:
    assert not (rows.starts % 2).any()
    assert (np.diff(rows.starts, axis=1) >= 0).all()
    begins = rows.starts == np.arange(rows.starts.shape[1])
    assert (begins.sum(1) > 3).all()


def test_the_last_token_of_a_document_predicts_nothing(rows: RowArrays) -> None:
    for row in range(len(rows.ids)):
        for begin in np.unique(rows.starts[row])[1:]:
            assert rows.weights[row, begin - 1] == 0


def test_what_counts_in_full_ends_with_the_end_of_sentence(
    rows: RowArrays, encoder: ChatEncoder
) -> None:
    eos, bos = encoder.tokenizer.eos_token_id, encoder.tokenizer.bos_token_id
    chats = 0
    for row in range(len(rows.ids)):
        for begin in np.unique(rows.starts[row]):
            mine = np.flatnonzero((rows.starts[row] == begin) & (rows.weights[row] == 1))
            if rows.ids[row, begin] != bos or not len(mine):
                continue
            assert rows.ids[row, mine[-1] + 1] == eos
            assert (np.diff(mine) == 1).all()
            chats += 1
    assert chats > 5


def test_clips_lie_within_their_document(rows: RowArrays) -> None:
    assert (rows.clips >= rows.starts).all()
    assert (rows.clips > rows.starts).any()


@pytest.mark.parametrize("place", [0.0, 0.2, 0.5, 0.9])
def test_shares_and_chances_add_up(place: float) -> None:
    chances = lengths(place)
    assert sum(chances.values()) == pytest.approx(1)
    for length in chances:
        assert sum(shares(place, length).values()) == pytest.approx(1)


def test_a_stored_corpus_comes_back(tmp_path: pytest.TempPathFactory, encoder: ChatEncoder) -> None:
    tokenizer: Tokenizer = encoder.tokenizer
    corpus = Corpus.of([LINES, "x = 1\n"], tokenizer)
    target = f"{tmp_path}/corpus.npz"
    corpus.save(target)
    again = Corpus.load(target)
    assert again.ids.tolist() == corpus.ids.tolist()
    assert list(again.lines) == list(corpus.lines)
    assert tokenizer.decode(again.ids[again.begins[1] :].tolist()) == "x = 1\n"
