"""One thread that turns: take commands, schedule, execute, deliver. Knows no torch, no sockets.

A request whose lease cannot grow waits, or is preempted; engine/room.py decides.
It never dies from a request's error. A step that fails for one request alone breaks that request;
a step that fails for several starts each of them again, alone, from its token ids: the guilty one
fails by itself and its neighbours' answers stay right.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from cluster.errors import ClusterError, WorkerLost
from cluster.messages import PromptLogprobs
from engine.choice import Choice
from engine.expert_exchange import GroupLost
from engine.request import Broken, End, Preempted, Removed, Running, Settle, settled
from engine.room import make_room
from engine.schedule import Grant, Progress, Schedule
from engine.scored import Scored

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Work:
    """One request's part of a step."""

    running: Running
    grant: Grant

    @property
    def scored(self) -> range:
        """Positions whose log-probabilities this part's rows must give."""
        if self.running.output_length:
            return range(0)
        owed, start = self.running.request.scored, self.grant.start
        return range(start + 1, min(start + 1 + self.grant.count, owed.stop))


Outcome = Choice | ClusterError | Scored | None
"""Of one request's part: its next token, its own error, or nothing yet; or what it has scored."""

Execute = Callable[[Sequence[Work]], Sequence[Outcome]]


@dataclass(frozen=True)
class News:
    """What one step has changed for one request."""

    running: Running
    done: int
    choice: Choice | None = None
    prompt: PromptLogprobs | None = None
    end: End | None = None


Deliver = Callable[[Sequence[News]], None]
"""Called in the loop's thread: once a step with all its news, and when a request starts."""


class Pace(Protocol):
    """What other loops, whose steps are made together with this one's, ask of it."""

    @property
    def awake(self) -> bool:
        """The loop must execute now, even if it has nothing to run."""
        ...

    def listen(self, nudge: Callable[[], None]) -> None:
        """`nudge` is called, in any thread, when `awake` has become true."""
        ...

    def leave(self) -> None:
        """Returns when the others do not need this loop any more. In the loop's thread."""
        ...


Command = tuple[Literal["add", "remove"], Running]


