"""Writes the demo's prompts, encoded: python -m examples.mini.demo_prompts

`make demo` sends them; it needs no chat encoder of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from random import Random

from examples.mini.chat import ChatEncoder
from examples.mini.corpus import FOLDER
from examples.mini.tasks.agent import PROMPTS, TOOLS
from examples.mini.tasks.retrieval import prose
from examples.mini.tasks.sample import Answer, Sample, system, user

_FILE = '''import os
import json

def average(values):
    """Return the average of values."""
    return max(values) / len(values)

MAX_RETRIES = 3'''


def prompts() -> Iterator[tuple[str, Sample]]:
    """What the demo says of each, and the request."""
    question = "What is the capital of Japan?"
    yield question, Sample("chat", [user(question)], Answer(), thinking=False)

    lines = prose(Random("demo"), 3600)
    lines.insert(len(lines) // 3, "The access code of Mira Novak is 48213.")
    lines.insert(2 * len(lines) // 3, "The access code of Hugo Weber is 90377.")
    question = "What is the access code of Mira Novak?"
    text = "\n".join(lines)
    yield (
        f"a text of {len(text.split())} words, then: {question}",
        Sample("retrieval", [user(f"{text}\n\n{question}")], Answer(), thinking=False),
    )

    task = "average in src/report.py is wrong. Fix it."
    call = {"name": "run", "arguments": json.dumps({"command": "cat src/report.py"})}
    messages = [
        system(PROMPTS[0]),
        user(task),
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "First I read src/report.py.",
            "tool_calls": [{"id": "call_0", "type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": "call_0", "content": _FILE},
    ]
    yield (
        f"a coding agent that has read the file, asked: {task}",
        Sample("agent", messages, Answer(), thinking=True, tools=TOOLS),
    )


def main() -> None:
    encoder = ChatEncoder(FOLDER)
    found = [{"about": about, "prompt": encoder.prompt_ids(sample)} for about, sample in prompts()]
    target = FOLDER / "demo.json"
    target.write_text(json.dumps(found, separators=(",", ":")) + "\n", encoding="utf-8")
    print(f"{target}: {[len(one['prompt']) for one in found]} tokens")


if __name__ == "__main__":
    main()
