r"""Which patterns of a schema must not meet escapes.

llguidance (1.9) lets \" and \\ into a string for any class of characters that has the control
characters, also if the class leaves out the quote or the backslash themselves: [^"] among them.
Where a schema has such a class, none of its strings may have these two. Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

_SETS = ("[", "&&", "--", "~~", "||")  # Python's expressions have no operations on classes
_PROPERTY = re.compile(r"\\p(?:\{[^}]*\}|.)")
_NO_PROPERTY = re.compile(r"\\P(?:\{[^}]*\}|.)")


def leaves_out_escaped(schema: str) -> bool:
    """Whether a pattern of this schema (JSON text) leaves out what JSON escapes."""
    return any(
        _leaves_out(one) for pattern in _patterns(json.loads(schema)) for one in classes(pattern)
    )


def classes(regex: str) -> Iterator[str]:
    """Every outermost [...] of an expression, as it is written."""
    starts: list[int] = []  # of those that are open
    place = 0
    while place < len(regex):
        piece = regex[place]
        if piece == "[":
            starts.append(place)
        elif piece == "]" and starts and not _is_first(regex, starts[-1], place):
            start = starts.pop()
            if not starts:
                yield regex[start : place + 1]
        place += 2 if piece == "\\" else 1


def _is_first(regex: str, start: int, place: int) -> bool:
    """A ] that opens its class is just itself."""
    return place == start + 1 + regex.startswith("^", start + 1)


def _patterns(tree: Any) -> Iterator[str]:
    if isinstance(tree, list):
        for one in tree:
            yield from _patterns(one)
    if isinstance(tree, dict):
        for key, value in tree.items():
            if key == "pattern" and isinstance(value, str):
                yield value
            if key == "patternProperties" and isinstance(value, dict):
                yield from value
            yield from _patterns(value)


def _leaves_out(one: str) -> bool:
    """True too for a class that cannot be judged."""
    if any(operation in one[1:] for operation in _SETS):
        return True
    judged = _NO_PROPERTY.sub(r"\\x00-\\x7f", _PROPERTY.sub("a", one))
    try:
        has = re.compile(re.sub(r"\\x\{([0-9a-fA-F]{1,4})\}", _short, judged))
    except re.error:
        return True
    return bool(has.match("\0")) and not (has.match('"') and has.match("\\"))


def _short(escape: re.Match[str]) -> str:
    return rf"\u{int(escape[1], 16):04x}"