class StepLoop:
    """Runs whatever it has been given until told to stop; parks while it has nothing to run."""

    def __init__(
        self,
        *,
        schedule: Schedule,
        execute: Execute,
        deliver: Deliver,
        name: str,
        pace: Pace | None = None,
        settle: Settle = settled,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """With a `pace`, `execute` also runs steps without work, when the pace asks for them.

        `settle` is called with every request before its end is told or its memory is taken: an
        executor may have begun more than it was asked for, or not waited for its device.
        """
        self._schedule = schedule
        self._execute = execute
        self._deliver = deliver
        self._name = name
        self._pace = pace
        self._settle = settle
        self._clock = clock
        self._commands: deque[Command] = deque()
        self._stopping = False
        self._ended = False
        self._wake = threading.Condition()
        self._running: list[Running] = []  # in order of arrival
        self._thread = threading.Thread(target=self._run, name=f"engine {name}", daemon=True)
        self._turns = 0  # grants so far
        self._returns = 0  # times that memory came back
        self._starved_at: int | None = None  # their number when nobody could run for want of it
        self.steps = 0
        self.moved_at = clock()  # when it last began or ended a step, or was woken
        self.death: BaseException | None = None
        if pace is not None:
            pace.listen(self._nudge)

    # ---------------------------------------------------------------- from any thread

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def add(self, running: Running) -> bool:
        """False when the loop has ended: the request was not taken and gets no end."""
        return self._tell(("add", running))

    def remove(self, running: Running) -> None:
        """It leaves before the next step; a request that has left already is no error."""
        self._tell(("remove", running))

    def memory_is_back(self) -> None:
        """Blocks were freed: who waits for some may try again."""
        with self._wake:
            self._returns += 1
            self._wake.notify()

    @property
    def starved(self) -> bool:
        """Everybody waits for memory that others hold outside this loop."""
        return bool(self._running) and self._starved_at == self._returns

    def stop(self, timeout_s: float) -> bool:
        """End after the step in progress; False if that has not ended in time."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _nudge(self) -> None:
        with self._wake:
            self._wake.notify()

    def _tell(self, command: Command) -> bool:
        with self._wake:
            if self._ended:
                return False
            self._commands.append(command)
            self._wake.notify()
            return True

    # ---------------------------------------------------------------- in the loop's thread

    def _run(self) -> None:
        try:
            while (commands := self._next_commands()) is not None:
                news = self._obey(commands) + self._step()
                self.moved_at = self._clock()
                if news:
                    self._settle([one.running for one in news if one.end is not None])
                    self._deliver(news)
        except BaseException as error:  # our own mistake: say so, and let nobody wait for it
            logger.exception("%s: the engine's loop has died", self._name)
            self.death = error
        finally:
            self._part_from_all()
        if self._pace is not None and self.death is None:
            self._leave(self._pace)

    def _leave(self, pace: Pace) -> None:
        try:
            pace.leave()
        except GroupLost as error:  # the others did not wait for us either
            logger.info("%s: left its group: %s", self._name, error)

    def _next_commands(self) -> list[Command] | None:
        """Parks until there is something to do; None when told to stop."""
        with self._wake:
            while not (self._stopping or self._commands or self._can_run() or self._is_asked()):
                self._wake.wait()
            self.moved_at = self._clock()
            if self._stopping:
                return None
            commands = list(self._commands)
            self._commands.clear()
            return commands

    def _can_run(self) -> bool:
        return bool(self._running) and not self.starved

    def _is_asked(self) -> bool:
        return self._pace is not None and self._pace.awake

    def _obey(self, commands: Sequence[Command]) -> list[News]:
        news = []
        for verb, running in commands:
            if verb == "add":
                self._running.append(running)
            elif running in self._running:
                self._running.remove(running)
                news.append(News(running, running.done, end=Removed()))
        return news

    def _step(self) -> list[News]:
        returns = self._returns
        room = make_room(
            self._running,
            self._schedule(
                [
                    Progress(index, one.done, len(one.token_ids), one.turn, one.alone)
                    for index, one in enumerate(self._running)
                ]
            ),
            self._settle,
        )
        preempted = [News(one, one.done, end=Preempted()) for one in room.preempted]
        work = [Work(self._running[grant.index], grant) for grant in room.grants]
        self._starved_at = None if work or preempted else returns
        news = preempted + (self._run_step(work) if work or self._is_asked() else [])
        gone = {id(one.running) for one in news if one.end is not None}
        self._running = [running for running in self._running if id(running) not in gone]
        return news

    def _run_step(self, work: Sequence[Work]) -> list[News]:
        self._announce([one.running for one in work if not one.running.started])
        for one in work:
            self._turns += 1
            one.running.turn = self._turns
        try:
            outcomes: Sequence[Outcome] = self._execute(work)
        except GroupLost:
            raise
        except Exception as error:
            if not work:
                raise
            news = self._blame(work, error)
        else:
            news = [self._account(*pair) for pair in zip(work, outcomes, strict=True)]
        self.steps += bool(work)
        return news

    def _announce(self, starting: Sequence[Running]) -> None:
        """Said before the step: a place for the state is found while the first chunk runs."""
        for running in starting:
            running.started = True
        if starting:
            self._deliver([News(running, running.done) for running in starting])

    def _account(self, work: Work, outcome: Outcome) -> News:
        running, prompt = work.running, None
        if isinstance(outcome, Scored):
            prompt, outcome = outcome.prompt, outcome.next
        if isinstance(outcome, ClusterError):
            return News(running, running.done, end=Broken(outcome))
        running.done = work.grant.start + work.grant.count
        if outcome is None:
            return News(running, running.done, prompt=prompt)
        running.alone = False
        end = running.append(outcome.token)
        return News(running, running.done, outcome, prompt, end)

    def _blame(self, work: Sequence[Work], error: Exception) -> list[News]:
        logger.error("%s: a step of %d requests failed", self._name, len(work), exc_info=error)
        if len(work) > 1:
            for one in work:
                one.running.restart_alone()
            return []
        running = work[0].running
        what = f"{type(error).__name__}: {error}"
        broken = Broken(
            ClusterError(
                f"{running.request.request_id}: the engine of {self._name} failed on it ({what}); "
                "other requests go on"
            )
        )
        return [News(running, running.done, end=broken)]

    def _part_from_all(self) -> None:
        """Every request ever given to the loop gets its end, also when the loop ends first."""
        with self._wake:
            self._ended = True
            added = [running for verb, running in self._commands if verb == "add"]
            self._commands.clear()
        left = self._running + added
        self._running = []
        end: End = Removed()
        if self.death is not None:
            end = Broken(WorkerLost(f"the engine of {self._name} has died: {self.death!r}"))
        if left:
            self._settle(left)
            self._deliver([News(running, running.done, end=end) for running in left])
