"""Grammars by lot, and whether a text follows one by libraries that have no part in making it."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema

from cluster.request import Grammar

Schema = dict[str, Any]
WORDS = ("id", "name", "size", "kind", "on")


def random_grammar(seed: int) -> Grammar:
    """A schema or an expression, in turn; the same for the same seed."""
    choose = random.Random(seed)
    if seed % 2:
        return Grammar(kind="regex", text=_regex(choose, depth=2))
    schema = _schema(choose, depth=2)
    if choose.random() < 0.7:  # a random model writes much white space if it may
        schema["x-guidance"] = {"whitespace_pattern": " ?"}
    return Grammar(kind="json_schema", text=json.dumps(schema))


def follows(text: str, grammar: Grammar) -> bool:
    if grammar.kind == "regex":
        return re.fullmatch(grammar.text, text) is not None
    schema = json.loads(grammar.text)
    validator = jsonschema.Draft202012Validator(schema)
    return bool(validator.is_valid(json.loads(text)))


def _schema(choose: random.Random, depth: int) -> Schema:
    kinds = [_integer, _number, _string, _pattern, _enum, _plain]
    if depth:
        kinds += [_object, _object, _array, _any]
    return choose.choice(kinds)(choose, depth)


def _integer(choose: random.Random, depth: int) -> Schema:
    low = choose.randint(-1000, 1000)
    schema: Schema = {"type": "integer", "minimum": low, "maximum": low + choose.randint(5, 5000)}
    if choose.random() < 0.3:
        schema["multipleOf"] = choose.choice([2, 5])
    return schema


def _number(choose: random.Random, depth: int) -> Schema:
    low = round(choose.uniform(-50, 50), 2)
    return {"type": "number", "minimum": low, "exclusiveMaximum": low + choose.randint(1, 9)}


def _string(choose: random.Random, depth: int) -> Schema:
    shortest = choose.randint(0, 3)
    return {"type": "string", "minLength": shortest, "maxLength": shortest + choose.randint(0, 6)}


def _pattern(choose: random.Random, depth: int) -> Schema:
    return {"type": "string", "pattern": f"^{_regex(choose, 1)}$"}


def _enum(choose: random.Random, depth: int) -> Schema:
    return {"enum": choose.sample([0, 1.5, "red", "gr\u00fcn", None, True, [1, "two"]], 3)}


def _plain(choose: random.Random, depth: int) -> Schema:
    return {"type": choose.choice(["boolean", "null", ["boolean", "null"]])}


def _array(choose: random.Random, depth: int) -> Schema:
    least = choose.randint(0, 2)
    most = least + choose.randint(0, 2)
    items = _schema(choose, depth - 1)
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def _object(choose: random.Random, depth: int) -> Schema:
    names = choose.sample(WORDS, choose.randint(1, 3))
    return {
        "type": "object",
        "properties": {name: _schema(choose, depth - 1) for name in names},
        "required": choose.sample(names, choose.randint(0, len(names))),
        "additionalProperties": False,
    }


def _any(choose: random.Random, depth: int) -> Schema:
    return {"anyOf": [_schema(choose, depth - 1) for _ in range(2)]}


def _regex(choose: random.Random, depth: int) -> str:
    return "".join(_item(choose, depth) for _ in range(choose.randint(1, 3)))


def _item(choose: random.Random, depth: int) -> str:
    atoms = ["[a-f]", "[0-9]", "x", r"\d", r"\.", '[^a-z\\n"\\\\]', "\u00e9", "(yes|no)"]
    atom = choose.choice(atoms)
    if depth and choose.random() < 0.4:
        sides = "|".join(_regex(choose, depth - 1) for _ in range(2))
        atom = f"({sides})"
    return atom + choose.choice(["", "", "?", "{1,3}", "{2}", "{0,2}"])
