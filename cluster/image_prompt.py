"""Pictures take their places in a prompt of token ids. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.errors import BadRequest
from cluster.image import Image
from cluster.pictures import Picture


class BadPrompt(BadRequest):
    """Its image tokens do not fit its images."""


def place(
    token_ids: Sequence[int], pictures: Sequence[Picture]
) -> tuple[list[int], tuple[Image, ...]]:
    """The ids with as many image tokens as each picture takes, and where each one stands.

    A prompt has one image token for each picture, in their order, or all that they take already.
    Raises BadPrompt with the numbers for any other.
    """
    if not pictures:
        return list(token_ids), ()
    token = pictures[0].token_id
    found = sum(one == token for one in token_ids)
    wanted = sum(picture.count for picture in pictures)
    if found == len(pictures):
        token_ids = _expanded(token_ids, token, pictures)
    elif found != wanted:
        raise BadPrompt(
            f"has {found} image tokens (id {token}) for {len(pictures)} images; it needs one for "
            f"each, or all {wanted} that they take"
        )
    return list(token_ids), _placed(token_ids, token, pictures)


def _expanded(token_ids: Sequence[int], token: int, pictures: Sequence[Picture]) -> list[int]:
    left = iter(pictures)
    ids: list[int] = []
    for one in token_ids:
        ids.extend([one] * (next(left).count if one == token else 1))
    return ids


def _placed(token_ids: Sequence[int], token: int, pictures: Sequence[Picture]) -> tuple[Image, ...]:
    images, places = [], [at for at, one in enumerate(token_ids) if one == token]
    for number, picture in enumerate(pictures):
        mine, places = places[: picture.count], places[picture.count :]
        if mine[-1] - mine[0] + 1 != picture.count:
            raise BadPrompt(
                f"breaks the {picture.count} image tokens of images[{number}] off after "
                f"position {mine[0]}"
            )
        images.append(picture.at(mine[0]))
    return tuple(images)
