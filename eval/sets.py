"""AIME, GPQA and HLE: the fields of each set's published file, and the prompt of a question.

Nothing is downloaded: the files are their owners', two of them are given out on a promise not to
spread them, and where one is missing the message says what to put there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.question import Question
from eval.rows import BadFile, Row, read_rows

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True)
class QuestionSet:
    """`make` turns a row into a question; None for one that cannot be asked as text."""

    name: str
    origin: str  # where its file comes from
    fields: Mapping[str, Sequence[str]]  # what is needed, and as what it may be named
    make: Callable[[Mapping[str, str], str, int], Question | None]
    identity: Sequence[str] = ("id", "Record ID")  # fields that may hold a row's id

    def wanted(self) -> str:
        """For people: what the file must have."""
        fields = ", ".join(" or ".join(map(repr, names)) for names in self.fields.values())
        return f"{self.origin}; as .jsonl, .csv, .json or .parquet with the fields {fields}"


@dataclass(frozen=True)
class Asked:
    questions: tuple[Question, ...]
    left_out: int  # that need an image


def read_questions(wanted: QuestionSet, path: Path | None, *, seed: int = 0) -> Asked:
    """BadFile for a missing or a wrong file; `seed` orders the choices of GPQA."""
    if path is None or not path.exists():
        where = f"{path} does not exist" if path else "--data is missing"
        raise BadFile(f"{where}: put the file of {wanted.name.upper()} there: {wanted.wanted()}")
    questions: list[Question] = []
    rows = read_rows(path)
    for number, row in enumerate(rows):
        values = _values(wanted, row, f"{path}, row {number + 1}")
        question = wanted.make(values, _identity(wanted, row, number), seed)
        if question is not None:
            questions.append(question)
    if not questions:
        raise BadFile(f"{path} has no question; it should be {wanted.wanted()}")
    twice = len(questions) - len({question.id for question in questions})
    if twice:
        raise BadFile(f"{path}: {twice} ids are there twice; answers could not be told apart")
    return Asked(tuple(questions), len(rows) - len(questions))


def _values(wanted: QuestionSet, row: Row, where: str) -> dict[str, str]:
    """By our name; BadFile if one is missing."""
    lower = {str(key).strip().lower(): value for key, value in row.items()}
    values = {}
    for field, names in wanted.fields.items():
        found = [_text(lower[name.lower()]) for name in names if name.lower() in lower]
        if field == "image":  # a set without images may lack the column
            values[field] = found[0] if found else ""
            continue
        if not found or not found[0]:
            raise BadFile(f"{where}: no {' or '.join(names)}; it should be {wanted.wanted()}")
        values[field] = found[0]
    return values


def _identity(wanted: QuestionSet, row: Row, number: int) -> str:
    lower = {str(key).strip().lower(): value for key, value in row.items()}
    found = (_text(lower[name.lower()]) for name in wanted.identity if name.lower() in lower)
    return next((identity for identity in found if identity), str(number))


def _text(value: Any) -> str:
    return "" if value is None else str(value).strip()


# ------------------------------------------------------------------ the three sets


def _aime(row: Mapping[str, str], identity: str, seed: int) -> Question:
    answer = row["answer"].removesuffix(".0")  # as a table of numbers may have it
    if not answer.isdecimal() or int(answer) > 999:
        raise BadFile(f"question {identity}: {answer!r} is not an integer from 0 to 999")
    prompt = (
        f"{row['problem']}\n\nThe answer is an integer from 0 to 999. Reason step by step, and end "
        "with one line that has only \\boxed{} with the answer in it."
    )
    return Question(identity, prompt, str(int(answer)), "integer")


def _gpqa(row: Mapping[str, str], identity: str, seed: int) -> Question:
    right = row["correct"]
    options = [right, row["wrong 1"], row["wrong 2"], row["wrong 3"]]
    options = sorted(
        options,
        key=lambda text: hashlib.sha256(f"{seed}:{identity}:{text}".encode()).digest(),
    )
    choices = "\n".join(f"{letter}) {text}" for letter, text in zip(LETTERS, options, strict=False))
    prompt = (
        f"{row['question']}\n\n{choices}\n\nReason step by step, and end with one line "
        "'Answer: X', where X is the letter of the right choice."
    )
    return Question(identity, prompt, LETTERS[options.index(right)], "choice")


def _hle(row: Mapping[str, str], identity: str, seed: int) -> Question | None:
    if row["image"]:
        return None
    choice = row["answer type"].lower() == "multiplechoice"
    what = "the letter of the right choice" if choice else "the exact answer and nothing else"
    prompt = (
        f"{row['question']}\n\nReason step by step, and end with one line 'Answer: ...', "
        f"which has {what}."
    )
    return Question(identity, prompt, row["answer"], "choice" if choice else "exact")


SETS: dict[str, QuestionSet] = {
    one.name: one
    for one in (
        QuestionSet(
            "aime",
            "the problems of one year, as the AIME data sets on Hugging Face have them",
            {"problem": ("problem", "question"), "answer": ("answer",)},
            _aime,
            ("id", "problem_idx"),
        ),
        QuestionSet(
            "gpqa",
            "gpqa_diamond.csv of the data set Idavidrein/gpqa on Hugging Face",
            {
                "question": ("Question",),
                "correct": ("Correct Answer",),
                "wrong 1": ("Incorrect Answer 1",),
                "wrong 2": ("Incorrect Answer 2",),
                "wrong 3": ("Incorrect Answer 3",),
            },
            _gpqa,
        ),
        QuestionSet(
            "hle",
            "the test split of the data set cais/hle on Hugging Face",
            {
                "question": ("question",),
                "answer": ("answer",),
                "answer type": ("answer_type",),
                "image": ("image",),
            },
            _hle,
        ),
    )
}
