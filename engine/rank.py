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
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch

from cluster.config import ClusterConfig, EngineSection, PoolSection
from cluster.errors import Draining, StartupError
from cluster.grammars import Grammars
from cluster.health import Health
from cluster.held_bytes import HeldBytes
from cluster.image import check_images
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
from cluster.seat import Seat
from cluster.wire import Identity, Peers, Stream, new_incarnation, serve
from engine.admission import Admission
from engine.context_team import ContextTeam, TeamModel
from engine.engine import Engine
from engine.expert_group import ExpertGroup
from engine.expert_reporting import ExpertReporting
from engine.images import rules_of
from engine.lockstep import Lockstep
from engine.packed_runner import AnyModel
from engine.rank_start import device_of, lead_of, load, take_seat, team_of
from engine.request import Limits
from engine.schedule import Schedule
from engine.size_checks import check_sizes
from engine.step_runners import step_runners
from engine.tasks import beside
from kv_transfer.blocks import BlockPool
from kv_transfer.chosen_transport import ChosenTransport
from kv_transfer.layout import Layout
from kv_transfer.open_transport import open_paths
from kv_transfer.state_memory import open_memory
from model.fingerprint import weights_fingerprint
from model.state import state_fields
from model.vocabulary import spelled_ids

FindRouter = Callable[[], Awaitable[Address | None]]
OpenTransport = Callable[..., ChosenTransport]
T = TypeVar("T")


