"""When a group gets another expert placement: the router's side of expert balancing.

A pure state machine: reports, counts and the time go in, a new state and a decision come out.
Knows nothing of sockets or of how weights move; `expert_placement.place` knows where experts go.

    group unknown -- reported --> known -- counted --> window full -- decide --> given
                                   ^                                               |
                                   '-- reported the version, or did not in time ---'

Versions are numbered over all groups and outlive the router: after a restart the next one is one
more than the highest that any live group has, so none is given before all have reported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from cluster.expert_placement import Placement, place, worthwhile
from cluster.placement_file import EVERY_GROUP, GroupPlacement

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class BalancerSettings:
    """`disable_eplb` keeps all placements; `static` (from a file) are used and never changed."""

    window_steps: int = 1000
    windows: int = 12
    most_moved_share: float = 0.09  # of a group's slots, at one rebalance
    answer_timeout_s: float = 60.0
    expert_bytes: int = 18_800_640  # weights and scales of one mxfp4 expert
    bytes_a_second: float = 45e9  # of one rank's link
    # One token through one expert: 71 MFLOP at 400 TFLOP/s, and 15.5 KB there and back.
    seconds_a_token: float = 0.5e-6
    disable_eplb: bool = False
    static: Mapping[str, GroupPlacement] = field(default_factory=dict)


@dataclass(frozen=True)
class Keep:
    """The group stays as it is, and why."""

    why: str


Decision = GroupPlacement | Keep


@dataclass(frozen=True, eq=False)
class GroupLoads:
    """What is known of one group."""

    placed: GroupPlacement
    given: tuple[int, float] | None = None  # version on its way, and since when
    windows: tuple[Floats, ...] = ()  # loads a step [L, E], newest last
    undecided: bool = False  # a window has closed since the last decision
    counts: Floats | None = None  # of the window that is open
    steps: int = 0


@dataclass(frozen=True, eq=False)
class Balancer:
    settings: BalancerSettings
    live: frozenset[str] = frozenset()
    groups: Mapping[str, GroupLoads] = field(default_factory=dict)
    highest: int = 0  # version given or reported

    def with_live(self, live: frozenset[str]) -> Balancer:
        """The groups that are up now; the others are forgotten, the highest version is not."""
        kept = {name: loads for name, loads in self.groups.items() if name in live}
        return replace(self, live=live, groups=kept)

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
            version, since = given
            over = placed.version >= version or now - since > self.settings.answer_timeout_s
            given = None if over or placed.version < known.placed.version else given
        return self._with(
            replace(known, placed=placed, given=given), max(self.highest, placed.version)
        )

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
            known = replace(known, windows=closed, undecided=True, counts=None, steps=0)
        return self._with(known, self.highest)

    def decide(self, group: str, *, now: float) -> tuple[Decision, Balancer]:
        """Another placement for the group, as given, or why it keeps its own."""
        why_not = self._why_not(group)
        if why_not is not None:
            return Keep(why_not), self
        known = self.groups[group]
        wanted: Placement | Keep
        if (static := self._static(known)) is not None:
            wanted = _as_fixed(static, known.placed.placement)
        elif not known.undecided:
            wanted = Keep("its window is not full")
        else:
            wanted = self._balanced(known)
            known = replace(known, undecided=False)
        if isinstance(wanted, Keep):
            return wanted, self._with(known, self.highest)
        version = self.highest + 1
        given = self._with(replace(known, given=(version, now)), version)
        return GroupPlacement(group, version, wanted), given

    def _why_not(self, group: str) -> str | None:
        """Why nothing may be decided for the group now."""
        if self.settings.disable_eplb:
            return "expert balancing is disabled"
        missing = sorted(self.live - self.groups.keys())
        if missing:
            return f"waiting for the first report of {', '.join(missing)}"
        if group not in self.groups:
            return f"group {group} is not live"
        known = self.groups[group]
        if known.given is not None:
            return f"version {known.given[0]} is on its way"
        if known.placed.placement.shape[1] == 1:
            return "it has one rank"
        return None

    def _static(self, known: GroupLoads) -> Placement | None:
        """The placement that the file gives the group by name, or to every group of its size."""
        if (named := self.settings.static.get(known.placed.group)) is not None:
            return named.placement
        every = self.settings.static.get(EVERY_GROUP)
        if every is None or _size(every.placement) != _size(known.placed.placement):
            return None
        return every.placement

    def _balanced(self, known: GroupLoads) -> Placement | Keep:
        """A better placement for the next window, if it saves more time than it costs."""
        settings, old = self.settings, known.placed.placement
        layers, ranks, slots = old.shape
        new = place(
            np.stack(known.windows),
            ranks=ranks,
            slots_per_rank=slots,
            previous=old,
            most_moves=int(settings.most_moved_share * layers * ranks * slots),
        )
        newest = known.windows[-1]
        saved = old.rank_loads(newest).max(-1).sum() - new.rank_loads(newest).max(-1).sum()
        saved_s = float(saved) * settings.seconds_a_token
        fetched = int(new.moves_from(old).sum(0).max()) * settings.expert_bytes
        if fetched and worthwhile(
            seconds_saved_a_step=saved_s,
            steps_until_next=settings.window_steps,
            bytes_of_busiest_rank=fetched,
            bytes_a_second=settings.bytes_a_second,
        ):
            return new
        return Keep(
            f"another placement would save {saved_s * settings.window_steps:.3f} s a window and "
            f"move {fetched / 1e6:.0f} MB to one rank"
        )

    def _with(self, known: GroupLoads, highest: int) -> Balancer:
        return replace(self, groups={**self.groups, known.placed.group: known}, highest=highest)


def _as_fixed(static: Placement, placed: Placement) -> Placement | Keep:
    if _size(static) != _size(placed):
        return Keep(
            f"its static placement is of {static.experts} experts in {static.shape}, it has "
            f"{placed.experts} in {placed.shape}"
        )
    there = np.array_equal(static.slots, placed.slots)
    return Keep("its placement is static") if there else static


def _size(placement: Placement) -> tuple[int, ...]:
    return (placement.experts, *placement.shape)
