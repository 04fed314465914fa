"""The answer that training spells is what the official library makes of a whole conversation."""

from __future__ import annotations

import json
from dataclasses import replace
from random import Random
from typing import Any

import pytest

recipe = pytest.importorskip("deepseek_recipe")

from examples.mini.chat import ChatEncoder, answer_text, chat_body, prompt_text  # noqa: E402
from examples.mini.corpus import FOLDER  # noqa: E402
from examples.mini.demo_prompts import prompts  # noqa: E402
from examples.mini.tasks.agent import agent  # noqa: E402
from examples.mini.tasks.conversation import conversation  # noqa: E402
from examples.mini.tasks.sample import Message, Sample, user  # noqa: E402


@pytest.fixture(scope="module")
def encoder() -> ChatEncoder:
    return ChatEncoder(FOLDER)


def _answered(sample: Sample) -> dict[str, Any]:
    """The assistant message of the answer, as a client would send it back."""
    answer = sample.answer
    calls = [
        {
            "id": f"call_{number}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments))},
        }
        for number, call in enumerate(answer.calls)
    ]
    message: dict[str, Any] = {"role": "assistant", "content": answer.content}
    if sample.thinking:
        message["reasoning_content"] = answer.reasoning
    return message | ({"tool_calls": calls} if calls else {})


@pytest.mark.parametrize("seed", range(12))
def test_an_answered_agent_turn_reads_like_the_librarys_history(
    encoder: ChatEncoder, seed: int
) -> None:
    sample = agent(Random(seed))
    encoded = encoder.encode(sample)
    results: list[Message] = [
        {"role": "tool", "tool_call_id": f"call_{number}", "content": "ok"}
        for number in range(len(sample.answer.calls))
    ]
    after = [*sample.messages, _answered(sample), *(results or [user("go on")])]
    whole = encoder.prompt_ids(replace(sample, messages=after))
    said = encoded.prompt + encoded.answer
    assert whole[: len(said)] == said


def test_text_that_looks_like_a_special_token_stays_text(encoder: ChatEncoder) -> None:
    sample = conversation(Random(0))
    plain = replace(sample, messages=[user("x")])
    typed = replace(sample, messages=[user("x</think>")])
    end = encoder.tokenizer.special_ids["</think>"]
    assert encoder.prompt_ids(typed).count(end) == encoder.prompt_ids(plain).count(end)


def test_the_request_is_one_that_a_server_would_take(encoder: ChatEncoder) -> None:
    body = chat_body(agent(Random(3)))
    assert {"messages", "thinking", "tools"} <= body.keys()
    assert "edit_file" in prompt_text(agent(Random(3)))


def test_calls_follow_the_text_after_a_blank_line() -> None:
    sample = next(s for s in map(agent, map(Random, range(9))) if s.answer.calls)
    assert answer_text(sample.answer).startswith("\n\n<")


def test_the_demo_sends_what_its_prompts_say_now(encoder: ChatEncoder) -> None:
    shipped = json.loads((FOLDER / "demo.json").read_text(encoding="utf-8"))
    assert [one["prompt"] for one in shipped] == [
        encoder.prompt_ids(sample) for _, sample in prompts()
    ]
