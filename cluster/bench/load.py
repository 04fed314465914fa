"""What is asked, and when: requests of drawn lengths, in a closed or an open loop. Pure.

Equal seeds give equal loads, so two servers can be asked the same.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from cluster.errors import BadRequest

Json = dict[str, Any]

LOWEST_ID = 256  # ids below are bytes and special tokens in many vocabularies


@dataclass(frozen=True)
class Lengths:
    """Uniform, both ends included."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """ "64" or "64-256"; BadRequest for anything else."""
        low, _, high = text.partition("-")
        try:
            lengths = cls(int(low), int(high or low))
        except ValueError:
            raise BadRequest(f"{text!r} is not a length such as 64 or 64-256") from None
        if not 1 <= lengths.low <= lengths.high:
            raise BadRequest(f"{text!r}: lengths start at 1 and do not fall")
        return lengths

    def draw(self, dice: random.Random) -> int:
        return dice.randint(self.low, self.high)


@dataclass(frozen=True)
class Load:
    """`rate` requests a second arrive by chance (Poisson), or, if None, `concurrency` clients each
    ask again as soon as they are answered."""

    requests: int
    concurrency: int
    rate: float | None
    prompt_tokens: Lengths
    output_tokens: Lengths
    highest_id: int = 1999  # of the token ids in prompts
    seed: int = 0

    def __post_init__(self) -> None:
        if self.requests < 1 or self.concurrency < 1:
            raise BadRequest("a load needs at least one request and one client at a time")
        if self.rate is not None and not 0 < self.rate < float("inf"):
            raise BadRequest(f"rate {self.rate}: requests a second are a number above 0")

    def bodies(self) -> Iterator[Json]:
        """One streamed request each; every prompt is another one."""
        dice = random.Random(self.seed)
        for _ in range(self.requests):
            length = self.prompt_tokens.draw(dice)
            yield {
                "prompt": [dice.randint(LOWEST_ID, self.highest_id) for _ in range(length)],
                "max_tokens": self.output_tokens.draw(dice),
                "seed": dice.getrandbits(63),
                "stream": True,
                "stream_options": {"include_usage": True},
            }

    def arrivals(self) -> Iterator[float]:
        """Seconds from the start at which requests arrive; all at once in a closed loop."""
        dice = random.Random(self.seed + 1)
        at_s = 0.0
        for _ in range(self.requests):
            yield at_s
            at_s += dice.expovariate(self.rate) if self.rate else 0.0
