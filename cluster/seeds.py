"""The seeds of several answers to one prompt, from the seed of the request. Pure."""

from __future__ import annotations

import hashlib


def choice_seed(seed: int, index: int) -> int:
    """The seed of answer `index`: the request's own for answer 0, so that asking for more answers
    leaves the first as it was; for the others 63 bits of the SHA-256 of "<seed>:<index>"."""
    if index == 0:
        return seed
    digest = hashlib.sha256(f"{seed}:{index}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
