"""Samples to token ids, in the official chat encoding (the deepseek-recipe library).

The prompt is what the library makes of a request; the answer is spelled here, because the library
encodes prompts only. A test compares both with a whole conversation that the library encoded.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepseek_recipe as recipe

from examples.mini.tasks.sample import Answer, Sample
from model.tokenizer import IMAGE, Tokenizer

THINK_END, DSML = "</think>", "\uff5cDSML\uff5c"
_MODEL = "tandem-mini"


@dataclass(frozen=True)
class Encoded:
    prompt: list[int]
    answer: list[int]  # with the end-of-sentence token


_SPECIAL = recipe.SpecialTokens(image=IMAGE)
_OPTIONS = (
    recipe.ConversionOptions()
    .with_special_tokens(_SPECIAL)
    .with_model_alias(_MODEL, recipe.ModelVersion.DeepseekV41Flash)
)
_ENCODING = recipe.DeepseekV41Encoding().with_special_tokens(_SPECIAL)


def prompt_text(sample: Sample) -> str:
    """The prompt as text, with special tokens spelled out."""
    request = recipe.ChatCompletionRequest(chat_body(sample)).convert(_OPTIONS)
    text: str = _ENCODING.render_conversation(request.conversation).prompt
    return text


class ChatEncoder:
    def __init__(self, folder: str | Path) -> None:
        """`folder` holds a tokenizer.json with V4.1's special tokens."""
        self.tokenizer = Tokenizer.load(folder)
        backend = recipe.Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
        self._encoding = _ENCODING.with_tokenizer(backend)
        self._think_end = self.tokenizer.special_ids[THINK_END]
        self._dsml = self.tokenizer.special_ids[DSML]

    def encode(self, sample: Sample) -> Encoded:
        return Encoded(self.prompt_ids(sample), self.answer_ids(sample.answer, sample.thinking))

    def prompt_ids(self, sample: Sample) -> list[int]:
        request = recipe.ChatCompletionRequest(chat_body(sample)).convert(_OPTIONS)
        ids: list[int] = self._encoding.encode(request.conversation)
        return ids

    def answer_ids(self, answer: Answer, thinking: bool) -> list[int]:
        """The prompt has opened the reasoning, or has ended it already."""
        ids: list[int] = []
        if thinking:
            ids += [*self.tokenizer.encode(answer.reasoning), self._think_end]
        for number, part in enumerate(answer_text(answer).split(DSML)):
            if number:
                ids.append(self._dsml)
            ids += self.tokenizer.encode(part)
        return [*ids, self.tokenizer.eos_token_id]


def chat_body(sample: Sample) -> dict[str, Any]:
    """The request as POST /v1/chat/completions takes it."""
    body: dict[str, Any] = {
        "model": _MODEL,
        "messages": list(sample.messages),
        "thinking": {"type": "enabled" if sample.thinking else "disabled"},
    }
    if sample.tools:
        body["tools"] = list(sample.tools)
    if sample.schema:
        schema = {"name": "answer", "schema": sample.schema}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    return body


def answer_text(answer: Answer) -> str:
    """What is said after the reasoning; calls in DSML."""
    if not answer.calls:
        return answer.content
    lines = [f"<{DSML} calls>"]
    for call in answer.calls:
        lines.append(f'<{DSML} invoke name="{call.name}">')
        lines += [
            f'<{DSML} parameter name="{name}" string="true">{value}</{DSML} parameter>'
            for name, value in call.arguments.items()
        ]
        lines.append(f"</{DSML} invoke>")
    lines.append(f"</{DSML} calls>")
    return answer.content + "\n\n" + "\n".join(lines)
