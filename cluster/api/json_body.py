"""JSON text to values, without ever holding the interpreter for long.

The parser in C is ten times as fast as the one in Python, but while it runs no other thread does,
the event loop's neither: 4 MiB of small lists take it half a second. So what would take it long is
read in Python, which lets others in every few milliseconds. Knows nothing of what the values mean.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from json.decoder import JSONArray, JSONObject  # type: ignore[attr-defined]  # typeshed has none
from json.scanner import py_make_scanner  # type: ignore[attr-defined]
from typing import Any

from cluster.errors import BadRequest

MOST_PARTS = 16384  # lists, objects and members; each is work for the garbage collector too
LONGEST_CALL_US = 20_000.0


def parse_json(raw: bytes) -> object:
    """BadRequest for what is no JSON (RFC 8259, so no NaN), or is long and has too many parts."""
    try:
        text = raw.decode()
        if _is_long(raw):
            return _Patient().decode(text)
        return json.loads(text, parse_constant=_not_json)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from error


def _is_long(raw: bytes) -> bool:
    """By what values, containers and keys took the parser in C; those in strings count too."""
    return (
        0.15 * raw.count(b",") + 0.5 * (raw.count(b"[") + raw.count(b"{")) + raw.count(b":")
        > LONGEST_CALL_US
    )


class _Patient(json.JSONDecoder):
    """The standard library's own parser in Python; only strings are read in C."""

    def __init__(self) -> None:
        super().__init__(parse_constant=_not_json)
        self._parts = 0
        self.parse_array = self._array
        self.parse_object = self._object
        self.scan_once = py_make_scanner(self)

    def _array(self, *state: Any) -> Any:
        self._count()
        return JSONArray(*state)

    def _object(self, start: Any, strict: bool, scan: Callable[..., Any], *hooks: Any) -> Any:
        def member(*state: Any) -> Any:
            self._count()
            return scan(*state)

        self._count()
        return JSONObject(start, strict, member, *hooks)

    def _count(self) -> None:
        self._parts += 1
        if self._parts > MOST_PARTS:
            raise ValueError(f"it has more than {MOST_PARTS} lists, objects and members of objects")


def _not_json(constant: str) -> None:
    raise ValueError(f"{constant} is not a JSON number")
