"""Who is there: the ranks heard of, by name, and how long ago. Pure: values and a clock in.

Of one name only the newest incarnation counts (incarnations sort by birth); an older process that
still talks is ignored while the newer one is there. Knows nothing of sockets, and nothing of
which rank is right for a request.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter

from cluster.messages import Load, Member, Role, Route, Routed
from cluster.request import positions_held

Work = tuple[int, int, int, str]


@dataclass(frozen=True)
class Heard:
    member: Member
    at: float  # seconds on the caller's clock

    @cached_property
    def work(self) -> Work:
        """Sorts ranks of one role by what they have to do; equals by what they have left.

        Kept with the report, so that a decision has to look at very few of them.
        """
        load, name = self.member.load, self.member.endpoint.name
        requests = load.waiting + load.running
        if self.member.endpoint.role == "prefill":  # a queue of tokens, run one after another
            return load.waiting_tokens, requests, -load.free_blocks, name
        return requests, -load.free_blocks, load.waiting_tokens, name  # all run in every step


@dataclass(frozen=True)
class Roster:
    """The ranks of one moment. Every method returns another roster."""

    heard: Mapping[str, Heard] = field(default_factory=dict)  # by name
    pools: Mapping[Role, Sequence[Heard]] = field(default_factory=dict)  # the least work first

    @classmethod
    def of(cls, members: Iterable[Member], now: float) -> Roster:
        roster = cls()
        for member in members:
            roster = roster.hear(member, now)
        return roster

    @cached_property
    def members(self) -> tuple[Member, ...]:
        return tuple(heard.member for heard in self.heard.values())

    @cached_property
    def shape(self) -> frozenset[tuple[str, bool]]:
        """Who is there, and who is leaving: what watchers must know at once."""
        return frozenset((one.endpoint.incarnation, one.draining) for one in self.members)

    def pool(self, role: Role) -> Iterator[Member]:
        """The ranks of one role, those with the least work first; ties by name."""
        return (heard.member for heard in self.pools.get(role, ()))

    def hear(self, member: Member, now: float) -> Roster:
        """A rank has reported."""
        known = self.heard.get(member.endpoint.name)
        if known and known.member.endpoint.incarnation > member.endpoint.incarnation:
            return self
        return self._with(Heard(member, now))

    def forget(self, incarnation: str) -> Roster:
        """This life of a rank is over."""
        return self._only(lambda one: one.member.endpoint.incarnation != incarnation)

    def expire(self, now: float, silence_s: float) -> Roster:
        """Without those who have said nothing for `silence_s`; itself if there are none."""
        if all(now - one.at < silence_s for one in self.heard.values()):
            return self
        return self._only(lambda one: now - one.at < silence_s)

    def charge(self, route: Route, routed: Routed) -> Roster:
        """As if the chosen ranks had reported the request already; their next report overrules.

        Without this, all requests between two reports would go to the same rank.
        """
        roster = self
        local = routed.prefill is None and not route.decode_only
        decoding = _doing_both if local else _decoding
        for endpoint, loaded in ((routed.prefill, _prefilling), (routed.decode, decoding)):
            known = self.heard.get(endpoint.name) if endpoint else None
            if known is not None and known.member.endpoint == endpoint:
                load = loaded(known.member.load, route)
                member = known.member.model_copy(update={"load": load})
                roster = roster._with(Heard(member, known.at))
        return roster

    def _with(self, one: Heard) -> Roster:
        name, role = one.member.endpoint.name, one.member.endpoint.role
        before = self.heard.get(name)
        pool = [other for other in self.pools.get(role, ()) if other is not before]
        insort(pool, one, key=attrgetter("work"))
        return Roster({**self.heard, name: one}, {**self.pools, role: pool})

    def _only(self, wanted: Callable[[Heard], bool]) -> Roster:
        return Roster(
            {name: one for name, one in self.heard.items() if wanted(one)},
            {role: [one for one in pool if wanted(one)] for role, pool in self.pools.items()},
        )


def blocks_of(tokens: int, load: Load) -> int:
    """How many of the rank's blocks hold that many tokens."""
    return -(-tokens // load.block_tokens) if load.block_tokens else 0


def blocks_to_decode(route: Route, load: Load) -> int:
    """How many blocks the decode rank takes for the request at the start."""
    part = 1.0 if route.whole else load.output_reserved
    return blocks_of(positions_held(route.length, route.longest, part), load)


def _prefilling(load: Load, route: Route) -> Load:
    return load.model_copy(
        update={
            "waiting": load.waiting + 1,
            "waiting_tokens": load.waiting_tokens + route.length,
            "free_blocks": max(0, load.free_blocks - blocks_of(route.length, load)),
        }
    )


def _decoding(load: Load, route: Route) -> Load:
    return load.model_copy(
        update={
            "running": load.running + 1,
            "free_blocks": max(0, load.free_blocks - blocks_to_decode(route, load)),
            "free_slots": max(0, load.free_slots - 1),
        }
    )


def _doing_both(load: Load, route: Route) -> Load:
    loaded = _decoding(load, route)
    return loaded.model_copy(update={"waiting_tokens": load.waiting_tokens + route.length})
