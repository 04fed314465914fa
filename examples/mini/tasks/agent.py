"""Turns of a coding agent: read what the user or a tool said, then call a tool or say the end.

Arguments are copied from the conversation: paths, lines of files, names.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from random import Random
from typing import Any

from examples.mini.tasks.functions import written
from examples.mini.tasks.sample import Answer, Call, Message, Sample, system, user
from examples.mini.tasks.words import constant, digits, identifier, path

_DESCRIPTIONS = {
    "edit_file": ("Replace text in a file.", {"path": "file", "old": "text", "new": "text"}),
    "run": ("Run a shell command.", {"command": "command"}),
    "search": ("Search the project.", {"query": "text"}),
}


def _tool(name: str) -> dict[str, Any]:
    description, parameters = _DESCRIPTIONS[name]
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {key: {"type": "string"} for key in parameters},
                "required": list(parameters),
            },
        },
    }


TOOLS = tuple(map(_tool, _DESCRIPTIONS))
PROMPTS = ("You are a coding agent.", "You are a coding agent. Use the tools.", "")


def agent(random: Random) -> Sample:
    make = random.choices(
        (_look, _change_constant, _fix_function, _rename, _after), (3, 3, 3, 2, 2)
    )[0]
    messages, answer = make(random)
    prompt = random.choice(PROMPTS)
    if prompt:
        messages = [system(prompt), *messages]
    return Sample("agent", messages, answer, thinking=random.random() < 0.5, tools=TOOLS)


def _called(call: Call, result: str, reasoning: str) -> list[Message]:
    """What a conversation holds after a call was answered."""
    function = {"name": call.name, "arguments": json.dumps(dict(call.arguments))}
    return [
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": reasoning,
            "tool_calls": [{"id": "call_0", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "call_0", "content": result},
    ]


def _edit(file: str, old: str, new: str) -> Call:
    return Call("edit_file", {"path": file, "old": old, "new": new})


def _cat(file: str) -> Call:
    return Call("run", {"command": f"cat {file}"})


def _look(random: Random) -> tuple[list[Message], Answer]:
    """The first turn: nothing is known yet."""
    file, name = path(random), identifier(random)
    task, call, reasoning = random.choice(
        (
            (f"Show me {file}.", _cat(file), f"I read {file}."),
            (f"What is in {file}?", _cat(file), f"I read {file}."),
            (
                f"Rename {name} to {identifier(random)} in {file}.",
                _cat(file),
                f"First I read {file}.",
            ),
            (
                f"Set {constant(random)} to {digits(random, 1, 4)} in {file}.",
                _cat(file),
                f"First I read {file}.",
            ),
            (f"Fix {name} in {file}.", _cat(file), f"First I read {file}."),
            (
                f"Run the tests in {file}.",
                Call("run", {"command": f"pytest {file}"}),
                f"I run the tests in {file}.",
            ),
            (
                f"Run {file}.",
                Call("run", {"command": f"python {file}"}),
                f"I run {file}.",
            ),
            (
                f"Where is {name} defined?",
                Call("search", {"query": f"def {name}"}),
                f"I search for the definition of {name}.",
            ),
            (
                f"Find all uses of {name}.",
                Call("search", {"query": name}),
                f"I search for {name}.",
            ),
            (
                f"Which files mention {name}?",
                Call("search", {"query": name}),
                f"I search for {name}.",
            ),
        )
    )
    return [user(task)], Answer(calls=[call], reasoning=reasoning)


def _listing(random: Random, lines: Sequence[str]) -> str:
    """A file: `lines` among constants and functions."""
    blocks = [written(random).code for _ in range(random.randint(0, 3))]
    blocks += [f"{constant(random)} = {digits(random, 1, 4)}" for _ in range(random.randint(0, 3))]
    for line in lines:
        blocks.insert(random.randint(0, len(blocks)), line)
    imports = random.sample(("import os", "import re", "import sys", "import json"), 2)
    return "\n".join([*imports, "", "\n\n".join(blocks)])


def _read(random: Random, task: str, file: str, lines: Sequence[str]) -> list[Message]:
    """The file of the task stands in the conversation: a tool read it, or the user showed it."""
    listing = _listing(random, lines)
    if random.random() < 0.25:
        return [user(f"{file}:\n\n{listing}\n\n{task}")]
    return [user(task), *_called(_cat(file), listing, f"First I read {file}.")]


def _change_constant(random: Random) -> tuple[list[Message], Answer]:
    file, name = path(random), constant(random)
    old, new = digits(random, 1, 4), digits(random, 1, 4)
    task = random.choice(
        (
            f"Set {name} to {new} in {file}.",
            f"Change {name} in {file} from {old} to {new}.",
            f"In {file}, {name} should be {new}.",
        )
    )
    before, after = f"{name} = {old}", f"{name} = {new}"
    reasoning = f"{name} is {old}. It becomes {new}."
    return (
        _read(random, task, file, [before]),
        Answer(calls=[_edit(file, before, after)], reasoning=reasoning),
    )


_BUGS = (
    (" + ", " - "),
    (" - ", " + "),
    (" * ", " + "),
    (" > ", " < "),
    (" < ", " > "),
    (" == 0", " == 1"),
    (" == 1", " == 0"),
    ("[0]", "[1]"),
    ("[-1]", "[0]"),
    ("max(", "min("),
    ("min(", "max("),
    (".upper()", ".lower()"),
    (".lower()", ".upper()"),
    (" in ", " not in "),
    ("sum(", "max("),
    ("2 * ", "3 * "),
    (" / 2", " / 3"),
)


def _fix_function(random: Random) -> tuple[list[Message], Answer]:
    """One line of a function does not do what its docstring says."""
    while True:
        one = written(random)
        right = one.body.strip()
        fitting = [(good, bad) for good, bad in _BUGS if good in right]
        if fitting and "\n" not in right:
            break
    good, bad = random.choice(fitting)
    wrong = right.replace(good, bad, 1)
    file = path(random)
    doc = one.does.capitalize().replace("eturns", "eturn", 1)
    lines = f'{one.signature}\n    """{doc}."""\n    {wrong}'
    task = random.choice(
        (
            f"Fix {one.name} in {file}.",
            f"{one.name} in {file} is wrong. Fix it.",
            f"The test of {one.name} fails. Fix {file}.",
        )
    )
    return (
        _read(random, task, file, [lines]),
        Answer(
            calls=[_edit(file, wrong, right)],
            reasoning=f"{one.name} {one.does}, so {wrong} must be {right}.",
        ),
    )


def _rename(random: Random) -> tuple[list[Message], Answer]:
    one, file, new = written(random), path(random), identifier(random)
    task = random.choice(
        (
            f"Rename {one.name} to {new} in {file}.",
            f"In {file}, call {one.name} {new} instead.",
        )
    )
    after = one.signature.replace(f"def {one.name}(", f"def {new}(")
    return (
        _read(random, task, file, [one.code]),
        Answer(
            calls=[_edit(file, one.signature, after)],
            reasoning=f"{one.name} becomes {new}.",
        ),
    )


def _after(random: Random) -> tuple[list[Message], Answer]:
    """The last turn: say what was found or done."""
    file, name = path(random), identifier(random)
    match random.randrange(4):
        case 0:
            line, place = random.randint(1, 400), path(random)
            task = random.choice((f"Where is {name} defined?", f"Which file defines {name}?"))
            call = Call("search", {"query": f"def {name}"})
            result = f"{place}:{line}: def {name}({random.choice(('', 'x', 'a, b'))}):"
            reply = f"{name} is defined in {place}, line {line}."
        case 1:
            count, seconds = random.randint(1, 60), digits(random, 1, 2)
            task, call = f"Run the tests in {file}.", Call("run", {"command": f"pytest {file}"})
            result = f"{count} passed in {seconds}.{digits(random, 2, 2)}s"
            reply = f"All {count} tests in {file} pass."
        case 2:
            count, failing = random.randint(1, 60), f"test_{name}"
            task, call = f"Run the tests in {file}.", Call("run", {"command": f"pytest {file}"})
            result = f"FAILED {file}::{failing}\n1 failed, {count} passed"
            reply = f"{failing} in {file} fails."
        case _:
            constant_, new = constant(random), digits(random, 1, 4)
            task = f"Set {constant_} to {new} in {file}."
            old = f"{constant_} = {digits(random, 1, 4)}"
            call = _edit(file, old, f"{constant_} = {new}")
            result = random.choice(("ok", "1 replacement made", "done"))
            reply = f"{constant_} in {file} is now {new}."
    return (
        [user(task), *_called(call, result, "I use a tool.")],
        Answer(reply, "The tool has answered."),
    )
