"""Steps of a group: all its ranks make each one together, with rows or without, or all are at rest.

    at rest -- own work, or a ring --> agree --> somebody has rows: a step, then agree again
       ^                                 '-----> nobody has: at rest
       '-----------------------------------------'

Before a step the ranks also find out whether all are ready for the same placement of experts; then
they change to it. Knows nothing of how rows or numbers travel.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from engine.expert_exchange import Header
from engine.expert_group import ExpertGroup
from engine.expert_slots import NOTHING, Prepared
from engine.step_loop import Execute, Outcome, Work

logger = logging.getLogger(__name__)


class Lead(NamedTuple):
    """The rank of the group whose forwards this one takes part in, and its part of one."""

    rank: int
    follow: Callable[[], None]


class Lockstep:
    """An `Execute` that runs this rank's part of the group's steps, and the step loop's `Pace`."""

    def __init__(self, group: ExpertGroup, execute: Execute, lead: Lead | None = None) -> None:
        """`lead`: another rank leads this one, which never has work of its own."""
        self._exchange, self._slots, self._group = group.exchange, group.slots, group
        self._execute, self._lead = execute, lead
        self._wake = threading.Lock()
        self._awake = threading.Event()
        self._rests = 0
        self._called = False  # there is something to agree on
        self._nudge: Callable[[], None] = lambda: None
        self.answers_beside = False  # in the last step, on other ranks
        self._slots.on_prepared = self._call
        self._rest()

    # ---------------------------------------------------------------- what the step loop asks

    def listen(self, nudge: Callable[[], None]) -> None:
        """`nudge` is called, in any thread, when `awake` has become true."""
        self._nudge = nudge

    @property
    def awake(self) -> bool:
        """Others may wait for this rank: the loop must turn even if it has nothing to run."""
        return self._awake.is_set() or self._called

    def __call__(self, work: Sequence[Work]) -> Sequence[Outcome]:
        """The parts of this rank in the next step; none is a part too.

        Raises what the executor raises, when the others have got what they need. GroupLost: there
        will be no step any more.
        """
        rows = sum(one.grant.count for one in work)
        headers = self._agree(rows, _answers(work))
        if not any(header.rows for header in headers):
            self._rest()
            return []
        with self._group.step():
            self._follow(headers)
            return self._execute(work) if work else []

    def leave(self) -> None:
        """Takes part for as long as others have work, and ends when they end too."""
        while True:
            headers = self._agree(leaving=True)
            if all(header.leaving for header in headers):
                return
            if any(header.rows for header in headers):
                with self._group.step():
                    self._follow(headers)
            else:
                self._rest()
                self._awake.wait()

    # ---------------------------------------------------------------- inside

    def _agree(
        self, rows: int = 0, answers: int = 0, *, leaving: bool = False
    ) -> tuple[Header, ...]:
        with self._wake:
            sleeping = not self._awake.is_set()
            self._awake.set()
        if sleeping:
            self._exchange.ring()
        self._called = False  # before looking at what there is to agree on
        ready = self._slots.announce()
        headers = self._exchange.agree(Header(rows, answers, *ready, leaving))
        if ready != NOTHING and all(Prepared(one.version, one.digest) == ready for one in headers):
            self._slots.switch(ready)
            self._group.renew_tables()
        here = self._exchange.index
        self.answers_beside = any(one.answers for one in (*headers[:here], *headers[here + 1 :]))
        return headers

    def _follow(self, headers: Sequence[Header]) -> None:
        if self._lead is not None and headers[self._lead.rank].rows:
            self._lead.follow()

    def _rest(self) -> None:
        with self._wake:
            self._rests += 1
            self._awake.clear()
        self._exchange.rest(partial(self._hear, self._rests))

    def _hear(self, rest: int) -> None:
        """A ring for an earlier rest has been obeyed already: who turned now would turn alone."""
        with self._wake:
            if rest != self._rests:
                return
            self._awake.set()
        self._nudge()

    def _call(self) -> None:
        self._called = True
        self._nudge()


def _answers(work: Sequence[Work]) -> int:
    """How many running answers get a token in this step."""
    return sum(one.grant.samples and one.running.output_length > 0 for one in work)
