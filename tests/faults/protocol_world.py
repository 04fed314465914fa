"""The values of the protocol's model: who is where, and what is on its way. Knows no steps."""

from __future__ import annotations

from typing import Any, NamedTuple

from cluster.lifecycle import Queued, State

PUSHES = 2
Message = tuple[Any, ...]
P: Any = "P"  # stand for endpoints: the lifecycle only carries them
D: Any = "D"


class Rules(NamedTuple):
    """What the protocol does; a test switches one off to see that it is needed."""

    digests: bool = True  # a commit is compared with what stands in the blocks
    quarantine: bool = True  # memory under a live push is not given to others
    push_failed: bool = True  # prefill tells its caller that it cannot get there
    whole: bool = True  # who was preempted asks for all its memory, and is not preempted again


class Caller(NamedTuple):
    life: State = Queued()
    attempt: int = 0
    job: int = 0  # its stream to prefill; 0: none
    leg: int = 0  # its stream to decode
    first: bool = False  # prefill's token is here
    rest: bool = False  # decode's are
    places_lost: int = 0
    whole: bool = False  # it was preempted


class Job(NamedTuple):
    """A prompt at the prefill rank, and both directions of its caller's stream."""

    id: int
    heard: tuple[Message, ...]
    said: tuple[Message, ...] = ()
    leased: bool = False
    computed: bool = False
    place: int = 0  # the reservation that it is to be pushed to next
    leaving: bool = False  # it goes as soon as its push is over


class Leg(NamedTuple):
    """A Reserve at the decode rank, and both directions of its caller's stream."""

    id: int
    heard: tuple[Message, ...]
    said: tuple[Message, ...] = ()
    reservation: int = 0
    whole: bool = False  # waits for memory rather than be refused, and keeps it
    state: str = "asked"  # granted, accepted
    blocks: tuple[Message, ...] = ()


class Push(NamedTuple):
    """One push: prefill's end, decode's end, and the stream between them."""

    job: int
    reservation: int
    heard: tuple[Message, ...]  # by decode
    said: tuple[Message, ...] = ()  # by decode
    opened: bool = False  # prefill knows
    sent: int = 0
    credit: bool = True
    flying: bool = False  # a write is under way
    committed: bool = False
    giving_up: str = ""  # prefill stops once the write is over; then says so to its caller, or not
    attached: bool = False  # decode lets it write


class World(NamedTuple):
    caller: Caller = Caller()
    jobs: tuple[Job, ...] = ()
    legs: tuple[Leg, ...] = ()
    pushes: tuple[Push, ...] = ()
    memory: int = 0  # of decode: the reservation that has it
    quarantined: bool = False
    cell: Message = ()  # what stands in the receive ring
    strays: tuple[Message, ...] = ()  # writes that were given up and may still land
    serial: int = 1
    faults: int = 0
    left: bool = False
    preempted: int = 0


class Violated(AssertionError):
    pass


def replaced(items: tuple[Any, ...], old: Any, new: Any) -> tuple[Any, ...]:
    """`old` replaced by `new`, or gone if that is None."""
    return tuple(new if one is old else one for one in items if one is not old or new is not None)
