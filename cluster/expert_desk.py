"""The router's desk for experts: ranks report to it, and it answers with placements.

    a report --> the group's words --> balancer --> a question --> answered in a thread --+
        ^                                 ^                                               |
        '-- answer: the version given ----'------------------- concluded <----------------'

Soft state: a rank tells a new router everything. Nothing here is on the way of a route: a report
costs the loop a fraction of a millisecond, and questions are answered in a thread.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from cluster import placement_file
from cluster.config import ExpertsSection
from cluster.errors import ProtocolError, StartupError
from cluster.expert_balancer import Balancer, Keep
from cluster.expert_history import ExpertHistory
from cluster.expert_messages import (
    ExpertBalance,
    ExpertDecision,
    ExpertPlacement,
    ExpertReport,
    GroupBalance,
)
from cluster.expert_question import Answer
from cluster.expert_tables import packed_counts, table_of
from cluster.expert_view import in_words, render_layers
from cluster.expert_windows import GroupWords
from cluster.messages import Member, WireMessage
from cluster.placement_file import GroupPlacement
from cluster.pools import group_of, pool_of
from cluster.stream import Stream

logger = logging.getLogger(__name__)


class ExpertDesk:
    def __init__(
        self, settings: ExpertsSection, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`clock` in seconds; what is shown to people has the time of day."""
        self._balancer = Balancer(settings)
        self._clock = clock
        self._words: dict[str, GroupWords] = {}
        self._seats: dict[tuple[str, int], Stream] = {}  # who speaks for a rank
        self._news = asyncio.Event()  # something may be decided, or is to be saved
        self._to_save = False
        self.history = ExpertHistory()

    async def open(self) -> None:
        """Reads the files. StartupError for placements that were asked for and cannot be read."""
        settings = self._balancer.settings
        static = saved = {}
        try:
            if settings.placement_file:
                path = Path(settings.placement_file)
                static = await asyncio.to_thread(placement_file.read, path)
        except (OSError, ValueError) as error:
            raise StartupError(f"experts.placement_file: {error}") from error
        try:
            if settings.save_file and Path(settings.save_file).exists():
                saved = await asyncio.to_thread(placement_file.read, Path(settings.save_file))
        except (OSError, ValueError) as error:
            logger.warning("experts.save_file: groups begin without it: %s", error)
        self._balancer = Balancer(settings, static, saved)

    def reconfigure(self, settings: ExpertsSection) -> None:
        """Decides by these from now on; files stay those that were read."""
        self._balancer = self._balancer.with_settings(settings)
        self._news.set()

    def see(self, members: Iterable[Member]) -> None:
        """Which ranks there are. A group that leaves gets nothing more."""
        live = frozenset(
            group_of(one.endpoint.name) for one in members if one.balanced and not one.draining
        )
        if live == self._balancer.live:
            return
        self._balancer = self._balancer.with_live(live)
        self.history.keep_only(live)
        for words in self._words.values():  # some have spoken before they were seen
            self._take(words)
        self._news.set()

    async def follow(self, stream: Stream, report: ExpertReport) -> None:
        """One life of one rank, from its first report to the end of its stream.

        ProtocolError for a report that cannot be.
        """
        seat = report.group, report.index
        told = report.version
        self._seats[seat] = stream
        try:
            message: WireMessage | None = report
            while isinstance(message, ExpertReport):
                if (message.group, message.index) != seat:
                    raise ProtocolError(f"{seat} reports as {message.group}/{message.index}")
                self._hear(message)
                given = self._given(message)
                if given is not None and given.version > told:
                    told = given.version
                    await stream.send(
                        ExpertPlacement(
                            group=given.group,
                            version=given.version,
                            table=table_of(given.placement),
                        )
                    )
                message = await stream.receive()
        finally:
            if self._seats.get(seat) is stream:  # else it reports on a newer connection
                del self._seats[seat]
                self._leave(*seat)

    async def run(self) -> None:
        """Decides, until cancelled."""
        while True:
            await self._news.wait()
            self._news.clear()
            for group in sorted(self._balancer.live):
                try:
                    await self._decide(group)
                except Exception:  # a group that cannot be balanced goes on as it is
                    logger.exception("%s keeps its placement", group)
            if self._to_save:
                self._to_save = False
                await self._save()

    def balance(self) -> ExpertBalance:
        """What is known of every group, for people."""
        return ExpertBalance(
            groups=tuple(self._balance_of(name) for name in sorted(self._balancer.groups)),
            waiting_for=self._balancer.missing(),
        )

    def imbalance(self) -> dict[str, float]:
        """By pool: busiest rank over mean in the newest windows, mean of layers and groups."""
        of_pool: dict[str, list[float]] = {}
        for name, known in self._balancer.groups.items():
            if known.windows:
                mean = known.placed.placement.imbalance(known.windows[-1]).mean()
                of_pool.setdefault(pool_of(name), []).append(float(mean))
        return {pool: sum(means) / len(means) for pool, means in of_pool.items()}

    # ---------------------------------------------------------------- inside

    def _hear(self, report: ExpertReport) -> None:
        words = self._words.get(report.group)
        if words is None:
            words = self._words[report.group] = GroupWords(report.group)
        try:
            words.hear(report)
        except ValueError as error:
            raise ProtocolError(str(error)) from error
        self._take(words)

    def _take(self, words: GroupWords) -> None:
        """What the group says as a whole goes to the balancer."""
        placed = words.placed
        if placed is None:
            return
        before = self._balancer.groups.get(words.group)
        self._balancer = self._balancer.reported(placed, now=self._clock())
        if before is not None and before.given is not None:
            wanted, since = before.given
            after = self._balancer.groups[words.group]
            if after.given is None:
                self._note_end(words, placed, wanted, self._clock() - since)
        taken = words.take()
        if taken is not None:
            counts, steps = taken
            self._balancer = self._balancer.counted(words.group, counts, steps=steps)
        self._news.set()

    def _leave(self, group: str, index: int) -> None:
        words = self._words.get(group)
        if words is not None:
            words.forget(index)
            if not words.ranks:
                del self._words[group]

    def _given(self, report: ExpertReport) -> GroupPlacement | None:
        known = self._balancer.groups.get(report.group)
        if known is None or known.given is None or known.given[0].version <= report.version:
            return None
        return known.given[0]

    async def _decide(self, group: str) -> None:
        question, self._balancer = self._balancer.ask(group)
        if isinstance(question, Keep):
            return
        began = time.perf_counter()
        answer = await asyncio.to_thread(question.answer)
        seconds = time.perf_counter() - began
        decision, self._balancer = self._balancer.conclude(answer, now=self._clock())
        told = _told(decision, answer, seconds)
        self.history.note(group, told)
        logger.info("%s: %s", group, in_words(told))
        if self._balancer.settings.show_detail:
            logger.info("%s\n%s", group, render_layers(told.before, told.after, told.moved))

    def _note_end(
        self, words: GroupWords, placed: GroupPlacement, wanted: GroupPlacement, seconds: float
    ) -> None:
        """A given placement has arrived, or is waited for no longer."""
        arrived = placed.version == wanted.version
        self.history.note(
            words.group,
            ExpertDecision(
                at=time.time(),
                outcome="arrived" if arrived else "given_up",
                version=wanted.version,
                why="" if arrived else f"after {seconds:.1f} s the group has {placed.version}",
                seconds=seconds,
                stall_s=words.stall_s if arrived else 0.0,
            ),
            moved_bytes=words.moved_bytes if arrived else 0,
        )
        self._to_save |= arrived

    async def _save(self) -> None:
        """What groups have, and of pools that have none now what they had."""
        path = self._balancer.settings.save_file
        if not path:
            return
        try:
            placements = tuple(self._balancer.saved.values())
            await asyncio.to_thread(placement_file.write, Path(path), placements)
        except OSError as error:
            logger.warning("placements are not saved: %s", error)

    def _balance_of(self, name: str) -> GroupBalance:
        known = self._balancer.groups[name]
        words = self._words.get(name)
        placement = known.placed.placement
        newest, steps = known.windows[-1:], self._balancer.settings.window_steps
        return GroupBalance(
            group=name,
            version=known.placed.version,
            given=known.given[0].version if known.given else None,
            table=table_of(placement),
            loads=packed_counts(np.rint(newest[0] * steps), steps) if newest else None,
            imbalance=tuple(placement.imbalance(newest[0]).tolist()) if newest else (),
            windows=known.closed,
            steps=known.steps,
            doing=self._balancer.why_not(name) or "its window is full",
            preparing=words.preparing if words else "",
            decisions=self.history.of(name),
        )


def _told(decision: GroupPlacement | Keep, answer: Answer, seconds: float) -> ExpertDecision:
    kept = decision if isinstance(decision, Keep) else None
    placed = answer.asked_of if isinstance(decision, Keep) else decision
    return ExpertDecision(
        at=time.time(),
        outcome="kept" if kept else "given",
        version=placed.version,
        why=kept.why if kept else answer.why,
        before=tuple(answer.before.tolist()),
        after=tuple(answer.after.tolist()),
        moved=tuple(answer.moved.tolist()),
        seconds=seconds,
    )
