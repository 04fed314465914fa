"""How many ranks data, context and expert parallelism make together. Pure.

The rules are DeepInfer's: attention weights are on every rank, requests are spread over dp, one
prompt over cp, and the experts of a layer over groups of ep neighbouring ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm


@dataclass(frozen=True)
class ParallelSizes:
    """Rank number = data-parallel number * cp + context-parallel number."""

    dp: int
    cp: int
    ep: int

    @property
    def world(self) -> int:
        """Ranks in all."""
        return self.dp * self.cp

    @property
    def expert_replicas(self) -> int:
        """Groups that each hold every expert once."""
        return self.world // self.ep

    @property
    def group_ranks(self) -> int:
        """Ranks that step together here: a whole context-parallel team, and all who share experts.

        Where cp does not divide ep, experts are so spread over more ranks than ep.
        """
        return lcm(self.ep, self.cp)

    @property
    def groups(self) -> int:
        return self.world // self.group_ranks

    def expert_groups(self) -> list[range]:
        """Ranks of each group, as DeepInfer forms them."""
        return [range(first, first + self.ep) for first in range(0, self.world, self.ep)]


def parallel_sizes(*, ep: int = 1, dp: int = 0, cp: int = 1) -> ParallelSizes:
    """dp 0 is derived: ep // cp, at least 1. ValueError, in one line, for what cannot be."""
    for name, size, least in (("ep", ep, 1), ("dp", dp, 0), ("cp", cp, 1)):
        if size < least:
            raise ValueError(f"--{name} {size}: must be {least} or more")
    derived = dp == 0
    dp = dp or max(1, ep // cp)
    if dp * cp % ep:
        why = f"derived: {ep} // {cp}, at least 1" if derived else "given"
        raise ValueError(
            f"--ep {ep}: dp {dp} ({why}) x cp {cp} make {dp * cp} ranks, which cannot be cut into "
            f"expert groups of {ep}; {_way_out(ep, cp)}"
        )
    return ParallelSizes(dp, cp, ep)


def _way_out(ep: int, cp: int) -> str:
    """The smallest dp for which it works."""
    dp = next(dp for dp in range(1, ep + 1) if dp * cp % ep == 0)
    return f"--dp {dp} would make {dp * cp}"
