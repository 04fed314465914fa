"""Steps played as graphs: one launch instead of hundreds. Knows no rows, requests or models.

A graph is of one shape and uses the same memory at every replay, so a step takes what it works on
from fixed tensors and leaves its results in such.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from engine.decode_shapes import holds
from model.packed.rows import Shape

logger = logging.getLogger(__name__)

Step = Callable[[Shape], None]
"""Queues one step of that shape on the device."""

_PATIENCE = 512  # seconds of steps: a capture stops everybody for a tenth of one, or more
_MOST = 512  # graphs; each takes some megabytes of the driver
_REPORT_S = 5.0


class Graph(NamedTuple):
    """Of one shape."""

    replay: Callable[[], None]
    nbytes: int  # about what it takes of the device's memory


Capture = Callable[[Shape], Graph]
"""Makes a step's graph, without any effect on what steps read and write. RuntimeError: it cannot
be made."""


class Player(Protocol):
    """Plays steps. Used by one thread at a time."""

    @property
    def captured(self) -> int:
        """Graphs that there are."""
        ...

    @property
    def nbytes(self) -> int:
        """About what they take of the device's memory."""
        ...

    @property
    def replayed(self) -> int:
        """Steps that were played by a graph."""
        ...

    @property
    def launched(self) -> int:
        """The other steps."""
        ...

    def choose(self, wanted: Shape) -> Shape:
        """The shape in which a step of the wanted one is best played: the same, or a larger."""
        ...

    def play(self, shape: Shape) -> None: ...

    def prepare(self, shapes: Sequence[Shape]) -> None:
        """Makes these shapes ready, before anybody waits."""
        ...


class Launches:
    """Plays steps launch by launch, on any device."""

    captured = nbytes = replayed = 0

    def __init__(self, step: Step) -> None:
        self._step = step
        self.launched = 0

    def choose(self, wanted: Shape) -> Shape:
        return wanted

    def play(self, shape: Shape) -> None:
        self.launched += 1
        self._step(shape)

    def prepare(self, shapes: Sequence[Shape]) -> None:
        """Nothing needs to be made."""


class Graphs:
    """Plays steps by graphs of shapes that were prepared, and of those that are wanted often.

    Until a shape has its own graph, a larger one does its steps, padded further. A graph that
    cannot be made is a fault of the forward, or memory is short: it is said, no more are made, and
    shapes without any are launched.
    """

    def __init__(self, step: Step, capture: Capture, name: str, patience: int = _PATIENCE) -> None:
        """`patience`: how often a larger graph stands in for a shape before it gets its own."""
        self._patience = patience
        self._step, self._capture, self._name = step, capture, name
        self._graphs: dict[Shape, Graph] = {}
        self._wanted: Counter[Shape] = Counter()
        self._most = _MOST
        self.nbytes = self.replayed = self.launched = 0

    @property
    def captured(self) -> int:
        return len(self._graphs)

    def choose(self, wanted: Shape) -> Shape:
        if wanted in self._graphs:
            return wanted
        self._wanted[wanted] += 1
        larger = [shape for shape in self._graphs if holds(shape, wanted)]
        full = self.captured >= self._most
        if larger and (full or self._wanted[wanted] < self._patience):
            return min(larger, key=lambda shape: (shape.rows, shape.blocks))
        if not full:
            self._add(wanted)
        return wanted

    def play(self, shape: Shape) -> None:
        if (graph := self._graphs.get(shape)) is None:
            self.launched += 1
            self._step(shape)
        else:
            self.replayed += 1
            graph.replay()

    def prepare(self, shapes: Sequence[Shape]) -> None:
        began_at = said_at = time.monotonic()
        for number, shape in enumerate(shapes):
            if shape not in self._graphs and self.captured < self._most:
                self._add(shape)
            if (now := time.monotonic()) - said_at > _REPORT_S:
                said_at = now
                logger.info("%s: graph %d of %d is captured", self._name, number + 1, len(shapes))
        logger.info(
            "%s: %d graphs of decode steps captured in %.1f s, %.0f MiB",
            self._name,
            self.captured,
            time.monotonic() - began_at,
            self.nbytes / 2**20,
        )

    def _add(self, shape: Shape) -> None:
        try:
            graph = self._capture(shape)
        except RuntimeError as error:
            self._most = self.captured
            logger.warning(
                "%s: no graph of %s, and no more from now on; steps without one are launched: %s",
                self._name,
                shape,
                error,
            )
            return
        self._graphs[shape] = graph
        self.nbytes += graph.nbytes
