"""The hand-over as three small state machines and what lies between them, to be explored whole.

One request, one prefill rank, one decode rank with memory for one reservation. Messages travel in
order on their stream; connections break and processes die at any moment, up to a budget. The
caller's states are the real ones (cluster.lifecycle.advance). There are no clocks: whatever only a
timeout would end shows as a deadlock. Knows nothing of rows, sockets or threads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from cluster.lifecycle import Finished, Queued
from tests.faults.protocol_caller import CallerSide
from tests.faults.protocol_decode import DecodeSide
from tests.faults.protocol_prefill import PrefillSide
from tests.faults.protocol_world import Rules, Violated, World, replaced

ALL_RULES = Rules()


class Model(CallerSide, PrefillSide, DecodeSide):
    def __init__(
        self, *, faults: int, attempts: int = 2, ends: bool = True, rules: Rules = ALL_RULES
    ) -> None:
        """`ends`: decode may preempt, and the caller may find the answer's end."""
        self.ends = ends
        self.faults = faults
        self.attempts = attempts
        self.rules = rules

    def explore(self) -> tuple[int, set[str]]:
        """All reachable worlds: how many there are, and how the request can end.

        Violated, with the way there, for one that must not be.
        """
        start = World()
        came: dict[World, tuple[World | None, str]] = {start: (None, "start")}
        todo = deque([start])
        outcomes = set()
        while todo:
            world = todo.popleft()
            try:
                steps = list(self._steps(world))
                if not steps:
                    outcomes.add(self._check_the_end(world))
            except Violated as wrong:
                raise Violated(f"{wrong}\n" + self._way(came, world)) from None
            for name, after in (*steps, *self._whims(world)):
                if after not in came:
                    came[after] = (world, name)
                    todo.append(after)
        return len(came), outcomes

    def _check_the_end(self, world: World) -> str:
        life = world.caller.life
        if not isinstance(life, Finished):
            raise Violated(f"nothing can happen any more, and the request is {life}")
        if world.jobs or world.legs or world.pushes or world.memory:
            raise Violated("memory is held for ever")
        return life.outcome

    def _way(self, came: dict[World, tuple[World | None, str]], world: World) -> str:
        names, at = [], world
        while (step := came[at])[0] is not None:
            names.append(step[1])
            at = step[0]  # type: ignore[assignment]
        return " > ".join(reversed(names)) + f"\n{world}"

    def _steps(self, world: World) -> Iterator[tuple[str, World]]:
        yield from self._caller(world)
        for job in world.jobs:
            yield from self._prefill(world, job)
        for leg in world.legs:
            yield from self._decode(world, leg)
        for push in world.pushes:
            yield from self._push(world, push)
            yield from self._receive(world, push)
        for stray in world.strays:
            yield (
                "stray lands",
                world._replace(cell=stray, strays=replaced(world.strays, stray, None)),
            )
            yield "stray is lost", world._replace(strays=replaced(world.strays, stray, None))

    def _whims(self, world: World) -> Iterator[tuple[str, World]]:
        """What may happen at any moment, but nobody can wait for."""
        if not world.left and not isinstance(world.caller.life, Finished):
            yield "caller leaves", self._end(world._replace(left=True), "cancelled")
            if self.ends and world.caller.first:
                yield "caller stops", self._stop(world._replace(left=True))
        if world.faults < self.faults:
            yield from self._faults(world._replace(faults=world.faults + 1))

    # ------------------------------------------------------------ what breaks

    def _faults(self, w: World) -> Iterator[tuple[str, World]]:
        if w.caller.job and any(job.id == w.caller.job for job in w.jobs):
            yield "cut caller-prefill", self._cut_prefill(w)
        if w.caller.leg and any(leg.id == w.caller.leg for leg in w.legs):
            yield "cut caller-decode", self._cut_decode(w)
        if w.pushes:
            yield "cut prefill-decode", self._cut_pushes(w, stray=True)
        if w.jobs:
            dead = self._lost_leg(self._cut_pushes(w, stray=False), job=True)
            yield "prefill dies", dead._replace(jobs=(), pushes=())
        if w.legs or w.memory:
            dead = self._lost_leg(self._cut_pushes(w, stray=False), job=False)
            yield (
                "decode dies",
                dead._replace(legs=(), memory=0, quarantined=False, cell=(), strays=()),
            )

    def _cut_prefill(self, w: World) -> World:
        for job in w.jobs:
            if job.id == w.caller.job:
                left = job._replace(heard=(("bye",),), said=())
                w = w._replace(jobs=replaced(w.jobs, job, left))
        return self._lost_leg(w, job=True)

    def _cut_decode(self, w: World) -> World:
        for leg in w.legs:
            if leg.id == w.caller.leg:
                left = leg._replace(heard=(("bye",),), said=())
                w = w._replace(legs=replaced(w.legs, leg, left))
        return self._lost_leg(w, job=False)

    def _lost_leg(self, w: World, *, job: bool) -> World:
        """The caller notices; what was on its way to it is lost."""
        c = w.caller
        if isinstance(c.life, Finished | Queued) or not (c.job if job else c.leg):
            return w
        if job:
            return self._hears_prefill(w, ("lost",))
        return self._hears_decode(w, ("lost",))

    def _cut_pushes(self, w: World, *, stray: bool) -> World:
        """Both ends of every push notice; a write under way may still land, or not."""
        for push in w.pushes:
            w = w._replace(pushes=replaced(w.pushes, push, None))
            if push.flying and stray:
                w = w._replace(strays=(*w.strays, (push.reservation, push.sent)))
            w = self._detached(w, push)
            if not push.giving_up:
                w = self._not_there(w, push.job, push.reservation)
        return w
