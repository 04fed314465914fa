"""When a group gets another expert placement: the router's side of expert balancing.

A pure state machine: reports, counts and the time go in, a new state and a decision come out.
Knows nothing of sockets or of how weights move; expert_question.py knows what is better.

    group unknown -- reported --> known -- counted --> window full -- ask, conclude --> given
                                   ^                                                      |
                                   '------ reported the version, or did not in time ------'

A decision is made in two: `ask` says what there is to solve, which takes milliseconds and can be
done elsewhere, and `conclude` takes the answer, if it still fits the group.

Versions are numbered over all groups and outlive the router: after a restart the next one is one
more than the highest that any live group has, so none is given before all have reported.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from cluster.config import ExpertsSection
from cluster.expert_placement import Placement
from cluster.expert_question import Answer, Question
from cluster.placement_file import EVERY_GROUP, GroupPlacement
from cluster.pools import pool_of

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Keep:
    """The group stays as it is, and why."""

    why: str


Decision = GroupPlacement | Keep


@dataclass(frozen=True, eq=False)
class GroupLoads:
    """What is known of one group."""

    placed: GroupPlacement
    given: tuple[GroupPlacement, float] | None = None  # on its way, and since when
    windows: tuple[Floats, ...] = ()  # loads a step [L, E], newest last
    undecided: bool = False  # a window has closed since the last decision
    begun: bool = False  # what was saved has been given, or there was nothing
    counts: Floats | None = None  # of the window that is open
    steps: int = 0
    closed: int = 0  # windows so far


@dataclass(frozen=True, eq=False)
class Balancer:
    """`static` placements are given and then kept; of `saved` ones new groups get theirs first."""

    settings: ExpertsSection
    static: Mapping[str, GroupPlacement] = field(default_factory=dict)
    saved: Mapping[str, GroupPlacement] = field(default_factory=dict)
    live: frozenset[str] = frozenset()
    groups: Mapping[str, GroupLoads] = field(default_factory=dict)
    highest: int = 0  # version given or reported

    def with_live(self, live: frozenset[str]) -> Balancer:
        """The groups that are up now; the others are forgotten, the highest version is not."""
        kept = {name: loads for name, loads in self.groups.items() if name in live}
        return replace(self, live=live, groups=kept)

    def with_settings(self, settings: ExpertsSection) -> Balancer:
        """The same knowledge, other rules from now on."""
        return replace(self, settings=settings)

    def reported(self, placed: GroupPlacement, *, now: float) -> Balancer:
        """A group says which placement it has; one that is not live is ignored.

        A version on its way has arrived, or is given up: after `answer_timeout_s`, or at once if
        the group is back at an older version than it had, because then it has started anew.
        """
        if placed.group not in self.live:
            return self
        known = self.groups.get(placed.group, GroupLoads(placed))
        if _size(known.placed.placement) != _size(placed.placement):
            known = GroupLoads(placed)  # another group under an old name
        given = known.given
        if given is not None:
            wanted, since = given
            over = placed.version >= wanted.version or now - since > self.settings.answer_timeout_s
            given = None if over or placed.version < known.placed.version else given
        heard = self._with(
            replace(known, placed=placed, given=given), max(self.highest, placed.version)
        )
        return replace(heard, saved=heard._saved_with(placed)) if placed.version else heard

    def counted(self, group: str, counts: npt.ArrayLike, *, steps: int) -> Balancer:
        """Tokens of each expert [L, E] in the group's last `steps` steps; full windows close.

        Counts of a group that has not reported are dropped. ValueError for another size or for
        what is no count.
        """
        known = self.groups.get(group)
        if known is None or steps < 1:
            return self
        added = np.asarray(counts, dtype=np.float64)
        placement = known.placed.placement
        if added.shape != (placement.shape[0], placement.experts):
            raise ValueError(
                f"{group}: counts {added.shape} are not of {placement.experts} experts in "
                f"{placement.shape[0]} layers"
            )
        if not (np.isfinite(added).all() and added.min() >= 0):
            raise ValueError(f"{group}: counts must be finite and not negative")
        total = added if known.counts is None else known.counts + added
        known = replace(known, counts=total, steps=known.steps + steps)
        if known.steps >= self.settings.window_steps:
            closed = (*known.windows, total / known.steps)[-self.settings.windows :]
            known = replace(
                known,
                windows=closed,
                undecided=True,
                counts=None,
                steps=0,
                closed=known.closed + 1,
            )
        return self._with(known, self.highest)

    def decide(self, group: str, *, now: float) -> tuple[Decision, Balancer]:
        """Another placement for the group, as given, or why it keeps its own."""
        question, asked = self.ask(group)
        if isinstance(question, Keep):
            return question, asked
        return asked.conclude(question.answer(), now=now)

    def ask(self, group: str) -> tuple[Question | Keep, Balancer]:
        """What is to be solved for the group, once a window, or why nothing is."""
        why_not = self.why_not(group)
        if why_not is not None:
            return Keep(why_not), self
        known = self.groups[group]
        fixed, why = self._fixed(known)
        asked = self._with(replace(known, undecided=False, begun=True), self.highest)
        question = Question(known.placed, known.windows, self.settings, fixed, why)
        return question, asked

    def conclude(self, answer: Answer, *, now: float) -> tuple[Decision, Balancer]:
        """The answer becomes the group's next version, unless the group is another by now."""
        group = answer.asked_of.group
        if answer.wanted is None:
            return Keep(answer.why), self
        known = self.groups.get(group)
        if known is None or known.given is not None or not _same(known.placed, answer.asked_of):
            return Keep("it has changed since this was asked"), self
        wanted = GroupPlacement(group, self.highest + 1, answer.wanted)
        return wanted, self._with(replace(known, given=(wanted, now)), wanted.version)

    def missing(self) -> tuple[str, ...]:
        """Live groups that have not reported."""
        return tuple(sorted(self.live - self.groups.keys()))

    def why_not(self, group: str) -> str | None:
        """Why nothing is to be decided for the group now; None if something is."""
        if self.settings.disable_eplb:
            return "expert balancing is disabled"
        if missing := self.missing():
            return f"waiting for the first report of {', '.join(missing)}"
        if group not in self.groups:
            return f"group {group} is not live"
        known = self.groups[group]
        if known.given is not None:
            return f"version {known.given[0].version} is on its way"
        if known.placed.placement.shape[1] == 1:
            return "it has one rank"
        if (static := self._static(known)) is not None:
            return _why_not_fixed(static, known.placed.placement)
        if not known.undecided and self._first(known) is None:
            return "its window is not full"
        return None

    def _fixed(self, known: GroupLoads) -> tuple[Placement | None, str]:
        """What the group shall have whatever its loads are."""
        if (static := self._static(known)) is not None:
            return static, "the file of placements says so"
        return self._first(known), "a group of this size had it before"

    def _static(self, known: GroupLoads) -> Placement | None:
        """The placement that the file gives the group by name, or to every group of its size."""
        if (named := self.static.get(known.placed.group)) is not None:
            return named.placement
        every = self.static.get(EVERY_GROUP)
        if every is None or _size(every.placement) != _size(known.placed.placement):
            return None
        return every.placement

    def _first(self, known: GroupLoads) -> Placement | None:
        """What was saved for a group that has just begun: its own, else its pool's newest."""
        if known.begun or known.placed.version > 0:
            return None
        kind = _kind(known.placed)
        fitting = [one for one in self.saved.values() if _kind(one) == kind]
        own = [one for one in fitting if one.group == known.placed.group]
        found = own or _newest(fitting)
        if not found or np.array_equal(found[0].placement.slots, known.placed.placement.slots):
            return None
        return found[0].placement

    def _saved_with(self, placed: GroupPlacement) -> Mapping[str, GroupPlacement]:
        """What new groups may begin with: of each group that is gone no more than the newest."""
        if self.saved.get(placed.group) is placed:
            return self.saved
        kind = _kind(placed)
        kept = {
            name: one for name, one in self.saved.items() if name in self.live or _kind(one) != kind
        }
        return {**kept, placed.group: placed}

    def _with(self, known: GroupLoads, highest: int) -> Balancer:
        return replace(self, groups={**self.groups, known.placed.group: known}, highest=highest)


def _why_not_fixed(static: Placement, placed: Placement) -> str | None:
    if _size(static) != _size(placed):
        return (
            f"its static placement is of {static.experts} experts in {static.shape}, it has "
            f"{placed.experts} in {placed.shape}"
        )
    return "its placement is static" if np.array_equal(static.slots, placed.slots) else None


def _newest(placements: Iterable[GroupPlacement]) -> list[GroupPlacement]:
    return sorted(placements, key=lambda one: one.version)[-1:]


def _same(one: GroupPlacement, other: GroupPlacement) -> bool:
    return one.version == other.version and _size(one.placement) == _size(other.placement)


def _kind(placed: GroupPlacement) -> tuple[object, ...]:
    """Groups of one pool and one size can have each other's placements."""
    return (pool_of(placed.group), *_size(placed.placement))


def _size(placement: Placement) -> tuple[int, ...]:
    return (placement.experts, *placement.shape)
