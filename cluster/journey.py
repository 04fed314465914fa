"""What stays of one request from attempt to attempt: its tokens, its state, what it has lost."""

from __future__ import annotations

import asyncio
import time
from types import TracebackType

from cluster.config import ClusterConfig
from cluster.errors import ClusterError, Draining, NoRoom, Preempted
from cluster.lifecycle import Done, Event, Outcome, Queued, State, WorkerGone, advance
from cluster.messages import Endpoint, Request, unpack_ids
from cluster.timeline import Timeline
from cluster.token_order import Delta

FORGIVE_AFTER = 2.0  # in t_detect_s: a rank that the router still names by then is not dead
MAX_HAND_BACKS = 32  # by ranks that drain or preempt; far more than a rolling restart makes


class Journey:
    """`with`: however it is left, the state ends as Finished, once."""

    def __init__(self, request: Request, timeline: Timeline, config: ClusterConfig) -> None:
        self.request = request
        self.timeline = timeline
        self.state: State = Queued()
        self.attempt = 1  # ranks tell the tries of a request apart by it
        self.begun = request.output_length > 0  # by some rank: it runs, and outlives a whole pool
        self.whole = False  # it was preempted: from now on all its memory comes first
        self.stopped_at: int | None = None  # the reader has found its end before that index
        self.scored = 0  # positions of the prompt whose log-probabilities the caller has got
        self._emitted = unpack_ids(request.output)
        self._finish: Outcome | None = None
        self._lost_at: dict[str, float] = {}  # by incarnation, on the monotonic clock
        self._full: set[str] = set()  # incarnations whose queue did not take it
        self._losses = 0
        self._hand_backs = 0
        self.no_room: NoRoom | None = None  # what the last rank said whose queue is full
        self._max_losses = config.generation.max_attempts
        self._forgive_s = FORGIVE_AFTER * config.wire.t_detect_s

    def advance(self, event: Event) -> None:
        self.state = advance(self.state, event)

    def emit(self, delta: Delta) -> None:
        """The caller is about to get these tokens; no attempt will make them again."""
        self.scored += len(delta.prompt_logprobs)
        self._emitted += delta.token_ids
        self._finish = delta.finish
        self.timeline.tokens(len(delta.token_ids))

    def stop(self, index: int) -> None:
        """The reader needs nothing from output index `index` on, and is about to leave."""
        self.stopped_at = index

    def remaining(self) -> Request:
        """What the next attempt has to do."""
        return self.request.resume_after(self._emitted) if self._emitted else self.request

    def avoid(self, endpoint: Endpoint) -> None:
        """This life of a rank is lost to this request."""
        self._lost_at[endpoint.incarnation] = time.monotonic()

    def avoided(self) -> tuple[str, ...]:
        """Incarnations to stay away from.

        In the end a rank is forgiven that is not dead after all: it may be the only one, and a
        broken connection may have been all that was wrong.
        """
        since = time.monotonic() - self._forgive_s
        lost = (name for name, lost_at in self._lost_at.items() if lost_at > since)
        return (*lost, *self._full)

    def refused(self, endpoint: Endpoint, error: NoRoom) -> None:
        """A rank's queue is full: the others are asked once each, then the caller is told."""
        self._full.add(endpoint.incarnation)
        self.no_room = error

    def held(self, why: str) -> None:
        """No rank can take it now."""
        last = self.timeline.events[-1:]
        if not last or last[0].detail != {"why": why}:  # once, however often it is asked again
            self.timeline.record("held", why=why)

    def try_again(self, error: ClusterError) -> bool:
        """An attempt has ended with `error`; False when it was the last one."""
        self.advance(WorkerGone())
        preempted = isinstance(error, Preempted)
        name = "preempted" if preempted else "lost"
        self.timeline.record(name, attempt=self.attempt, error=str(error))
        self.attempt += 1
        self.whole |= preempted
        if isinstance(error, Draining | Preempted):  # a living rank gave it back: nobody's fault
            self._hand_backs += 1
            return self._hand_backs <= MAX_HAND_BACKS
        if isinstance(error, NoRoom):
            return True  # it ends when there is no other rank to ask
        self._losses += 1
        return self._losses < self._max_losses

    def __enter__(self) -> Journey:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        outcome: Outcome = self._finish or "failed"
        if isinstance(error, GeneratorExit | asyncio.CancelledError):
            outcome = self._finish or ("cancelled" if self.stopped_at is None else "stop")
        self.advance(Done(outcome))
        self.timeline.record("finished", outcome=outcome)
