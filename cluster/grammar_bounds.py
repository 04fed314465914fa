"""How large a grammar may be, judged from its text alone. Pure; it compiles nothing.

llguidance counts its own work and gives up by itself, but some short texts make it work for
seconds between two counts: those are refused here, by numbers that are the same everywhere and
do not depend on what came before. docs/structured-output.md lists them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from cluster.errors import BadRequest
from cluster.request import Grammar

LONGEST = {"regex": 8192, "json_schema": 1 << 17, "ebnf": 1 << 16}  # characters
LONGEST_LITERAL = 8192  # characters of one string in a schema: each has a state of its own
DEEPEST = 64  # lists and objects of a schema in each other
MOST_PROPERTIES = 1000  # of one object; a set of alternatives is kept for each
LARGEST_MULTIPLE = 10_000  # digits of multipleOf as a whole number: so many remainders
MOST_REPEATED = 1_000_000  # of one {n,m}
MOST_NESTED = 5_000  # of {n,m} within {n,m}: the product; 10**5 takes seconds for one mask

_PATTERNS = ("pattern", "whitespace_pattern")  # keys of a schema whose values are expressions
# {n}, {n,}, {,m}, {n,m} of expressions, and ~ n..m of rules
_COUNT = re.compile(r"\{\s*(\d*)\s*(?:,\s*(\d*)\s*)?\}|~\s*(\d+)(?:\s*\.\.\s*(\d+))?")
_EMBEDDED = re.compile(r"(?<![\w\"'/\\])%json\b")


def check_bounds(grammar: Grammar) -> None:
    """BadRequest that names the bound for what is too large to be compiled."""
    longest = LONGEST[grammar.kind]
    if len(grammar.text) > longest:
        raise _refusal(f"{len(grammar.text)} characters; a {grammar.kind} may have {longest}")
    if grammar.kind == "json_schema":
        for key, value in _members(_parsed(grammar.text), depth=0):
            _check_member(key, value)
        return
    if grammar.kind == "ebnf" and _EMBEDDED.search(grammar.text):
        raise _refusal("rules cannot have a schema in them (%json): these bounds do not reach it")
    _check_repetition(grammar.text)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _refusal(f"not JSON: {error}") from error


def _members(value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    """Every (key, value) of a schema at any depth; elements of lists have the key ''."""
    if depth > DEEPEST:
        raise _refusal(f"nested deeper than {DEEPEST}")
    if isinstance(value, dict):
        pairs = list(value.items())
    elif isinstance(value, list):
        pairs = [("", one) for one in value]
    else:
        return
    for key, one in pairs:
        yield key, one
        yield from _members(one, depth + 1)


def _check_member(key: str, value: Any) -> None:
    if len(key) > LONGEST_LITERAL or (isinstance(value, str) and len(value) > LONGEST_LITERAL):
        raise _refusal(f"a string of it has more than {LONGEST_LITERAL} characters")
    if key in _PATTERNS and isinstance(value, str):
        _check_repetition(value)
    if not isinstance(value, dict):
        if key == "multipleOf" and isinstance(value, int | float):
            _check_multiple(value)
        return
    if key == "properties" and len(value) > MOST_PROPERTIES:
        raise _refusal(f"{len(value)} properties of one object; at most {MOST_PROPERTIES}")
    if key == "patternProperties":
        for pattern in value:
            _check_repetition(pattern)


def _check_multiple(value: float) -> None:
    digits = Decimal(repr(value)).as_tuple().digits
    if int("".join(map(str, digits))) > LARGEST_MULTIPLE:
        raise _refusal(f"multipleOf {value}: at most {LARGEST_MULTIPLE} in its digits")


def _check_repetition(text: str) -> None:
    """Of an expression, or of rules whose groups are written alike."""
    within = [1]  # the largest product in each group that is open
    last = 1  # of the item just read, which a {n,m} would repeat
    position = 0
    while position < len(text):
        character = text[position]
        count = _COUNT.match(text, position) if character in "{~" else None
        if count and (numbers := [one for one in count.groups() if one]):
            times = max(int(one[:9]) for one in numbers)
            nested = last > 1 and times > 1
            last *= max(1, times)
            if times > MOST_REPEATED or (nested and last > MOST_NESTED):
                limit = MOST_NESTED if nested else MOST_REPEATED
                raise _refusal(f"repeats something up to {last} times; at most {limit}")
            within[-1] = max(within[-1], last)
            position = count.end()
            continue
        if character == "(":
            within.append(1)
        elif character == ")" and len(within) > 1:
            last = within.pop()
            within[-1] = max(within[-1], last)
        elif character not in "?*+ ":  # which make no number larger and may stand before a count
            last = 1
        position += 2 if character == "\\" else 1


def _refusal(why: str) -> BadRequest:
    return BadRequest(f"grammar: {why}")
