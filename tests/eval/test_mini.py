"""Grading of answers, and what a text costs without a model."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

pytest.importorskip("deepseek_recipe")

from eval.mini.__main__ import Score
from eval.mini.baselines import gzip_bits, ngram_bits
from eval.mini.grading import fits, grade, parse_calls
from eval.mini.tasks import samples, tasks
from examples.mini.chat import answer_text
from examples.mini.tasks.agent import agent
from examples.mini.tasks.retrieval import prose, retrieval
from examples.mini.tasks.sample import Sample
from examples.mini.tasks.schema import schema


def _said(sample: Sample) -> str:
    reasoning = f"{sample.answer.reasoning}</think>" if sample.thinking else ""
    return reasoning + answer_text(sample.answer)


def _calling() -> Sample:
    return next(s for s in map(agent, map(Random, range(20))) if s.answer.calls)


@pytest.mark.parametrize("name", ["conversation", "functions", "schema", "agent"])
def test_the_right_answer_of_every_task_is_right(name: str) -> None:
    for sample in samples(tasks()[name], name, 20):
        verdict = grade(sample, _said(sample))
        assert verdict.valid, _said(sample)
        assert verdict.right, _said(sample)


def test_a_call_with_another_argument_is_valid_but_wrong() -> None:
    sample = _calling()
    value = next(iter(sample.answer.calls[0].arguments.values()))
    verdict = grade(sample, _said(sample).replace(f">{value}<", ">something else<"))
    assert verdict.valid
    assert not verdict.right


def test_a_call_that_breaks_off_is_not_valid() -> None:
    sample = _calling()
    assert parse_calls(answer_text(sample.answer)) is not None
    assert parse_calls(answer_text(sample.answer)[:-8]) is None
    assert not grade(sample, _said(sample)[:-8]).valid


def test_a_tool_that_nobody_declared_is_not_valid() -> None:
    sample = _calling()
    name = sample.answer.calls[0].name
    said = _said(sample).replace(f'invoke name="{name}"', 'invoke name="format_disk"')
    assert not grade(sample, said).valid


def test_thinking_that_never_ends_is_no_answer() -> None:
    sample = replace(_calling(), thinking=True)
    assert not grade(sample, answer_text(sample.answer)).valid


def test_a_fact_must_stand_as_a_word_of_its_own() -> None:
    sample = replace(retrieval(Random(1), prose, 200), thinking=False, expected="17")
    assert grade(sample, "The value is 17.").right
    assert not grade(sample, "The value is 178.").right


def test_json_is_held_to_its_schema() -> None:
    wanted = {
        "type": "object",
        "properties": {"age": {"type": "integer"}, "tags": {"type": "array"}},
        "required": ["age"],
    }
    assert fits({"age": 3}, wanted)
    assert not fits({"age": True}, wanted)
    assert not fits({"age": "3"}, wanted)
    assert not fits({}, wanted)
    assert not fits({"age": 3, "more": 1}, wanted)
    sample = replace(schema(Random(0)), thinking=False)
    assert not grade(sample, "not json").valid


def test_a_missed_bar_is_bold() -> None:
    assert "**97.0** (bar 98)" in Score("retrieval 1024", 100, 97.0, 97.0, 1.0).line()
    assert "**" not in Score("conversation", 100, 10.0, 10.0, 1.0).line()


def test_baselines_know_a_text_they_have_seen() -> None:
    text = b"the quick brown fox jumps over the lazy dog. " * 20
    other = Random(0).randbytes(900)
    assert ngram_bits(text, text) < 0.5
    assert ngram_bits(text, other) > 7.5
    assert gzip_bits(text) < 1 < gzip_bits(other)
