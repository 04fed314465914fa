"""The physical experts of one rank: what sits in its slots, and how that changes while it runs.

    placed ---- offer ----> fetching, in a thread ----> prepared ----> switched, between two steps
                   ^                |                                  that all ranks agree on
                   '-- newer offer -'

Nothing that runs is touched before the switch: moved experts come into memory of their own. Knows
nothing of routing, of other ranks' memory, or of who decides on placements.
"""

from __future__ import annotations

import logging
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cluster.placement_file import GroupPlacement
from engine.experts import LayerSlots, SlotWeights

logger = logging.getLogger(__name__)

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Moved:
    """One expert that a rank is to hold and does not hold yet."""

    layer: int
    expert: int
    name: str  # of its weights in the checkpoint, without the last part
    holders: tuple[int, ...]  # ranks of the group that hold it now


Fetch = Callable[[Moved], SlotWeights | None]
"""Brings an expert from a peer; None: not from there, read it from the checkpoint. In a thread of
its own; what it raises ends the preparation of that placement."""


@dataclass(frozen=True)
class Switch:
    """The last change of placement on this rank."""

    version: int
    experts: int  # slots that got other weights
    nbytes: int  # fetched from elsewhere
    fetch_s: float  # from the offer until all was here
    stall_s: float  # between two steps, for putting them in place


class Prepared(NamedTuple):
    """What ranks compare before they switch: equal ones are the same placement."""

    version: int = 0
    digest: int = 0  # of the table

    @classmethod
    def of(cls, wanted: GroupPlacement) -> Prepared:
        slots = np.ascontiguousarray(wanted.placement.slots, dtype=np.int64)
        return cls(wanted.version, zlib.crc32(slots.tobytes()))


NOTHING = Prepared()


