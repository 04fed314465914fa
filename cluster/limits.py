"""What can be served at all: the one check of a request at the cluster's edge. Pure.

Whatever an engine could stumble over is refused here, before any rank hears of it. Ranges of
single values are Sampling's own affair.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cluster.errors import BadRequest, PromptTooLong
from cluster.image import check_images
from cluster.image_rules import ImageRules
from cluster.messages import Member, Request, Role


class NoEncoder(BadRequest):
    """No rank that would run the prompt can run its images."""

    param = "images"

    def __init__(self, role: Role) -> None:
        super().__init__(
            f"images: no {role} rank has a vision encoder: the model has none, or {role}.vision is "
            "false"
        )


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


def vocabulary_served(members: Iterable[Member]) -> int | None:
    """Token ids below this are known to every rank; None while nobody is known."""
    sizes = (member.load.vocab_size for member in members)
    return min((size for size in sizes if size), default=None)


def images_served(members: Iterable[Member], role: Role) -> tuple[bool, ImageRules | None]:
    """Whether any rank of the pool is known, and what images are to those that take some."""
    pool = [member.load for member in members if member.endpoint.role == role]
    rules = (load.images for load in pool if load.images is not None)
    return bool(pool), next(rules, None)


def check_pictures(request: Request, members: Iterable[Member], role: Role) -> None:
    """BadRequest for images that no rank of the pool could run; a pool of nobody may come yet."""
    if not request.images:
        return
    known, rules = images_served(members, role)
    if known and rules is None:
        raise NoEncoder(role)
    if known:
        check_images(request.images, request.prompt, rules)


def check_request(request: Request, longest: int | None, vocab_size: int | None = None) -> None:
    """BadRequest or PromptTooLong, with the numbers, for what must not reach a rank.

    A limit that is None is not known yet; ranks know theirs.
    """
    if len(request.prompt) % 4 or len(request.output) % 4:
        raise BadRequest("token ids are packed as int32; the bytes are not a multiple of 4")
    if not request.prompt:
        raise BadRequest("prompt: is empty; at least one token is needed")
    _check_ids("prompt", request.token_ids, vocab_size)
    for field, token_ids in request.sampling.named_ids():
        _check_ids(field, token_ids, vocab_size)
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


def _check_ids(field: str, token_ids: Sequence[int], vocab_size: int | None) -> None:
    lowest, highest = min(token_ids, default=0), max(token_ids, default=0)
    if lowest < 0:
        raise BadRequest(f"{field}: token id {lowest} is negative")
    if vocab_size is not None and highest >= vocab_size:
        raise BadRequest(f"{field}: token id {highest} is outside the vocabulary of {vocab_size}")
