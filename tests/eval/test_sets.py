"""The sets' files, in the formats in which they are published."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from eval.rows import BadFile
from eval.sets import SETS, read_questions
from tests.tiny import ROOT

SAMPLES = ROOT / "eval" / "samples"


def test_aime_has_integers() -> None:
    asked = read_questions(SETS["aime"], SAMPLES / "aime.jsonl")
    assert [question.answer for question in asked.questions] == ["14", "576", "41", "30"]
    assert {question.kind for question in asked.questions} == {"integer"}
    assert "divisible by 7" in asked.questions[0].prompt


def test_aime_may_have_other_names_and_no_ids(tmp_path: Path) -> None:
    path = tmp_path / "aime.csv"
    path.write_text("Question,ANSWER\nHow many?,7.0\nAnd now?,8\n")
    asked = read_questions(SETS["aime"], path)
    assert [(question.id, question.answer) for question in asked.questions] == [
        ("0", "7"),
        ("1", "8"),
    ]


def test_gpqa_has_its_choices_in_an_order_of_the_seed() -> None:
    path = SAMPLES / "gpqa.csv"
    first, again = (read_questions(SETS["gpqa"], path).questions for _ in range(2))
    assert first == again
    assert [question.id for question in first] == ["sample-1", "sample-2", "sample-3"]
    letters = Counter[str]()
    for seed in range(200):
        (question, *_) = read_questions(SETS["gpqa"], path, seed=seed).questions
        assert f"{question.answer}) Nitrogen" in question.prompt
        assert all(f"\n{letter}) " in question.prompt for letter in "ABCD")
        letters[question.answer] += 1
    assert min(letters[letter] for letter in "ABCD") > 25


def test_hle_leaves_out_what_needs_an_image() -> None:
    asked = read_questions(SETS["hle"], SAMPLES / "hle.jsonl")
    assert asked.left_out == 1
    assert [(one.kind, one.answer) for one in asked.questions] == [
        ("exact", "23"),
        ("choice", "B"),
        ("exact", "3/4"),
    ]


@pytest.mark.parametrize("name", sorted(SETS))
def test_a_missing_file_says_where_to_put_it_and_its_fields(name: str, tmp_path: Path) -> None:
    for path in (None, tmp_path / "absent.jsonl"):
        with pytest.raises(BadFile, match="put the file of") as refused:
            read_questions(SETS[name], path)
        for names in SETS[name].fields.values():
            assert names[0] in str(refused.value)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ('{"problem": "p"}', "no answer"),
        ('{"problem": "", "answer": "1"}', "no problem"),
        ('{"problem": "p", "answer": "1000"}', "0 to 999"),
        ('{"problem": "p", "answer": "x"}', "0 to 999"),
        ("[1]", "line 1 is not an object"),
        ("{", "Expecting"),
        ("", "no question"),
        ('{"id": 1, "problem": "p", "answer": 1}\n' * 2, "there twice"),
    ],
)
def test_a_wrong_file_is_refused_with_a_reason(content: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "aime.jsonl"
    path.write_text(content)
    with pytest.raises(BadFile, match=why):
        read_questions(SETS["aime"], path)


def test_the_ending_says_what_the_file_is(tmp_path: Path) -> None:
    rows = [{"problem": "p", "answer": 5}]
    listed, other = tmp_path / "a.json", tmp_path / "a.txt"
    listed.write_text(json.dumps(rows))
    other.write_text(json.dumps(rows))
    assert len(read_questions(SETS["aime"], listed).questions) == 1
    with pytest.raises(BadFile, match=r"\.txt: must be"):
        read_questions(SETS["aime"], other)
