"""Log-probabilities in the shape of the completions API: four lists, one entry a token.

Knows how to spell a token that is not text by itself. Values only.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from cluster.api.answer_text import ShownToken
from cluster.api.text import Tokenizer

_encode = json.JSONEncoder(separators=(",", ":")).encode
LOWEST = -9999.0  # as OpenAI's API writes it


def logprobs_body(tokens: Sequence[ShownToken], tokenizer: Tokenizer) -> dict[str, Any]:
    """`text_offset` counts characters from the start of the choice's text. `top_logprobs` has the
    chosen token too, wherever it ranks, so one entry more than asked for at times. A token that
    the model rules out can only be a prompt's; JSON has no infinity, so it gets LOWEST."""
    lists: dict[str, Any] = {
        "tokens": [],
        "token_logprobs": [],
        "top_logprobs": [],
        "text_offset": [],
    }
    for token in tokens:
        spelling = spell(token.token_id, tokenizer)
        own = token.logprobs
        lists["tokens"].append(spelling)
        lists["text_offset"].append(token.start)
        if own is None:
            lists["token_logprobs"].append(None)
            lists["top_logprobs"].append(None)
            continue
        top = {spell(token_id, tokenizer): value for token_id, value in own.top}
        logprob = max(own.logprob, LOWEST)
        lists["token_logprobs"].append(logprob)
        lists["top_logprobs"].append(top | {spelling: logprob})
    return lists


def logprobs_text(tokens: Sequence[ShownToken], tokenizer: Tokenizer) -> str:
    """The same as JSON text."""
    return _encode(logprobs_body(tokens, tokenizer))


def spell(token_id: int, tokenizer: Tokenizer) -> str:
    r"""Its text; "bytes:\xe2\x80" for a part of a character, as OpenAI writes it; and
    "token_id:7" for what has no text, so that no two tokens without one are the same key."""
    raw = tokenizer.token_bytes(token_id)
    if not raw:
        return f"token_id:{token_id}"
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
