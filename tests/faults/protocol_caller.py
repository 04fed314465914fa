"""The caller of the protocol's model: a generation's attempts, over the real lifecycle."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cluster.lifecycle import (
    Begun,
    Decoding,
    Done,
    Finished,
    PlaceLost,
    Placing,
    Pushing,
    Queued,
    RoomFound,
    SentToPrefill,
    TakenOver,
    WorkerGone,
    advance,
)
from tests.faults.protocol_world import Caller, D, Job, Leg, Message, P, Rules, World, replaced


class CallerSide:
    attempts: int
    rules: Rules

    def _caller(self, w: World) -> Iterator[tuple[str, World]]:
        c = w.caller
        if isinstance(c.life, Finished):
            return
        if isinstance(c.life, Queued):
            if c.attempt == self.attempts:
                yield "error", self._end(w, "failed")
                return
            job = Job(w.serial, (("prefill",),))
            life = advance(c.life, SentToPrefill(P))
            caller = c._replace(life=life, attempt=c.attempt + 1, job=job.id, leg=0)
            yield "prefill", w._replace(caller=caller, jobs=(*w.jobs, job), serial=w.serial + 1)
        if isinstance(c.life, Placing) and not c.leg and (c.whole or not w.memory):
            leg = Leg(w.serial, (("reserve",),), whole=c.whole)
            yield (
                "reserve",
                w._replace(caller=c._replace(leg=leg.id), legs=(*w.legs, leg), serial=w.serial + 1),
            )
        for job in w.jobs:
            if job.id == c.job and job.said:
                rest = w._replace(jobs=replaced(w.jobs, job, job._replace(said=job.said[1:])))
                yield f"caller hears {job.said[0]}", self._hears_prefill(rest, job.said[0])
        for leg in w.legs:
            if leg.id == c.leg and leg.said:
                rest = w._replace(legs=replaced(w.legs, leg, leg._replace(said=leg.said[1:])))
                yield f"caller hears {leg.said[0]}", self._hears_decode(rest, leg.said[0])

    def _hears_prefill(self, w: World, message: Message) -> World:
        c = w.caller
        match message, c.life:
            case ("started",), _:
                return w._replace(caller=c._replace(life=advance(c.life, Begun())))
            case ("first",), _:
                return self._maybe_done(w._replace(caller=c._replace(first=True)))
            case ("push failed", failed), Pushing(reservation=ours) if str(failed) == ours:
                return self._place_lost(self._close_leg(w))
            case ("push failed", _), _:
                return w
            case ("handed over", given), Pushing(reservation=ours) if str(given) == ours:
                return w._replace(caller=c._replace(life=advance(c.life, TakenOver())))
            case ("handed over", _), Decoding():
                return w
            case ("bye",), Decoding() if c.first:
                return w._replace(caller=c._replace(job=0))
            case ("lost",), Decoding() if c.first:
                return w._replace(caller=c._replace(job=0))
            case _:
                return self._attempt_lost(w)

    def _hears_decode(self, w: World, message: Message) -> World:
        c = w.caller
        match message, c.life:
            case ("reserved", reservation), Placing():
                life = advance(c.life, RoomFound(D, str(reservation)))
                w = w._replace(caller=c._replace(life=life))
                for job in w.jobs:
                    if job.id == c.job:
                        told = job._replace(heard=(*job.heard, ("push to", reservation)))
                        w = w._replace(jobs=replaced(w.jobs, job, told))
                return w
            case ((("no room",) | ("lost",)), Placing()):
                return w._replace(caller=c._replace(leg=0))
            case ("rest",), Pushing() | Decoding():
                c = c._replace(life=advance(c.life, TakenOver()), rest=True)
                return self._maybe_done(w._replace(caller=c))
            case ("lost",), Pushing():
                return self._place_lost(w)
            case ("preempted",), Pushing() | Decoding():
                return self._preempted(w)
            case _:
                return self._attempt_lost(w)

    def _maybe_done(self, w: World) -> World:
        return self._end(w, "length") if w.caller.first and w.caller.rest else w

    def _place_lost(self, w: World) -> World:
        c = w.caller
        if c.places_lost:
            return self._attempt_lost(w)
        c = c._replace(life=advance(c.life, PlaceLost()), leg=0, places_lost=1)
        return w._replace(caller=c)

    def _attempt_lost(self, w: World) -> World:
        w = self._close_leg(self._close_job(w))
        c = w.caller
        return w._replace(caller=Caller(advance(c.life, WorkerGone()), c.attempt, whole=c.whole))

    def _preempted(self, w: World) -> World:
        """As a loss, but it costs no attempt."""
        w = self._attempt_lost(w)
        again = w.caller._replace(attempt=w.caller.attempt - 1, whole=self.rules.whole)
        return w._replace(caller=again)

    def _stop(self, w: World) -> World:
        """The reader has found the end: decode hears where, and then that he is gone."""
        for leg in w.legs:
            if leg.id == w.caller.leg:
                told = leg._replace(heard=(*leg.heard, ("stop",)))
                w = w._replace(legs=replaced(w.legs, leg, told))
        return self._end(w, "stop")

    def _end(self, w: World, outcome: Any) -> World:
        w = self._close_leg(self._close_job(w))
        return w._replace(caller=Caller(advance(w.caller.life, Done(outcome)), w.caller.attempt))

    def _close_job(self, w: World) -> World:
        for job in w.jobs:
            if job.id == w.caller.job:
                left = job._replace(heard=(*job.heard, ("bye",)), said=())
                w = w._replace(jobs=replaced(w.jobs, job, left))
        return w

    def _close_leg(self, w: World) -> World:
        for leg in w.legs:
            if leg.id == w.caller.leg:
                left = leg._replace(heard=(*leg.heard, ("bye",)), said=())
                w = w._replace(legs=replaced(w.legs, leg, left))
        return w
