"""DeepInfer's `so_args`, read: what a request's answer must be like. Values only."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, Literal

from cluster.request import Grammar

_KINDS: Mapping[str, Literal["json_schema", "regex", "ebnf"]] = {
    "json": "json_schema",
    "regex": "regex",
    "ebnf": "ebnf",
}
_FREE_FIRST = ("trigger_token_ids", "bound_token_id")  # the grammar begins in mid-answer
_KEYS = ("schema_type", "schema", *_FREE_FIRST)


def grammar_of(so_args: Mapping[str, Any] | None) -> Grammar | None:
    """ValueError names the key that cannot be. Whether the schema compiles is found out later.

    A trigger would let the answer begin freely and hold only what follows it to the schema. Here
    a grammar holds from the first token on, so a trigger is refused rather than ignored.
    """
    if so_args is None:
        return None
    for key in so_args:
        if key not in _KEYS:
            near = get_close_matches(key, _KEYS, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(_KEYS)}"
            raise ValueError(f"so_args: {key!r} is no key of it{hint}")
    for key in _FREE_FIRST:
        if so_args.get(key):
            raise ValueError(
                f"so_args: {key!r} is not available: a schema holds from the first token on"
            )
    kind, text = so_args.get("schema_type"), so_args.get("schema")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ValueError(f"so_args: 'schema_type' is {kind!r}; it must be json, regex or ebnf")
    if not isinstance(text, str) or not text:
        raise ValueError("so_args: 'schema' must be a text that is not empty")
    return Grammar(kind=_KINDS[kind], text=text)
