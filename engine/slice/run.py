"""The slice as something that runs: a model on random weights, request state, steps to measure.

A step is a function without arguments that leaves its logits on the device. Decode steps write the
same rows each time they run, so that they can be repeated. Knows nothing of floors and tables.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from engine.slice.state import SliceState
from kernels import measure
from kernels.ops.route import Routed
from kv_transfer.state_view import view_of
from model.batch import Chunk, ForwardBatch, build_batch
from model.moe import Experts
from model.options import ModelOptions
from model.packed import layer
from model.packed.experts import PackedLocalExperts
from model.packed.forward import PackedTransformer
from model.packed.place_rows import chunk_rows, decode_rows
from model.packed.rows import Shape
from model.packed.weights import PackedWeights
from model.spec import ModelSpec

Step = Callable[[], Tensor]


class WatchedExperts:
    """Routed experts that can tell afterwards how many of them a step's rows went to."""

    def __init__(self, experts: Experts, chosen: dict[str, Tensor], name: str) -> None:
        self._experts, self._chosen, self._name = experts, chosen, name

    def __call__(self, x_TD: Tensor, routed: Routed, count: int) -> Tensor:
        self._chosen[self._name] = routed.experts
        return self._experts(x_TD, routed, count)


@dataclass(frozen=True)
class Slice:
    """One model and the state of as many requests as will be asked for."""

    spec: ModelSpec
    options: ModelOptions
    device: torch.device
    model: PackedTransformer
    state: SliceState
    _chosen: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def random(
        cls,
        spec: ModelSpec,
        options: ModelOptions,
        weights: PackedWeights,
        state: SliceState,
    ) -> Slice:
        chosen: dict[str, Tensor] = {}

        def make_experts(
            weights: PackedWeights,
            prefix: str,
            count: int,
            spec: ModelSpec,
            options: ModelOptions,
        ) -> WatchedExperts:
            experts = PackedLocalExperts(weights, prefix, count, spec, options)
            return WatchedExperts(experts, chosen, prefix)

        model = PackedTransformer(spec, weights, options, make_experts=make_experts)
        return cls(spec, options, weights.device, model, state, chosen)

    # ------------------------------------------------------------------ steps

    def decode(self, requests: int, context: int) -> Step:
        """The next token of each request, each after `context` positions."""
        batch = self._batch([(context, 1, 0)] * requests)
        held = self.state.held(requests, context + 1)
        shape = Shape(requests, requests, len(held[0].block_ids), in_place=True)
        rows = decode_rows(batch, held, shape, self.device)
        view = view_of(self.state.memory)
        return lambda: self.model.forward(rows, shape, view)

    def prefill(self, tokens: int, chunk: int, kept: int = 0) -> Step:
        """A prompt in chunks; with `kept`, only its last rows have to pass the cut layer."""
        held = self.state.held(1, tokens)
        clip = max(0, tokens - kept) if kept else 0
        view = view_of(self.state.memory)
        forwards = [
            chunk_rows(
                self._batch(
                    [(start, min(chunk, tokens - start), clip)], last=start + chunk >= tokens
                ),
                held,
                self.spec,
                self.options,
                self.device,
            )
            for start in range(0, tokens, chunk)
        ]

        def step() -> Tensor:
            for one in forwards:
                logits = self.model.forward(one.rows, one.shape, view, one.extras)
            return logits

        return step

    def touched(self, step: Step) -> dict[int, int]:
        """How many experts a step's rows go to, by layer."""
        self._chosen.clear()
        step()
        return {
            int(name.split(".")[1]): len(torch.unique(experts))
            for name, experts in self._chosen.items()
        }

    def _batch(self, parts: Sequence[tuple[int, int, int]], last: bool = True) -> ForwardBatch:
        """Of (start, count, window start) for each request; all have the same random tokens, but
        each its own at the rows that are computed.
        """
        draw = random.Random(0)
        longest = max(start + count for start, count, _ in parts)
        shared = [draw.randrange(3, self.spec.image_token_id) for _ in range(longest)]
        chunks = []
        for start, count, clip in parts:
            own = [draw.randrange(3, self.spec.image_token_id) for _ in range(count)]
            ids = [*shared[:start], *own]
            chunks.append(Chunk(ids, start, count, clip, logits="last" if last else "none"))
        return build_batch(
            chunks,
            image_token_id=self.spec.image_token_id,
            ngram=self.spec.engram_max_ngram_size,
        )


@contextmanager
def attending_in(parts: int) -> Iterator[None]:
    """Inside, forwards cut each row's keys into so many parts, as none does by itself."""
    caller: Any = layer
    kept = caller.packed_attention
    caller.packed_attention = lambda *args, **kwargs: kept(*args, **kwargs | {"parts": parts})
    try:
        yield
    finally:
        caller.packed_attention = kept


# ------------------------------------------------------------------ time


@dataclass(frozen=True)
class Clock:
    """Seconds of a step, on a GPU by events; a CPU has no graphs, and replays by calling again."""

    device: torch.device
    repeat: int

    def replayed(self, step: Step) -> float:
        if self.device.type == "cuda":
            return measure.seconds(step, self.repeat)
        return self.launched(step)

    def launched(self, step: Step) -> float:
        """As it is launched, call by call."""
        if self.device.type == "cuda":
            return measure.median(step, self.repeat)
        step()
        times = []
        for _ in range(self.repeat):
            begin = time.perf_counter()
            step()
            times.append(time.perf_counter() - begin)
        return sorted(times)[len(times) // 2]
