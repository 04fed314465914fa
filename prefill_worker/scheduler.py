"""Which prompt rows run in the next step: first come, first served. Pure; it runs nothing."""

from __future__ import annotations

from collections.abc import Sequence

from engine.schedule import Grant, Progress, fill, isolated


def schedule(requests: Sequence[Progress], *, chunk_tokens: int) -> list[Grant]:
    """At most `chunk_tokens` rows; the rest of a chunk goes to the prompts that come next."""
    return isolated(requests, chunk_tokens) or fill(requests, chunk_tokens)
