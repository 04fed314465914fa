"""Is an answer right? Pure: token ids of an answer and its sample in, a verdict out."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from examples.mini.chat import DSML, THINK_END, answer_text
from examples.mini.tasks.sample import Call, Sample

_BLOCK = re.compile(rf"<{DSML} calls>\n(.*)\n</{DSML} calls>", re.DOTALL)
_INVOKE = re.compile(rf'<{DSML} invoke name="([^"]+)">\n(.*?)\n?</{DSML} invoke>', re.DOTALL)
_PARAMETER = re.compile(
    rf'<{DSML} parameter name="([^"]+)" string="true">(.*?)</{DSML} parameter>', re.DOTALL
)


@dataclass(frozen=True)
class Verdict:
    """`valid`: of the form that was asked for; `right`: and with the right content."""

    valid: bool
    right: bool


def grade(sample: Sample, text: str) -> Verdict:
    """`text` is the whole answer, special tokens spelled out, without its end of sentence."""
    if sample.thinking:
        _, end, text = text.partition(THINK_END)
        if not end:
            return Verdict(False, False)
    if sample.answer.calls:
        return _grade_calls(sample, text)
    if sample.schema is not None:
        return _grade_json(sample, text)
    if sample.expected:
        found = sample.expected in re.split(r"[\s.,]+", text)
        return Verdict(found, found)
    right = text.strip() == answer_text(sample.answer).strip()
    return Verdict(right, right)


def parse_calls(text: str) -> list[Call] | None:
    """The calls of an answer, or None if there is no well-formed block that ends it."""
    block = _BLOCK.search(text)
    if block is None or text[block.end() :].strip():
        return None
    calls = []
    rest = block[1]
    for found in _INVOKE.finditer(block[1]):
        calls.append(Call(found[1], dict(_PARAMETER.findall(found[2]))))
        rest = rest.replace(found[0], "", 1)
    return calls if calls and not rest.strip() else None


def _grade_calls(sample: Sample, text: str) -> Verdict:
    calls = parse_calls(text)
    if calls is None:
        return Verdict(False, False)
    declared = {tool["function"]["name"]: tool["function"]["parameters"] for tool in sample.tools}
    valid = all(
        call.name in declared
        and set(declared[call.name]["required"]) <= set(call.arguments)
        and set(call.arguments) <= set(declared[call.name]["properties"])
        for call in calls
    )
    expected = [(call.name, dict(call.arguments)) for call in sample.answer.calls]
    return Verdict(valid, valid and [(c.name, dict(c.arguments)) for c in calls] == expected)


def _grade_json(sample: Sample, text: str) -> Verdict:
    try:
        value = json.loads(text)
    except ValueError:
        return Verdict(False, False)
    assert sample.schema is not None
    valid = fits(value, sample.schema)
    return Verdict(valid, valid and value == json.loads(sample.answer.content))


_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
}


def fits(value: Any, schema: Mapping[str, Any]) -> bool:
    """JSON Schema, as far as the tasks use it; a property that was not asked for does not fit."""
    kind: str = schema["type"]
    if not isinstance(value, _TYPES[kind]) or (kind != "boolean" and isinstance(value, bool)):
        return False
    if "enum" in schema and value not in schema["enum"]:
        return False
    if isinstance(value, list):
        return all(fits(item, schema["items"]) for item in value)
    if isinstance(value, dict):
        known: Mapping[str, Any] = schema["properties"]
        required: Sequence[str] = schema["required"]
        return set(required) <= set(value) <= set(known) and all(
            fits(item, known[name]) for name, item in value.items()
        )
    return True
