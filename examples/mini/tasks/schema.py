"""JSON to a schema: the values stand in a sentence, in a list, or in both."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from examples.mini.tasks.sample import Answer, Message, Sample, system, user
from examples.mini.tasks.words import (
    CITIES,
    COLOURS,
    FRUITS,
    THINGS,
    code_word,
    digits,
    identifier,
    person,
    syllables,
)


@dataclass(frozen=True)
class Property:
    """`phrase` says the value, `{}`, in a sentence."""

    name: str
    schema: Mapping[str, Any]
    phrase: str
    draw: Callable[[Random], Any]


def _whole(least: int, most: int) -> Callable[[Random], int]:
    return lambda random: random.randint(least, most)


def _one_of(values: tuple[str, ...]) -> Callable[[Random], str]:
    return lambda random: random.choice(values)


def _some_of(values: tuple[str, ...]) -> Callable[[Random], list[str]]:
    return lambda random: random.sample(values, random.randint(1, 3))


def _email(random: Random) -> str:
    return f"{syllables(random, 2)}@{syllables(random, 1)}.org"


def _price(random: Random) -> float:
    return random.randint(1, 99) + random.randint(1, 9) / 10


_STRING, _INTEGER, _NUMBER, _BOOLEAN = (
    {"type": name} for name in ("string", "integer", "number", "boolean")
)
_STRINGS = {"type": "array", "items": {"type": "string"}}
_SIZES = ("small", "medium", "large")

PROPERTIES = (
    Property("name", _STRING, "the name is {}", person),
    Property("age", _INTEGER, "the age is {}", _whole(1, 99)),
    Property("city", _STRING, "the city is {}", _one_of(CITIES)),
    Property("email", _STRING, "the email is {}", _email),
    Property("item", _STRING, "the item is {}", _one_of(THINGS)),
    Property("price", _NUMBER, "the price is {}", _price),
    Property("quantity", _INTEGER, "the quantity is {}", _whole(1, 500)),
    Property("colour", _STRING, "the colour is {}", _one_of(COLOURS)),
    Property("in_stock", _BOOLEAN, "in stock: {}", lambda r: r.random() < 0.5),
    Property("size", {"type": "string", "enum": list(_SIZES)}, "the size is {}", _one_of(_SIZES)),
    Property("tags", _STRINGS, "tags: {}", _some_of(COLOURS + FRUITS)),
    Property("fruits", _STRINGS, "fruits: {}", _some_of(FRUITS)),
    Property("code", _STRING, "the code is {}", code_word),
    Property("active", _BOOLEAN, "active: {}", lambda r: r.random() < 0.5),
    Property("year", _INTEGER, "the year is {}", _whole(1900, 2030)),
    Property("phone", _STRING, "the phone number is {}", lambda r: digits(r, 6, 8)),
)


def schema(random: Random) -> Sample:
    """Some sentences say more than the schema asks for."""
    mentioned = random.sample(PROPERTIES, random.randint(1, 5))
    if random.random() < 0.4:
        mentioned += [_invented(random) for _ in range(random.randint(1, 3))]
        random.shuffle(mentioned)
        mentioned = list({one.name: one for one in mentioned}.values())
    values = {one.name: one.draw(random) for one in mentioned}
    asked = random.sample(mentioned, random.randint(1, len(mentioned)))
    wanted = {
        "type": "object",
        "properties": {one.name: one.schema for one in asked},
        "required": [one.name for one in asked],
    }
    if random.random() < 0.5:
        text = ", ".join(one.phrase.format(_said(values[one.name])) for one in mentioned) + "."
        text = text[0].upper() + text[1:]
    else:
        text = "\n".join(f"{one.name}: {_said(values[one.name])}" for one in mentioned)
    messages: list[Message] = []
    if random.random() < 0.3:
        messages.append(system("You answer in JSON."))
    question = random.choice(
        (
            f"{text}\n\nGive this as JSON.",
            f"Turn this into JSON.\n\n{text}",
            f"JSON, please: {text}",
        )
    )
    messages.append(user(question))
    reply = json.dumps({one.name: values[one.name] for one in asked})
    reasoning = f"The schema asks for {', '.join(one.name for one in asked)}."
    return Sample(
        "schema", messages, Answer(reply, reasoning), random.random() < 0.3, schema=wanted
    )


def _invented(random: Random) -> Property:
    """A property that no other sample has."""
    name = identifier(random)
    if random.random() < 0.5:
        return Property(name, _INTEGER, f"{name} is {{}}", _whole(0, 999))
    return Property(name, _STRING, f"{name} is {{}}", code_word)


def _said(value: Any) -> str:
    match value:
        case bool():
            return "yes" if value else "no"
        case list():
            return ", ".join(value)
        case _:
            return str(value)
