"""A request's life, as its caller sees it: states, events, and the one function between them.

    Queued --SentToPrefill--> Prefilling --Begun--> Placing --RoomFound--> Pushing --TakenOver--+
      |                                                ^                     |                  v
      |                                                +------PlaceLost------+              Decoding
      +--SentToDecode (colocated)---------------------------------------------------------------^

    any of these  --WorkerGone-->  Queued      what was emitted is kept; it prefills again
    any of these  --Done-->        Finished

A state holds exactly what the request owns in it: which ranks work for it, and its reservation.
Values only; knows nothing of sockets, tokens or clocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cluster.messages import Endpoint

Outcome = Literal["stop", "length", "cancelled", "failed"]


@dataclass(frozen=True)
class Queued:
    """No rank has it."""


@dataclass(frozen=True)
class Prefilling:
    """A prefill rank has it, in its queue or for an answer that needs no decode rank."""

    prefill: Endpoint


@dataclass(frozen=True)
class Placing:
    """The prefill rank runs it; a decode rank with room is being sought."""

    prefill: Endpoint


@dataclass(frozen=True)
class Pushing:
    """The prefill rank pushes state into a reservation."""

    prefill: Endpoint
    decode: Endpoint
    reservation: str


@dataclass(frozen=True)
class Decoding:
    """The decode rank has all of it; no other rank is needed any more."""

    decode: Endpoint


@dataclass(frozen=True)
class Finished:
    outcome: Outcome


@dataclass(frozen=True)
class SentToPrefill:
    prefill: Endpoint


@dataclass(frozen=True)
class SentToDecode:
    """The whole request went to one decode rank (colocated)."""

    decode: Endpoint


@dataclass(frozen=True)
class Begun:
    """The first chunk is scheduled, and the answer will need a decode rank."""


@dataclass(frozen=True)
class RoomFound:
    decode: Endpoint
    reservation: str


@dataclass(frozen=True)
class PlaceLost:
    """The decode rank went away before it accepted; the prefill rank still has the state."""


@dataclass(frozen=True)
class TakenOver:
    """The decode rank has accepted the state: its own token or the prefill rank's word says so."""


@dataclass(frozen=True)
class WorkerGone:
    """Something that the request needs was lost; nothing of this attempt is left."""


@dataclass(frozen=True)
class Done:
    outcome: Outcome


State = Queued | Prefilling | Placing | Pushing | Decoding | Finished
Event = SentToPrefill | SentToDecode | Begun | RoomFound | PlaceLost | TakenOver | WorkerGone | Done


class InvalidTransition(AssertionError):
    """Our own mistake: this cannot happen to a request that stands there."""

    def __init__(self, state: State, event: Event) -> None:
        super().__init__(f"{event} cannot happen to a request in {state}")


def advance(state: State, event: Event) -> State:
    """Where the request stands after the event. Raises InvalidTransition."""
    match state, event:
        case Finished(), Done() | WorkerGone():
            return state  # a late finish, loss or cancel is harmless
        case Finished(), _:
            raise InvalidTransition(state, event)
        case _, Done(outcome):
            return Finished(outcome)
        case _, WorkerGone():
            return Queued()
        case Queued(), SentToPrefill(prefill):
            return Prefilling(prefill)
        case Queued(), SentToDecode(decode):
            return Decoding(decode)
        case Prefilling(prefill), Begun():
            return Placing(prefill)
        case Placing(prefill), RoomFound(decode, reservation):
            return Pushing(prefill, decode, reservation)
        case Pushing(prefill), PlaceLost():
            return Placing(prefill)
        case Pushing(_, decode), TakenOver():
            return Decoding(decode)
        case Decoding(), TakenOver():
            return state  # the second of its two witnesses
        case _:
            raise InvalidTransition(state, event)
