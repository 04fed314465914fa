"""A step loop over a small model in float64 that works in place, and what it must answer.

In float64 only a mistake makes the two ways to compute the model choose different tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from cluster.messages import Request, Sampling, pack_ids
from decode_worker.scheduler import schedule
from engine.choice import Choice
from engine.context import Context
from engine.decode_shapes import DecodeShapes
from engine.decode_steps import DecodeSteps
from engine.executor import Executor
from engine.packed_runner import PackedRunner
from engine.request import Running, stop_ids
from engine.sampler import sample
from engine.step_loop import Execute, Outcome, StepLoop, Work
from kv_transfer.blocks import BlockPool
from kv_transfer.layout import Layout
from kv_transfer.state_memory import open_memory
from model.batch import Chunk, build_batch
from model.dense_cache import DenseCache
from model.packed.forward import PackedTransformer
from model.packed.rows import PackedRows
from model.state import state_fields
from model.weights import random_weights
from tests.engine.loops import Ears
from tests.model.cases import BY_NAME
from tests.model.packed.plain_weights import PlainExperts, PlainWeights
from tests.model.running import build, float64

CASE = BY_NAME["narrow"]  # a window of 5 and a top-k of 4: positions that fall out matter at once
BLOCK_TOKENS = 4
SHAPES = DecodeShapes(max_rows=8, max_blocks=16)


class SmallPacked(PackedTransformer):
    """`on_device`: whether it finds Engram's values itself."""

    on_device = True

    @property
    def looks_up_on_device(self) -> bool:
        return self.on_device


@cache
def packed_model(name: str, on_device: bool = True) -> SmallPacked:
    """Of that case, in float64; made once a process."""
    case = BY_NAME[name]
    with float64():
        plain: Any = PlainWeights(random_weights(case.spec, case.seed), torch.float64)
        experts: Any = PlainExperts
        model = SmallPacked(case.spec, plain, case.options, make_experts=experts)
        model.on_device = on_device
    return model


def small_model(on_device: bool = True) -> SmallPacked:
    return packed_model(CASE.name, on_device)


def a_request(length: int, draw: int = 0, /, **sampling: Any) -> Request:
    """A prompt of so many ids that mean nothing special."""
    generator = torch.Generator().manual_seed(1000 * draw + length)
    prompt = torch.randint(3, 250, (length,), generator=generator).tolist()
    sampling = {"max_tokens": 8, "ignore_stop": True} | sampling
    name = f"r{length}-{draw}"
    return Request(request_id=name, prompt=pack_ids(prompt), sampling=Sampling(**sampling))


@cache
def straight(request: Request, name: str = CASE.name) -> tuple[int, ...]:
    """Its answer by the reference: the whole prompt at once, then row by row."""
    with float64(), torch.inference_mode():
        model = build(BY_NAME[name])
        state, ids, done = DenseCache(state_fields(model.spec), 1), request.token_ids, 0
        for _ in range(request.sampling.max_tokens):
            batch = build_batch(
                [Chunk(ids, done, len(ids) - done)],
                image_token_id=model.spec.image_token_id,
                ngram=model.spec.engram_max_ngram_size,
            )
            (choice,) = sample(model.forward(batch, state), [Context(request, ids)])
            done = len(ids)
            assert isinstance(choice, Choice)
            ids = [*ids, choice.token]
    return tuple(ids[request.prompt_length :])


class Spoiled:
    """A model whose logits are changed by `spoil`, which sees their rows."""

    def __init__(
        self, model: PackedTransformer, spoil: Callable[[PackedRows, Tensor], Tensor]
    ) -> None:
        self._model, self._spoil = model, spoil

    def forward(self, rows: PackedRows, *given: Any) -> Tensor:
        return self._spoil(rows, self._model.forward(rows, *given))

    def __getattr__(self, name: str) -> object:
        return getattr(self._model, name)


class Rig:
    """A loop with an executor; `play` runs requests to their ends."""

    def __init__(
        self,
        model: PackedTransformer | None = None,
        *,
        ahead: bool = True,
        graphs: bool = True,
        block_tokens: int = BLOCK_TOKENS,
        num_blocks: int = 256,
        shapes: DecodeShapes = SHAPES,
        max_rows: int = SHAPES.max_rows,
        chunk_tokens: int = 16,
        beside_tokens: int = 8,
        ears: Ears | None = None,
        execute: Callable[[Execute], Execute] = lambda execute: execute,
    ) -> None:
        self.model = model or small_model()
        layout = Layout(state_fields(self.model.spec), block_tokens)
        slots = 2 * shapes.max_rows
        self.slab = open_memory(layout, num_blocks, slots, self.model.device)
        self.slab.blocks.zero_()
        self.slab.slots.zero_()
        self.pool = BlockPool(num_blocks, slots, block_tokens)
        self.steps = DecodeSteps(
            self.model, self.slab, shapes, name="test", graphs=graphs, run_ahead=ahead
        )
        self.executor = Executor(PackedRunner(self.model, self.slab), decoder=self.steps)
        self.ears = ears or Ears()
        self.loop = StepLoop(
            schedule=partial(
                schedule,
                chunk_tokens=chunk_tokens,
                beside_tokens=beside_tokens,
                max_rows=max_rows,
            ),
            execute=execute(self.executor),
            deliver=self.ears,
            settle=self.executor.settle,
            name="test",
        )

    def running(self, request: Request, *, length: int = 0) -> Running:
        """With a lease for all that it can need, or for `length` positions."""
        lease = self.pool.lease(length or request.longest)
        ids = stop_ids(request, self.model.spec.eos_token_id)
        return Running(request, lease, list(request.token_ids), stop_ids=ids)

    def play(self, *requests: Request) -> list[tuple[int, ...]]:
        """Their answers; all are there from the start."""
        running = [self.running(request) for request in requests]
        for one in running:
            self.loop.add(one)
        with self.turning():
            self.ears.until(lambda: self.ears.ended(*running))
        return [tuple(self.ears.tokens(one)) for one in running]

    @contextmanager
    def turning(self) -> Iterator[None]:
        self.loop.start()
        try:
            yield
        finally:
            assert self.loop.stop(10)


class Scripted:
    """An Execute that does something before a step, by the step's number."""

    def __init__(self, execute: Execute, script: dict[int, Callable[[], None]]) -> None:
        self._execute, self._script = execute, script
        self.number = 0

    def __call__(self, work: Sequence[Work]) -> Sequence[Outcome]:
        if (act := self._script.get(self.number)) is not None:
            act()
        self.number += 1
        return self._execute(work)
