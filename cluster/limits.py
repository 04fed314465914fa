"""What can be served at all: the one check of a request at the cluster's edge. Pure.

Whatever an engine could stumble over is refused here, before any rank hears of it. Knows nothing
of vocabularies; whoever has the tokenizer checks the upper end of ids.
"""

from __future__ import annotations

from collections.abc import Iterable

from cluster.errors import BadRequest, PromptTooLong
from cluster.messages import Member, Request


def longest_served(members: Iterable[Member]) -> int | None:
    """Positions of the longest sequence that every pool can take; None while nobody is known.

    In a pool the roomiest rank counts; of the pools the smaller one rules.
    """
    by_role: dict[str, int] = {}
    for member in members:
        role, limit = member.endpoint.role, member.load.max_length
        if limit:
            by_role[role] = max(limit, by_role.get(role, 0))
    return min(by_role.values(), default=None)


def check_request(request: Request, longest: int | None) -> None:
    """BadRequest or PromptTooLong, with the numbers, for what must not reach a rank."""
    if len(request.prompt) % 4 or len(request.output) % 4:
        raise BadRequest("token ids are packed as int32; the bytes are not a multiple of 4")
    if not request.prompt:
        raise BadRequest("prompt: is empty; at least one token is needed")
    lowest = min(request.token_ids)
    if lowest < 0:
        raise BadRequest(f"prompt: token id {lowest} is negative")
    if any(token_id < 0 for token_id in request.sampling.stop_token_ids):
        raise BadRequest("stop_token_ids: a token id is negative")
    if request.output_length >= request.sampling.max_tokens:
        raise BadRequest(
            f"max_tokens is {request.sampling.max_tokens}, and {request.output_length} tokens have "
            "been generated already"
        )
    if longest is not None and request.longest > longest:
        raise PromptTooLong(
            f"prompt ({request.prompt_length} tokens) and max_tokens "
            f"({request.sampling.max_tokens}) make {request.longest}; at most {longest} are served"
        )
