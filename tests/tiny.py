"""A whole cluster in one process, for tests: router, ranks and a caller, no Ray.

`StateModel` stands for a model where only the movement of state matters; `load_tiny()` is the
real one with random weights.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from functools import cache
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import Tensor

from cluster.config import ClusterConfig, parse_config
from cluster.generation import Caller, Delta, Timeline
from cluster.messages import Address, Request, Sampling, pack_ids
from cluster.router import Router
from decode_worker.worker import DecodeRank
from engine.packed_runner import AnyModel
from kv_transfer.blocks import PoolLedger
from kv_transfer.chosen_transport import ChosenTransport
from kv_transfer.open_transport import open_paths
from model.batch import ForwardBatch
from model.cache import Cache
from model.load import load_model
from model.options import ModelOptions
from model.spec import ModelSpec
from model.state import PerToken, state_fields
from model.transformer import Transformer
from model.vision import VisionEncoder
from prefill_worker.worker import PrefillRank

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "deploy" / "models" / "tiny"
SECRET = b"only for tests, 32 bytes long..."

Rank = PrefillRank | DecodeRank
OpenTransport = Callable[..., ChosenTransport]


def tiny_config(**sections: Any) -> ClusterConfig:
    """Small blocks, chunks and cells, so that short prompts cross every border; short waits."""
    engine = {"num_blocks": 64, "num_slots": 8, "chunk_tokens": 32, "max_length": 512}
    transfer = {"path": "packed", "cell_bytes": 16384, "cells": 2, "ring_bytes": 1 << 19}
    tree: dict[str, Any] = {
        "model": {"path": str(MODEL)},
        "prefill": {"engine": engine},
        "decode": {"engine": engine},
        "transfer": {"transport": "local", **transfer},
        "wire": {"heartbeat_s": 0.2, "t_detect_s": 2.0},
        "router": {"report_s": 0.1, "retry_after_s": 0.05},
        "generation": {
            "reserve_timeout_s": 10.0,
            "recovery_wait_s": 10.0,
            "new_request_wait_s": 10.0,  # ranks of a test start beside their first request
            "step_timeout_s": 30.0,
        },
    }
    for name, section in sections.items():
        tree[name] = {**tree.get(name, {}), **section}
    return parse_config(tree)


@cache
def load_tiny(truncation: Literal["off", "compact"] = "off") -> Transformer:
    """The tiny model, once a process; ranks of one process share it."""
    torch.set_num_threads(1)
    options = ModelOptions(truncation=truncation)
    return load_model(MODEL, weights="random", seed=0, options=options, vision=True)


@cache
def small_spec() -> ModelSpec:
    """Two layers and one draft stage: every kind of state field, in few layers."""
    raw = json.loads((MODEL / "config.json").read_text(encoding="utf-8"))
    raw["text_config"] |= {
        "num_hidden_layers": 2,
        "num_nextn_predict_layers": 1,
        "compress_ratios": [2, 1, 0],
        "kv_source_layer_ids": [0, 1],
        "index_source_layer_ids": [0, 1],
    }
    return ModelSpec.from_dict(raw)


class StateModel:
    """Its next token depends on every row of state that a continuation needs, and on nothing else.

    Ids from POISON on make its forward fail.
    """

    POISON = 2040

    def __init__(self) -> None:
        self.spec = small_spec()
        self.vision: VisionEncoder | None = None
        self._fields = state_fields(self.spec)

    def forward(self, batch: ForwardBatch, cache: Cache) -> Tensor:
        if int(batch.token_ids_T.max()) >= self.POISON:
            raise RuntimeError("a poisoned token id")
        logits, first = [], 0
        for request in range(batch.num_requests):
            start, count = int(batch.starts_R[request]), int(batch.counts_R[request])
            self._write(cache, request, start, batch.token_ids_T[first : first + count])
            first += count
            if first - 1 in batch.logit_rows:
                seed = torch.Generator().manual_seed(self._read(cache, request, start + count))
                logits.append(torch.randn(self.spec.vocab_size, generator=seed))
        for layer in self.spec.kv_source_layer_ids:
            cache.rows_are_final(layer)
        together = torch.stack(logits) if logits else torch.zeros(0, self.spec.vocab_size)
        together[:, self.POISON :] = -math.inf  # it never poisons itself
        return together

    def _write(self, cache: Cache, request: int, start: int, ids: Tensor) -> None:
        """What positions start .. start + len(ids) - 1 add to the state: each row its token's."""
        stop = start + len(ids)
        for number, field in enumerate(self._fields):
            match field.growth:
                case PerToken(ratio):
                    rows = torch.arange(start // ratio, stop // ratio)
                    tokens = ids[rows * ratio + ratio - 1 - start]
                case growth:
                    rows = torch.tensor([r for r in growth.rows(stop) if r >= start]).long()
                    tokens = ids[rows - start]
            for layer in field.layers:
                values = 2.0 ** ((tokens * 7 + number * 3 + layer) % 5 - 2)
                owners = torch.full_like(rows, request)
                cache.write(field.name, layer, owners, rows, values[:, None].expand(-1, field.dim))

    def _read(self, cache: Cache, request: int, length: int) -> int:
        """A number that depends on every row that a continuation after `length` needs."""
        total = length
        for number, field in enumerate(self._fields):
            needed = field.growth.rows(length)
            rows = torch.arange(needed.start, needed.stop)
            owners = torch.full_like(rows, request)
            for layer in field.layers:
                values = cache.read(field.name, layer, owners, rows).double().sum(1)
                weights = (rows * 31 + number * 7 + layer) % 17 + 1
                total += int((values * weights * 64).sum())
        return total


def make_request(
    prompt: Sequence[int], request_id: str = "r", output: Sequence[int] = (), **sampling: Any
) -> Request:
    sampling = {"ignore_stop": True, "max_tokens": 8} | sampling
    return Request(
        request_id=request_id,
        prompt=pack_ids(prompt),
        output=pack_ids(output),
        sampling=Sampling(**sampling),
    )


def make_prompt(length: int, seed: int = 0) -> list[int]:
    """Ids that no model here treats specially."""
    generator = torch.Generator().manual_seed(seed * 10_007 + length)
    return torch.randint(3, 2000, (length,), generator=generator).tolist()


async def until(reached: Callable[[], bool], within_s: float = 20.0) -> None:
    """For what another thread or process brings about, and nothing here can be told of."""
    async with asyncio.timeout(within_s):
        while not reached():
            await asyncio.sleep(0.002)


class TinyCluster:
    """`async with TinyCluster(prefill=1, decode=2) as cluster: await cluster.answer(...)`."""

    def __init__(
        self,
        *,
        prefill: int = 1,
        decode: int = 1,
        transport: Literal["local", "nixl"] = "local",
        model: AnyModel | None = None,
        config: ClusterConfig | None = None,
        open_transport: OpenTransport = open_paths,
    ) -> None:
        self.config = config or tiny_config(transfer={"transport": transport})
        self.model: AnyModel = model or StateModel()
        self.router = Router(self.config, SECRET)
        self.caller = Caller(self.config, SECRET, self.find_router)
        self.prefill: list[PrefillRank] = [
            self._rank(PrefillRank, number, open_transport) for number in range(prefill)
        ]
        self.decode: list[DecodeRank] = [
            self._rank(DecodeRank, number, open_transport) for number in range(decode)
        ]
        self._address: Address | None = None

    def _rank(self, kind: type[Any], number: int, open_transport: OpenTransport) -> Any:
        return kind(
            config=self.config,
            name=f"{kind.role}-{number}/0",
            secret=SECRET,
            find_router=self.find_router,
            model=self.model,
            transport=open_transport,
        )

    @property
    def address(self) -> Address | None:
        """The router's, once there is one."""
        return self._address

    @property
    def ranks(self) -> list[Rank]:
        return [*self.prefill, *self.decode]

    async def find_router(self) -> Address | None:
        return self._address

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as life:
            self._address = await self.router.start()
            life.push_async_callback(self.router.stop)
            life.push_async_callback(self.caller.close)
            for rank in self.ranks:
                await rank.start()
                life.push_async_callback(rank.stop)
            await until(lambda: len(self.router.members()) == len(self.ranks))
            self._life = life.pop_all()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._life.aclose()

    # ---------------------------------------------------------------- asking

    async def deltas(
        self, request: Request, timeline: Timeline | None = None
    ) -> AsyncIterator[Delta]:
        async with aclosing(self.caller.generate(request, timeline)) as deltas:
            async for delta in deltas:
                yield delta

    async def answer(self, request: Request, timeline: Timeline | None = None) -> list[int]:
        """All tokens of one answer, in order of their index."""
        tokens: list[int] = []
        async for delta in self.deltas(request, timeline):
            assert delta.first == request.output_length + len(tokens)
            tokens += delta.token_ids
        return tokens

    # ---------------------------------------------------------------- the books

    def ledgers(self) -> list[PoolLedger]:
        return [rank.pool.ledger() for rank in self.ranks]

    def all_free(self) -> bool:
        """Every block, slot and ring segment of every rank; nothing lost, nothing twice."""
        for ledger in self.ledgers():
            ledger.check()
        books = [one for ledger in self.ledgers() for one in (ledger.blocks, ledger.slots)]
        books += [rank.ring.ledger() for rank in self.decode]
        return all(book.free == book.total for book in books)

    async def settled(self) -> bool:
        """All memory is back, and no engine has anything to do."""
        await until(self.all_free)
        await until(lambda: all(rank.health().pending == 0 for rank in self.ranks))
        return True
