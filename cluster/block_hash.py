"""Names for full blocks of tokens: equal names mean equal state. Pure.

A block's hash covers its own tokens, every token before them, the model and the block size, so
that one lookup by name finds a whole prefix. Placeholders of an image carry the same token ids
whatever the picture shows; its key stands for the picture.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

DIGEST_BYTES = 16
_ID_BYTES = 4


@dataclass(frozen=True)
class ImageSpan:
    """Positions start .. stop - 1 are placeholders of one image; `key` names its pixels."""

    start: int
    stop: int
    key: bytes


def block_hashes(
    token_ids: bytes, *, model: str, block_tokens: int, images: Sequence[ImageSpan] = ()
) -> tuple[bytes, ...]:
    """One hash for each full block of `token_ids` (int32), in order; a partial one has none.

    `model` is its fingerprint: weights, format and everything else that changes the state.
    """
    parent = _digest(b"model", model.encode(), block_tokens.to_bytes(4, "little"))
    hashes: list[bytes] = []
    stride = block_tokens * _ID_BYTES
    for start in range(0, len(token_ids) // stride * block_tokens, block_tokens):
        ids = token_ids[start * _ID_BYTES : start * _ID_BYTES + stride]
        shown = _images_in(images, start, start + block_tokens)
        parent = _digest(parent, ids, *shown)
        hashes.append(parent)
    return tuple(hashes)


def _images_in(images: Sequence[ImageSpan], start: int, stop: int) -> list[bytes]:
    """What a block shows of each image: which one, which of its positions, where in the block."""
    shown = []
    for image in images:
        first, last = max(image.start, start), min(image.stop, stop)
        if first < last:
            where = (first - image.start, first - start, last - first)
            shown.append(b"".join(number.to_bytes(4, "little") for number in where) + image.key)
    return shown


def _digest(*parts: bytes) -> bytes:
    """Unambiguous: each part goes in behind its length."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        digest.update(len(part).to_bytes(4, "little"))
        digest.update(part)
    return digest.digest()