class Rank(ABC):
    """start() -> it serves; drain() -> it finishes what it has; stop() -> it is gone.

    drain() and stop() may come at any time, also before start() or during it; a rank that was
    stopped does not start any more.
    """

    role: ClassVar[Role]

    def __init__(
        self,
        *,
        config: ClusterConfig,
        name: str,
        secret: bytes,
        find_router: FindRouter,
        model: AnyModel | None = None,
        transport: OpenTransport = open_paths,
        seat: Seat | None = None,
        experts: ExpertGroup | None = None,
    ) -> None:
        """`model` is one that is loaded already, to be shared by ranks of one process; `experts`
        are those in it, if they are a group's. `seat`: in a group that shares its experts."""
        self.config = config
        self.name = name
        self.draining = False
        self._model = model
        self._open_transport = transport
        self._seat = seat
        self.experts = experts  # None: all of them are here
        self.incarnation = new_incarnation()
        self._identity = Identity(self.role, self.incarnation, secret)
        self._requests: set[asyncio.Task[Any]] = set()
        self._pictures = HeldBytes(config.images.held_bytes)
        self._handing_back = False
        self._find_router = find_router
        self._reporter = Reporter(find_router, self._identity, config, self.member)
        self._expert_reporting: ExpertReporting | None = None
        self.team: ContextTeam | None = None  # with whom it runs its prompts
        self._life = AsyncExitStack()
        self._turning = asyncio.Lock()  # while it starts or ends
        self._leaving = asyncio.Event()

    @property
    def pool_section(self) -> PoolSection:
        return self.config.prefill if self.role == "prefill" else self.config.decode

    @property
    def section(self) -> EngineSection:
        """The engine's sizes in this pool."""
        return self.pool_section.engine

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
        async with self._turning, AsyncExitStack() as life:
            torch.set_num_threads(self.section.threads)
            await self._begin(life)
            try:
                self._build(self.model)
                await self._unless_stopped(self.runners.prepare)
                moves = self.config.transfer
                self.transport = await asyncio.to_thread(  # NIXL's agent takes half a second
                    self._open_transport,
                    moves.path,
                    moves.transport,
                    self.name,
                    write_bytes=moves.write_bytes,
                    device=self.accelerator.device,
                    row_bytes=[field.row_bytes for field in self.fields],
                )
                life.callback(self.transport.close)
                self._go_on()
                life.push_async_callback(self.peers.close)
                await life.enter_async_context(self.engine)
                await life.enter_async_context(self.transfers())
            except ValueError as error:  # sizes that do not fit each other
                raise StartupError(f"{self.name}: {error}") from error
            if self.experts is not None:  # a step needs all ranks, and they load at their own pace
                up, limit_s = self.experts.exchange.all_up, self.config.life.start_timeout_s
                await self._unless_stopped(partial(up, limit_s))
            server = await serve(self._serve, self._identity, self.config.wire)
            life.push_async_callback(server.close)
            self.endpoint = Endpoint(
                name=self.name,
                role=self.role,
                incarnation=self.incarnation,
                address=server.address,
            )
            await life.enter_async_context(beside(self._reporter.run()))
            if self._expert_reporting is not None:
                await life.enter_async_context(beside(self._expert_reporting.run()))
            self._go_on()
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
        self._leaving.set()
        await self._hand_back()
        async with self._turning:
            await self._life.aclose()

    def reconfigure(self, config: ClusterConfig) -> None:
        """Takes over what may change while it runs; in all else the configuration is as it was."""
        self.config = config
        self.admission.reconfigure(self.section.max_waiting)
        self._reporter.reconfigure(config)
        if self._expert_reporting is not None:
            self._expert_reporting.reconfigure(config)

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
            "tokens": self.engine.tokens,
            "preempted": self.engine.preempted,
            "steps": self.runners.status(),
            **({} if self.experts is None else {"experts": self.experts.status()}),
        }

    def member(self) -> Member:
        return Member(
            endpoint=self.endpoint,
            load=self.load(),
            draining=self.draining,
            balanced=self.experts is not None,
            follows=self.follows,
        )

    @property
    def follows(self) -> bool:
        """It computes what another rank leads, and takes no request."""
        return self.team is not None and not self.team.leads

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
            output_reserved=self.section.output_reserved,
            images=self.images,
        )

    # ---------------------------------------------------------------- inside

    async def _begin(self, life: AsyncExitStack) -> None:
        """Which device, with whom, and what it computes; whatever of it was not given to it."""
        pool = self.pool_section
        self.accelerator = device_of(self.name, pool)
        known = (self.config, pool, self.accelerator)
        if self._seat is not None:
            seated = partial(take_seat, self.name, self._seat, *known)
            self.experts = await self._unless_stopped(seated)
        if self.experts is not None:
            life.callback(self.experts.close)
            self._expert_reporting = self._reporting(self.experts)
            section = self.pool_section
            self.team = await asyncio.to_thread(team_of, self.experts, section, self.accelerator)
        if self._model is None:
            self._model = await self._unless_stopped(self._load)
        self.model = self._model if self.team is None else TeamModel(self._model, self.team)

    def _load(self) -> AnyModel:
        return load(self.name, self.config, self.pool_section, self.accelerator, self.experts)

    async def _unless_stopped(self, function: Callable[[], T]) -> T:
        """Loading takes minutes; a rank that is stopped meanwhile does not wait for its end."""
        self._go_on()
        working = asyncio.ensure_future(asyncio.to_thread(function))
        async with beside(self._leaving.wait()) as leaving:
            await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            working.cancel()
        self._go_on()
        return working.result()

    def _go_on(self) -> None:
        if self._leaving.is_set():
            raise StartupError(f"{self.name} was stopped before it had started")

    def _reporting(self, experts: ExpertGroup) -> ExpertReporting:
        return ExpertReporting(
            experts.slots,
            index=experts.index,
            find_router=self._find_router,
            identity=self._identity,
            config=self.config,
        )

    def _build(self, model: AnyModel) -> None:
        """Raises ValueError for sizes that cannot be."""
        spec, sizes, block_tokens = model.spec, self.section, self.config.model.block_tokens
        self.fields = state_fields(spec)
        check_sizes(self.role, self.config, sizes, spec, self.fields)
        self.layout = Layout(self.fields, block_tokens)
        self.slab = open_memory(
            self.layout, sizes.num_blocks, sizes.num_slots, self.accelerator.device
        )
        self.pool = BlockPool(sizes.num_blocks, sizes.num_slots, block_tokens)
        self.admission = Admission(
            self.pool,
            max_waiting=sizes.max_waiting,
            is_open=self.may_admit,
            on_release=lambda: self.engine.memory_is_back(),
        )
        kept = self.config.model.kept
        self.limits = Limits(
            spec.vocab_size, sizes.max_length, sizes.num_blocks * block_tokens, kept > 0
        )
        self.grammars = Grammars(self.config.model.path)
        spelled = spelled_ids(self.config.model.path)
        encoder = model.vision if self.pool_section.vision else None
        self.images = None if encoder is None else rules_of(encoder.spec, spec.image_token_id)
        self.runners = step_runners(
            self.name,
            model,
            self.slab,
            sizes,
            answers=self.role == "decode",
            alone=self.experts is None,
            spelled_ids=spelled,
            grammars=self.grammars,
            keep=kept,
            encode=encoder,
            team=self.team,
        )
        self.lockstep = None
        if self.experts is not None:
            lead = lead_of(self.experts, self.team, self.runners.follow)
            self.lockstep = Lockstep(self.experts, self.runners.execute, lead)
        self.engine = Engine(
            schedule=self.schedule,
            execute=self.lockstep or self.runners.execute,
            settle=self.runners.execute.settle,
            pace=self.lockstep,
            eos_token_id=spec.eos_token_id,
            name=self.name,
        )
        self.peers = Peers(self._identity, self.config.wire)
        weights = self.config.model
        if weights.weights == "random":
            origin = f"random-{weights.seed}"
        else:
            origin = f"{weights.weights}-{weights_fingerprint(weights.path)}"
        self.wire_form = f"{self.layout.wire_form()}/{spec.fingerprint}/{origin}"
        if kept:
            self.wire_form += f"/{weights.truncation}-{kept}"

    async def _serve(self, stream: Stream, first: WireMessage, peer: Hello) -> None:
        if not isinstance(first, Prefill | Reserve | Generate):
            await self.answer(stream, first, peer)
            return
        if self.follows:
            raise Draining(f"{self.name} computes what another rank leads: ask that one")
        task = asyncio.current_task()
        assert task is not None
        self._requests.add(task)
        try:
            await self.grammars.check(first.request.sampling.grammar)
            if not isinstance(first, Reserve):  # who goes on from state needs no pixels
                check_images(first.request.images, first.request.prompt, self.images)
            with self._pictures.hold(first.request.image_bytes):
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
