"""What both kinds of rank are: a model, its memory, an engine, a socket, and a life.

A rank is a plain object on an asyncio loop; it knows nothing of Ray. Its kind decides what it
answers on the socket. Ending a request's stream, from either side, ends what the request owns.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import asdict
from typing import Any, ClassVar

import torch

from cluster.config import ClusterConfig, EngineSection
from cluster.errors import Draining, StartupError
from cluster.messages import (
    Address,
    Endpoint,
    Generate,
    Hello,
    Load,
    Member,
    Prefill,
    Reserve,
    Role,
    WireMessage,
)
from cluster.reporter import Reporter
from cluster.wire import Identity, Peers, Stream, new_incarnation, serve
from engine.admission import Admission
from engine.engine import Engine, Health
from engine.executor import Executor, Model
from engine.request import Limits
from engine.schedule import Schedule
from engine.tasks import beside
from kv_transfer.blocks import BlockPool
from kv_transfer.layout import Layout
from kv_transfer.open_transport import open_transport
from kv_transfer.slab import Slab
from kv_transfer.transport import Transport
from model.load import load_model
from model.state import state_fields

FindRouter = Callable[[], Awaitable[Address | None]]
OpenTransport = Callable[..., Transport]


class Rank(ABC):
    """start() -> it serves; drain() -> it finishes what it has; stop() -> it is gone."""

    role: ClassVar[Role]

    def __init__(
        self,
        *,
        config: ClusterConfig,
        name: str,
        secret: bytes,
        find_router: FindRouter,
        model: Model | None = None,
        transport: OpenTransport = open_transport,
    ) -> None:
        """`model` is one that is loaded already, to be shared by ranks of one process."""
        self.config = config
        self.name = name
        self.draining = False
        self._model = model
        self._open_transport = transport
        self._find_router = find_router
        self.incarnation = new_incarnation()
        self._identity = Identity(self.role, self.incarnation, secret)
        self._requests: set[asyncio.Task[Any]] = set()
        self._handing_back = False

    @property
    @abstractmethod
    def section(self) -> EngineSection:
        """The engine's sizes in this pool."""

    @property
    @abstractmethod
    def schedule(self) -> Schedule:
        """Who runs in the next step."""

    @abstractmethod
    def transfers(self) -> AbstractAsyncContextManager[object]:
        """This kind's end of the transfer, for as long as the rank lives."""

    @abstractmethod
    async def answer(self, stream: Stream, first: WireMessage, peer: Hello) -> None:
        """Serve one stream; a ClusterError is sent to the peer."""

    def may_admit(self) -> bool:
        """Whether requests that wait for blocks may have them now."""
        return True

    # ---------------------------------------------------------------- life

    async def start(self) -> Endpoint:
        """Load, listen, report. Raises StartupError for a configuration that cannot work."""
        torch.set_num_threads(self.section.threads)
        model = self._model
        if model is None:
            model = await asyncio.to_thread(self._load)
        async with AsyncExitStack() as life:
            try:
                self._build(model)
                moves = self.config.transfer
                self.transport = await asyncio.to_thread(  # NIXL's agent takes half a second
                    self._open_transport, moves.transport, self.name, write_bytes=moves.write_bytes
                )
                life.callback(self.transport.close)
                life.push_async_callback(self.peers.close)
                await life.enter_async_context(self.engine)
                await life.enter_async_context(self.transfers())
            except ValueError as error:  # sizes that do not fit each other
                raise StartupError(f"{self.name}: {error}") from error
            server = await serve(self._serve, self._identity, self.config.wire)
            life.push_async_callback(server.close)
            self.endpoint = Endpoint(
                name=self.name,
                role=self.role,
                incarnation=self.incarnation,
                address=server.address,
            )
            self._reporter = Reporter(self._find_router, self._identity, self.config, self.member)
            await life.enter_async_context(beside(self._reporter.run()))
            self._life = life.pop_all()
        return self.endpoint

    async def drain(self, timeout_s: float) -> None:
        """Take nothing new and let streams finish; what is not done in time goes back."""
        self.draining = True
        self._reporter.report_now()
        deadline = time.monotonic() + timeout_s
        while self._requests and (left_s := deadline - time.monotonic()) > 0:
            await asyncio.wait(set(self._requests), timeout=left_s)
        await self._hand_back()

    async def stop(self) -> None:
        """Hand back what is left and go; stopping again is harmless."""
        self.draining = True
        await self._hand_back()
        await self._life.aclose()

    def health(self) -> Health:
        return self.engine.health()

    def status(self) -> dict[str, object]:
        """For people and for tests: who it is, what it holds, what it does."""
        return {
            "name": self.name,
            "role": self.role,
            "incarnation": self.incarnation,
            "draining": self.draining,
            "path": self.transport.path,
            "health": asdict(self.health()),
            "ledger": asdict(self.pool.ledger()),
            "load": self.load().model_dump(),
        }

    def member(self) -> Member:
        return Member(endpoint=self.endpoint, load=self.load(), draining=self.draining)

    def load(self) -> Load:
        ledger = self.pool.ledger()
        runs = self.engine.runs
        fresh = [run for run in runs if not run.started]
        return Load(
            waiting=self.admission.waiting + len(fresh),
            running=len(runs) - len(fresh),
            waiting_tokens=self.admission.waiting_tokens + sum(run.remaining for run in runs),
            free_blocks=ledger.blocks.free,
            total_blocks=ledger.blocks.total,
            free_slots=ledger.slots.free,
            max_length=min(self.limits.max_length, self.limits.capacity),
            block_tokens=self.config.model.block_tokens,
            vocab_size=self.limits.vocab_size,
        )

    # ---------------------------------------------------------------- inside

    def _load(self) -> Model:
        where = self.config.model
        try:
            return load_model(where.path, weights=where.weights, seed=where.seed)
        except (OSError, ValueError) as error:
            raise StartupError(f"{self.name}: cannot load {where.path}: {error}") from error

    def _build(self, model: Model) -> None:
        """Raises ValueError for sizes that cannot be."""
        spec, sizes, block_tokens = model.spec, self.section, self.config.model.block_tokens
        if sizes.max_length > spec.max_position_embeddings:
            raise ValueError(
                f"{self.role}.engine.max_length is {sizes.max_length}, but the model has "
                f"{spec.max_position_embeddings} positions"
            )
        self.fields = state_fields(spec)
        widest = max(self.fields, key=lambda field: field.row_bytes)
        if widest.row_bytes > self.config.transfer.cell_bytes:
            raise ValueError(
                f"transfer.cell_bytes is {self.config.transfer.cell_bytes}, but one row of "
                f"{widest.name} has {widest.row_bytes} bytes"
            )
        self.layout = Layout(self.fields, block_tokens)
        self.slab = Slab(self.layout, sizes.num_blocks, sizes.num_slots)
        self.pool = BlockPool(sizes.num_blocks, sizes.num_slots, block_tokens)
        self.admission = Admission(self.pool, max_waiting=sizes.max_waiting, is_open=self.may_admit)
        self.limits = Limits(spec.vocab_size, sizes.max_length, sizes.num_blocks * block_tokens)
        self.engine = Engine(
            schedule=self.schedule,
            execute=Executor(model, self.slab),
            eos_token_id=spec.eos_token_id,
            name=self.name,
        )
        self.peers = Peers(self._identity, self.config.wire)
        weights = self.config.model
        origin = f"random-{weights.seed}" if weights.weights == "random" else weights.weights
        self.wire_form = f"{self.layout.wire_form()}/{spec.fingerprint}/{origin}"

    async def _serve(self, stream: Stream, first: WireMessage, peer: Hello) -> None:
        if not isinstance(first, Prefill | Reserve | Generate):
            await self.answer(stream, first, peer)
            return
        task = asyncio.current_task()
        assert task is not None
        self._requests.add(task)
        try:
            await self.answer(stream, first, peer)
        except asyncio.CancelledError:
            if not self._handing_back:
                raise
            task.uncancel()
            raise Draining(
                f"{self.name} leaves and hands {first.request.request_id} back to its caller"
            ) from None
        finally:
            self._requests.discard(task)

    async def _hand_back(self) -> None:
        self._handing_back = True
        for task in self._requests:
            task.cancel()
        if self._requests:
            await asyncio.wait(set(self._requests))
