"""Answers as models really write them: found, and judged."""

from __future__ import annotations

import pytest

from eval.extraction import extract, is_right
from eval.question import Kind

TRICKY: list[tuple[Kind, str, str | None]] = [
    ("integer", r"so \boxed{42}", "42"),
    ("integer", r"\boxed{7} ... no, wait. \boxed{042}.", "42"),
    ("integer", r"\boxed{\text{ 113 }}", "113"),
    ("integer", r"\boxed{\mathbf{\text{113}}}", "113"),
    ("integer", r"\boxed{ 45^\circ }", "45"),
    ("integer", r"\boxed{m + n = 100 + 4 = 104}", "104"),
    ("integer", r"$\boxed{x^{2}}$ Answer: 5", "5"),  # the box holds no number
    ("integer", r"\boxed{\frac{1}{2}}, half of 90: 45", "45"),
    ("integer", r"\boxed{42", "42"),  # cut off: what stands at the end
    ("integer", "**Answer:** 073", "73"),
    ("integer", "**Answer**: $73$", "73"),
    ("integer", "The final answer is: 1,024 / 8 = 128.", "128"),
    ("integer", "Answer: 12\nChecking that answer: it is fine.", "12"),
    ("integer", "It is 8.5 hours, that is 510 minutes.", "510"),
    ("integer", "x^2 = 9 and so 3.0", "3"),
    ("integer", "<think>Answer: 1</think>Answer: 2", "2"),
    ("integer", "<think>Answer: 1", "1"),
    ("integer", "I do not know.", None),
    ("choice", "Answer: C", "C"),
    ("choice", "**Answer: (C)**", "C"),
    ("choice", "ANSWER: $C$", "C"),
    ("choice", "answer: c", "C"),
    ("choice", r"\boxed{\text{C}}", "C"),
    ("choice", r"\boxed{C) 10^{-4} eV}", "C"),
    ("choice", "The correct answer is **C**.", "C"),
    ("choice", "The correct option is C) 10^-4 eV", "C"),
    ("choice", "Answer: A? No. The answer must be weighed.\nAnswer: D", "D"),
    ("choice", "I weigh A and B.\n\n**B**", "B"),
    ("choice", "I weigh A and B.\n\n(B).\n\n", "B"),
    ("choice", "Answer: Because of A", None),
    ("choice", "A cat is no answer", None),
    ("exact", "Answer: Paris.", "paris"),
    ("exact", "Exact Answer:  The   Hague", "the hague"),
    ("exact", r"The exact answer is $\frac{3}{4}$", "3/4"),
    ("exact", r"\boxed{\left(\dfrac{1}{2}, 3\right)}", "(1/2, 3)"),
    ("exact", "Answer: 1,234,567", "1234567"),
    ("exact", "**Answer: `x = 2`**", "x = 2"),
    ("exact", "No idea", None),
]


@pytest.mark.parametrize(("kind", "text", "expected"), TRICKY)
def test_the_answer_is_found(kind: Kind, text: str, expected: str | None) -> None:
    assert extract(text, kind) == expected


@pytest.mark.parametrize(
    ("kind", "text", "answer", "expected"),
    [
        ("integer", "Answer: 041", "41", True),
        ("integer", "Answer: 41", "041", True),
        ("integer", "Answer: 410", "41", False),
        ("choice", "Answer: B", "B", True),
        ("choice", "Answer: B", "B. Neon", True),
        ("choice", "Answer: A", "B", False),
        ("exact", "Answer: 0.75", "3/4", True),
        ("exact", r"Answer: \frac{6}{8}", "3/4", True),
        ("exact", "Answer: PARIS", "Paris", True),
        ("exact", "Answer: Paris, France", "Paris", False),
        ("exact", "Answer: 1/0", "1/0", True),
        ("exact", "nothing", "nothing", False),
    ],
)
def test_the_answer_is_judged(kind: Kind, text: str, answer: str, expected: bool) -> None:
    assert is_right(extract(text, kind), answer, kind) is expected
