"""Structured output through one engine: an expression, a schema, a grammar, each checked by
something that had no part in making the answer.

Used by offline_inference.py --check_structured_output.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

from offline import LLM, SamplingParams

MAX_TOKENS = 256
_CALL = re.compile(r"(read|edit)\([0-9]{1,3}(, [0-9]{1,3})*\)")
_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["read_file", "edit_file"]},
        "line": {"type": "integer", "minimum": 1, "maximum": 9999},
        "dry_run": {"type": "boolean"},
    },
    "required": ["name", "line", "dry_run"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_pattern": " ?"},
}
_EBNF = """
root ::= verb "(" number (", " number){0,3} ")"
verb ::= "read" | "edit"
number ::= [0-9]{1,3}
"""


@dataclass(frozen=True)
class Check:
    name: str
    schema_type: str
    schema: str
    holds: Callable[[str], bool]


def _is_edit(text: str) -> bool:
    said = json.loads(text)
    return (
        set(said) == {"name", "line", "dry_run"}
        and said["name"] in ("read_file", "edit_file")
        and type(said["line"]) is int
        and 1 <= said["line"] <= 9999
        and type(said["dry_run"]) is bool
    )


def _is_date(text: str) -> bool:
    return re.fullmatch(r"20[0-9]{2}-[01][0-9]", text) is not None


def _is_call(text: str) -> bool:
    return _CALL.fullmatch(text) is not None


CHECKS = (
    Check("regex", "regex", "20[0-9]{2}-[01][0-9]", _is_date),
    Check("JSON schema", "json", json.dumps(_SCHEMA), _is_edit),
    Check("EBNF", "ebnf", _EBNF, _is_call),
)


def check_structured_output(llm: LLM, *, temperature: float) -> bool:
    """Prints a line for each check; whether all of them hold."""
    params = [
        SamplingParams(
            temperature=temperature,
            max_tokens=MAX_TOKENS,
            seq_seed=number,
            so_args={"schema_type": check.schema_type, "schema": check.schema},
        )
        for number, check in enumerate(CHECKS)
    ]
    texts = llm.generate(["The answer is: "] * len(CHECKS), params, use_tqdm=False)
    found = []
    for check, text in zip(CHECKS, texts, strict=True):
        assert isinstance(text, str)
        found.append(_holds(check, text))
        print(f"structured output, {check.name}: {'ok' if found[-1] else 'WRONG'}  {text!r}")
    return all(found)


def _holds(check: Check, text: str) -> bool:
    try:
        return check.holds(text)
    except ValueError:
        return False