class ExpertSlots:
    """Thread-safe; one a rank."""

    def __init__(self, placed: GroupPlacement, *, index: int, fetch: Fetch | None = None) -> None:
        """`placed` is where the group starts; `index` is this rank's place in it."""
        self._index = index
        self._fetch = fetch or (lambda moved: None)
        self._placed = placed
        self._layers: list[LayerSlots] = []
        self._lock = threading.Lock()
        self._preparation: _Preparation | None = None  # the newest
        self._announced: _Preparation | None = None  # what the other ranks were told of
        self._counts = np.zeros((placed.placement.shape[0], placed.placement.experts), np.int64)
        self._steps = 0
        self.last_switch: Switch | None = None
        self.on_prepared: Callable[[], None] = lambda: None  # called in the fetching thread

    # ---------------------------------------------------------------- from any thread

    @property
    def placed(self) -> GroupPlacement:
        """Group, version and placement now in use."""
        return self._placed

    def take_counts(self) -> tuple[Ints, int]:
        """Tokens by logical expert [L, E] of this rank's own requests since the last call, and the
        group's steps since then."""
        with self._lock:
            counts, steps = self._counts, self._steps
            self._counts, self._steps = np.zeros_like(counts), 0
        return counts, steps

    def offer(self, wanted: GroupPlacement) -> None:
        """Begin to bring what `wanted` needs here; a newer offer replaces one not yet switched.

        Offering again what is in use or on its way changes nothing. ValueError for another group,
        another size, or a version that is not newer.
        """
        with self._lock:
            self._check(wanted)
            if self._is_known(wanted):
                return
            if self._preparation is not None:
                self._preparation.given_up = True
            self._preparation = _Preparation(wanted)
            self._start(self._preparation)

    def preparing(self) -> str | None:
        """What is on its way and how far it is, for people; None if nothing is."""
        newest = self._preparation
        return None if newest is None else str(newest)

    # ---------------------------------------------------------------- from the engine's thread

    def add_layer(self, layer: LayerSlots) -> None:
        """While the model is built, in the order of its layers."""
        self._layers.append(layer)

    def announce(self) -> Prepared:
        """What this rank could switch to at this step; it is kept ready until the next call."""
        with self._lock:
            newest = self._preparation
            self._announced = newest if newest is not None and newest.done else None
            return NOTHING if self._announced is None else Prepared.of(self._announced.wanted)

    def count(self, counts_LE: Ints) -> None:
        """One step of the group, and this rank's tokens in it."""
        with self._lock:
            self._counts += counts_LE
            self._steps += 1

    def switch(self, agreed: Prepared) -> None:
        """Use what all ranks have announced, from this step on."""
        with self._lock:
            chosen = self._announced
            assert chosen is not None
            assert Prepared.of(chosen.wanted) == agreed, "agreed on what was not announced"
            began = time.monotonic()
            changed = 0
            for layer, slot, expert in self._wrong_slots(chosen.wanted):
                self._layers[layer].put(slot, chosen.brought[layer, expert])
                changed += 1
            assert not list(self._wrong_slots(chosen.wanted)), "a slot holds another expert"
            self._placed, self._announced = chosen.wanted, None
            self.last_switch = Switch(
                version=chosen.wanted.version,
                experts=changed,
                nbytes=chosen.nbytes,
                fetch_s=chosen.seconds,
                stall_s=time.monotonic() - began,
            )
            if self._preparation is chosen:
                self._preparation = None
            elif self._preparation is not None and self._preparation.done:
                self._start(self._preparation)  # it was made for the slots as they were
        logger.info("%s/%d: %s", self._placed.group, self._index, self.last_switch)

    # ---------------------------------------------------------------- inside, with the lock

    def _check(self, wanted: GroupPlacement) -> None:
        placed, new, old = self._placed, wanted.placement, self._placed.placement
        if wanted.group != placed.group:
            raise ValueError(f"a placement of {wanted.group} was offered to {placed.group}")
        if (new.shape, new.experts) != (old.shape, old.experts):
            raise ValueError(
                f"version {wanted.version} is of {new.experts} experts in {new.shape}; "
                f"{placed.group} has {old.experts} in {old.shape}"
            )
        newest = self._preparation.wanted if self._preparation is not None else placed
        if wanted.version < newest.version:
            raise ValueError(
                f"version {wanted.version} was offered to {placed.group}, which has or fetches "
                f"version {newest.version}"
            )
        if wanted.version == newest.version and Prepared.of(wanted) != Prepared.of(newest):
            raise ValueError(f"there are two placements of version {wanted.version}")

    def _is_known(self, wanted: GroupPlacement) -> bool:
        newest = self._preparation.wanted if self._preparation is not None else self._placed
        return wanted.version == newest.version

    def _start(self, preparation: _Preparation) -> None:
        preparation.done = False
        name = f"experts of {preparation.wanted.group}/{self._index}"
        threading.Thread(target=self._prepare, args=(preparation,), name=name, daemon=True).start()

    def _wrong_slots(self, wanted: GroupPlacement) -> Iterator[tuple[int, int, int]]:
        """Layer, slot and wanted expert of each slot of this rank that holds another one."""
        for number, layer in enumerate(self._layers):
            for slot, expert in enumerate(wanted.placement.slots[number, self._index].tolist()):
                if not layer.holds(slot, expert):
                    yield number, slot, expert

    # ---------------------------------------------------------------- in a thread of its own

    def _prepare(self, preparation: _Preparation) -> None:
        try:
            while missing := self._missing(preparation):
                for layer, expert in missing:
                    if preparation.given_up:
                        return
                    preparation.brought[layer, expert] = self._bring(preparation, layer, expert)
        except Exception as error:  # whatever a peer or a disk can bring about
            logger.exception("%s: %s cannot be prepared", preparation.wanted.group, preparation)
            preparation.error = f"{type(error).__name__}: {error}"
            return
        self.on_prepared()

    def _missing(self, preparation: _Preparation) -> list[tuple[int, int]]:
        """Layers and experts yet to be brought; with none of them left it is done."""
        with self._lock:
            needed = {(layer, expert) for layer, _, expert in self._wrong_slots(preparation.wanted)}
            missing = sorted(needed - preparation.brought.keys())
            preparation.needed = len(preparation.brought) + len(missing)
            if not missing:
                preparation.done = True
                preparation.seconds = time.monotonic() - preparation.began
            return missing

    def _bring(self, preparation: _Preparation, number: int, expert: int) -> SlotWeights:
        layer = self._layers[number]
        with self._lock:  # so that no switch meets the copying
            if (own := layer.copy_of(expert)) is not None:
                return own
            holders = np.nonzero((self._placed.placement.slots[number] == expert).any(-1))[0]
        moved = Moved(number, expert, layer.name(expert), tuple(holders.tolist()))
        brought = self._fetch(moved) or layer.read(expert)
        if not layer.fits(expert, brought):
            raise ValueError(f"{brought.name} was brought for {moved.name}, or has another shape")
        preparation.nbytes += brought.nbytes
        return brought


class _Preparation:
    """A placement on its way to one rank."""

    def __init__(self, wanted: GroupPlacement) -> None:
        self.wanted = wanted
        self.began = time.monotonic()
        self.seconds = 0.0
        self.brought: dict[tuple[int, int], SlotWeights] = {}  # by layer and expert
        self.needed = 0
        self.nbytes = 0
        self.done = self.given_up = False
        self.error = ""

    def __str__(self) -> str:
        what = f"version {self.wanted.version}: "
        if self.error:
            return f"{what}failed: {self.error}"
        if self.done:
            return f"{what}ready, waits for the other ranks"
        return f"{what}{len(self.brought)} of {self.needed} experts are here"
