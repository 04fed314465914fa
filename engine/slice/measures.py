"""What is measured of the slice, and the ratios that it has to reach. Prints nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from engine.slice.config import slice_spec
from engine.slice.floors import Cost, Rates, StepShape, costs
from engine.slice.rates import measure_rates
from engine.slice.run import Clock, Slice, Step, attending_in
from engine.slice.served import Served, serve
from engine.slice.state import SliceState
from engine.slice.table import Line, lines
from engine.slice.trace import Ran, read, record
from model.options import ModelOptions
from model.packed.random_weights import random_packed

Truncation = Literal["off", "mask", "compact"]


@dataclass(frozen=True)
class Sizes:
    requests: tuple[int, ...]
    contexts: tuple[int, ...]  # positions before a decode row
    prompt: int
    chunk: int
    kept: int  # rows at a prompt's end that pass the cut
    block_tokens: int
    repeat: int
    served: int  # steps of the engine's loop


REAL = Sizes((1, 8, 64), (8192, 65536, 131072), 16384, 8192, 140, 128, 20, 100)
TINY = Sizes((1, 3), (40, 90), 96, 48, 20, 16, 1, 4)
PARTS = (1, 2, 5, 10)
"""Into how many programs a row's keys can be cut. A number that followed from the batch would be
the fastest for it, and change what attention gives a row with its neighbours."""


@dataclass(frozen=True)
class Bar:
    """A ratio, and what it has to be at least, or at most."""

    name: str
    ratio: float
    asked: float
    at_most: bool = False

    @property
    def met(self) -> bool:
        return self.ratio <= self.asked if self.at_most else self.ratio >= self.asked


@dataclass(frozen=True)
class Table:
    """One recorded step: what ran, and each op beside its floor."""

    ran: list[Ran]
    lines: list[Line]


@dataclass(frozen=True)
class Decode:
    """One step of `requests` rows, each after `context` positions. Microseconds."""

    requests: int
    context: int
    floor: float
    replayed: float
    launched: float | None  # call by call
    by_parts: Mapping[int, float]  # replayed, with a number of parts that suits this batch

    @property
    def fixed_parts(self) -> float:
        """Time over that of the fastest cut of attention. Other products of the step are cuBLAS's,
        and cut as it likes for a number of rows: this is not the cost of batch invariance.
        """
        return self.replayed / min(self.replayed, *self.by_parts.values())


@dataclass(frozen=True)
class Prefill:
    """A prompt by what of it passes the cut. Microseconds."""

    tokens: int
    whole: float  # every row passes it
    needed: float  # those that a later row or logit depends on
    truncated: float  # the last ones


class Bench:
    """The slice in one dtype on one device, ready to be measured."""

    def __init__(
        self, sizes: Sizes, device: torch.device, *, tiny: bool, fp8: bool, seed: int
    ) -> None:
        self.sizes, self.device = sizes, device
        self.spec = slice_spec(tiny=tiny)
        self._tiny = tiny
        self._options = ModelOptions(activations="fp8" if fp8 else "exact")
        self.rates: Rates = measure_rates(device)
        self._clock = Clock(device, sizes.repeat)
        self._weights = random_packed(self.spec, device, seed)
        longest = max(*sizes.contexts, sizes.prompt) + sizes.served + 2 * sizes.block_tokens
        self._state = SliceState.random(
            self.spec,
            device,
            requests=max(sizes.requests),
            length=longest,
            block_tokens=sizes.block_tokens,
            seed=seed,
        )
        self._slice = Slice.random(self.spec, self._options, self._weights, self._state)

    # ------------------------------------------------------------------ decode

    def decode(self, requests: int, context: int, *, whole: bool = True) -> Decode:
        """Without `whole` the step alone, not the other ways to make it."""
        step = self._slice.decode(requests, context)
        floor = sum(cost.seconds(self.rates) for cost in self._costs(step, requests, context))
        return Decode(
            requests,
            context,
            floor * 1e6,
            self._clock.replayed(step) * 1e6,
            self._clock.launched(step) * 1e6 if whole else None,
            self._by_parts(step) if whole else {},
        )

    def _by_parts(self, step: Step) -> dict[int, float]:
        found = {}
        for parts in PARTS:
            with attending_in(parts):
                found[parts] = self._clock.replayed(step) * 1e6
        return found

    def served(self, requests: int, context: int) -> Served:
        """The same steps in the engine's loop."""
        sizes = self.sizes
        return serve(self._slice, requests, context, sizes.served, sizes.block_tokens)

    def decode_table(self, requests: int, context: int, trace: Path) -> Table:
        """What each op of a step took as it was launched; the trace goes to `trace`."""
        step = self._slice.decode(requests, context)
        return self._table(step, self._costs(step, requests, context), trace)

    def _costs(self, step: Step, requests: int, context: int) -> list[Cost]:
        touched = self._slice.touched(step)
        return costs(self.spec, StepShape.decode(requests, context, touched))

    # ------------------------------------------------------------------ prefill

    def prefill(self) -> Prefill:
        """Without Engram, which would weigh five times what it does in the real model."""
        sizes = self.sizes
        times = {}
        forms: dict[str, tuple[Truncation, int]] = {
            "whole": ("mask", 0),
            "needed": ("off", 0),
            "truncated": ("compact", sizes.kept),
        }
        for name, (truncation, kept) in forms.items():
            options = replace(self._options, truncation=truncation)
            spec = slice_spec(tiny=self._tiny, engram=False)
            one = Slice.random(spec, options, self._weights, self._state)
            clock = Clock(self.device, max(3, sizes.repeat // 4))
            times[name] = clock.launched(one.prefill(sizes.prompt, sizes.chunk, kept)) * 1e6
        return Prefill(sizes.prompt, **times)

    def prefill_table(self, trace: Path) -> Table:
        """Of the first chunk of a prompt, all of whose rows pass the cut."""
        sizes = self.sizes
        options = replace(self._options, truncation="mask")
        one = Slice.random(self.spec, options, self._weights, self._state)
        step = one.prefill(sizes.chunk, sizes.chunk)
        return self._table(step, costs(self.spec, StepShape([0], [sizes.chunk])), trace)

    def _table(self, step: Step, floors: Sequence[Cost], trace: Path) -> Table:
        record(step, self.device, trace)
        ran = read(trace)
        return Table(ran, lines(ran, floors, self.rates))


def bars(decodes: Sequence[Decode], served: Sequence[Served], prefill: Prefill | None) -> list[Bar]:
    found = [
        Bar(
            f"decode, {one.requests} rows after {one.context}: floors / step",
            one.floor / one.replayed,
            0.45,
        )
        for one in decodes
    ]
    found += [
        Bar(
            f"decode, 1 row after {one.context}: launched / replayed",
            one.launched / one.replayed,
            2.5,
        )
        for one in decodes
        if one.requests == 1 and one.launched is not None
    ]
    found += [
        Bar(
            f"decode, {one.requests} rows after {one.context}: device waits for host",
            one.exposed,
            0.05,
            at_most=True,
        )
        for one in served
    ]
    found += [
        Bar(
            f"decode, {one.requests} rows after {one.context}: attention cut alike / fastest",
            one.fixed_parts,
            1.1,
            at_most=True,
        )
        for one in decodes
        if one.by_parts
    ]
    if prefill:
        found.append(
            Bar(
                f"prefill of {prefill.tokens}: whole / truncated",
                prefill.whole / prefill.truncated,
                1.8,
            )
        )
    return found
