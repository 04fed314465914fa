"""Decode rows of steps, the next of which is begun before it is asked for.

While the device computes step n the host cannot know its tokens, but it knows what step n + 1 will
be if nothing changes: the same requests, one position further, and the tokens are on the device.
So n + 1 is begun at once, and only then n's tokens are waited for: the device never waits for the
host.

Why that is right. A row of a step depends on its own request alone (on a GPU, up to how products
of another shape round, as without this). So whatever the next step turns out to be, a row of the
flight that is asked for, from the token that was assumed, is the row that would have been computed;
the others are dropped. A dropped row has written state at one position beyond the request's last:
within its blocks, where nobody looks before that position is computed, which then writes the same
places again. (The ring's row that it replaced was seen for the last time by the row before.) The
one danger is memory that changes hands: so `settle` waits for the flight before a request's end is
told or its lease released, and a flight of which nothing was asked for is waited for before it is
forgotten. Steps run on the device in the order in which they were begun.

Knows nothing of models.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from cluster.errors import ClusterError
from engine.choice import Choice
from engine.context import Context
from engine.decode_buffer import Row
from engine.decode_steps import Decoder, Flight
from engine.request import Running
from engine.sampler import UNSOUND, Sampled, unsound
from engine.step_loop import Work

logger = logging.getLogger(__name__)

_PAUSE = 32  # steps without running ahead, after one of which most was for nothing


class _Part(NamedTuple):
    """One request's part of a step, and where its row is."""

    work: Work
    context: Context
    flight: Flight
    place: int

    @property
    def token(self) -> int:
        """Waits for it."""
        return self.flight.tokens()[self.place]


@dataclass(frozen=True)
class Decoding:
    """The decode rows of one step, on their way; by the number of the part in the step."""

    parts: Mapping[int, _Part]
    chosen: Mapping[int, int]  # where `sampled` has the token of a part
    sampled: Sampled | None  # of parts that ask for more than the best or a drawn token

    def outcomes(self) -> dict[int, Choice | ClusterError]:
        """Waits for the tokens."""
        choices = [] if self.sampled is None else self.sampled.choices()
        return {
            number: choices[self.chosen[number]] if number in self.chosen else _outcome(part)
            for number, part in self.parts.items()
        }


class RunAhead:
    """At most one step is in flight when nobody waits for one."""

    def __init__(
        self,
        decoder: Decoder,
        context_of: Callable[[Running], Context],
        spelled_ids: int | None = None,
    ) -> None:
        self._decoder, self._context_of, self._spelled_ids = decoder, context_of, spelled_ids
        self._flight: Flight | None = None
        self._assumed: Sequence[int] = ()  # the token that each of its rows begins from
        self._pause = 0
        self.hits = self.misses = 0  # rows begun ahead that were asked for, or not

    def take(self, work: Sequence[Work]) -> Decoding:
        """The decode rows among these parts: those in flight, and the others, begun now."""
        parts = self._claim(work)
        fresh = [n for n, one in enumerate(work) if n not in parts and _is_decode_row(one)]
        if not fresh:
            return Decoding(parts, {}, None)
        contexts = [self._context_of(work[number].running) for number in fresh]
        begun = self._decoder.launch(
            [_row(work[number], context) for number, context in zip(fresh, contexts, strict=True)]
        )
        for place, (number, context) in enumerate(zip(fresh, contexts, strict=True)):
            parts[number] = _Part(work[number], context, begun, place)
        own = [place for place, context in enumerate(contexts) if not context.is_plain]
        if not own:
            return Decoding(parts, {}, None)
        logits_RV = begun.logits_RV
        if len(own) < len(fresh):
            logits_RV = torch.stack([logits_RV[place] for place in own])
        sampled = Sampled(logits_RV, [contexts[place] for place in own], self._spelled_ids)
        return Decoding(parts, {fresh[place]: row for row, place in enumerate(own)}, sampled)

    def begin_next(self, decoding: Decoding) -> Callable[[], None]:
        """Begins what will be asked for if nothing changes; returns what to call when this step's
        outcomes are known.

        Nothing is begun where a row waits for the host: two steps would read all weights twice.
        """
        parts = list(decoding.parts.values())
        if self._pause or not self._decoder.may_run_ahead or decoding.sampled is not None:
            return _nothing
        going = [part for part in parts if _goes_on(part.work)]
        if not going:
            return _nothing
        newest = parts[-1].flight  # those of an older one have been computed by now
        self._flight = self._decoder.launch([_next_row(part, newest) for part in going])

        def assume() -> None:
            self._assumed = [part.token for part in going]

        return assume

    def settle(self, running: Sequence[Running]) -> None:
        """Returns when the flight will not touch these requests' memory; see engine.request."""
        if self._flight is not None and any(row.running in running for row in self._flight.rows):
            _wait(self._flight)

    def forget(self) -> None:
        """A step has failed, and the device has been waited for."""
        self._flight = None

    def _claim(self, work: Sequence[Work]) -> dict[int, _Part]:
        """Parts whose rows are in flight. It is not in flight any more."""
        self._pause = max(0, self._pause - 1)
        flight, self._flight = self._flight, None
        if flight is None:
            return {}
        places = {row.running: number for number, row in enumerate(flight.rows)}
        claimed = {
            number: _Part(one, self._context_of(one.running), flight, place)
            for number, one in enumerate(work)
            if (place := places.get(one.running)) is not None
            and _is_same(one, flight.rows[place], self._assumed[place])
        }
        self.hits += len(claimed)
        self.misses += len(flight.rows) - len(claimed)
        if len(claimed) * 2 < len(flight.rows):  # answers take turns, say
            self._pause = _PAUSE
        if not claimed:
            _wait(flight)
        return claimed


def _is_decode_row(one: Work) -> bool:
    """The newest row of an answer: no picture is there, and nobody waits for its layers."""
    return one.grant.count == 1 and one.grant.samples and one.running.output_length > 0


def _is_same(one: Work, row: Row, assumed: int) -> bool:
    ids = one.running.token_ids
    return (
        one.grant.count == 1
        and one.grant.start == row.position == len(ids) - 1
        and ids[-1] == assumed
    )


def _goes_on(one: Work) -> bool:
    """It will want another row, as far as can be known, and its blocks have room for that."""
    running, position = one.running, one.grant.start + 1
    most = running.request.sampling.max_tokens
    return not running.once and running.output_length + 1 < most and position < running.lease.room


def _row(one: Work, context: Context) -> Row:
    position = one.grant.start
    token = one.running.token_ids[position]
    return Row(one.running, position, token=token, draw=context.drawn)


def _next_row(part: _Part, newest: Flight) -> Row:
    running, position, drawn = part.work.running, part.work.grant.start + 1, part.context.drawn
    if part.flight is newest:
        return Row(running, position, source=part.place, draw=drawn)
    return Row(running, position, token=max(part.token, 0), draw=drawn)  # an unsound one: it ends


def _outcome(part: _Part) -> Choice | ClusterError:
    if (token := part.token) == UNSOUND:
        return unsound(part.work.running.request.request_id, part.work.grant.start)
    return Choice(token)


def _wait(flight: Flight) -> None:
    try:
        flight.tokens()
    except Exception:  # of the device, which then writes nothing any more; the next step says so
        logger.exception("a step that was begun ahead has failed")


def _nothing() -> None:
    """No step was begun, so none assumes anything."""
