"""Which rows run in the next step: every answer's next row, and some of the prompts' rows.

Pure; it runs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.schedule import Grant, Progress, fill, isolated


def schedule(
    requests: Sequence[Progress],
    *,
    chunk_tokens: int,
    beside_tokens: int,
    max_rows: int,
    neighbours_answer: bool = False,
) -> list[Grant]:
    """One row for each of at most `max_rows` answers; at most `chunk_tokens` rows of prompts.

    Answers take turns when there are more of them than rows. A prompt here is local work: a short
    one, a colocated request, or one that is computed again. In a step that answers share, here or
    on another rank of the group, it gets at most `beside_tokens` rows, so that their time per
    token stays bounded.
    """
    answers = [request for request in requests if request.remaining == 1]
    prompts = [request for request in requests if request.remaining > 1]
    answers.sort(key=lambda request: request.turn)
    beside = min(chunk_tokens, beside_tokens)
    alone = beside if neighbours_answer else chunk_tokens
    together = fill(answers, max_rows) + fill(prompts, beside if answers else alone)
    return isolated(requests, alone) or together
