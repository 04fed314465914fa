"""Groups of ranks that share their experts, in one process: threads that exchange rows. No Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from cluster.config import ClusterConfig
from decode_worker.worker import DecodeRank
from engine.expert_exchange import Exchange, local_exchanges
from engine.expert_group import ExpertGroup
from model.spec import ModelSpec
from model.transformer import Transformer
from model.weights import Weights, random_weights
from prefill_worker.worker import PrefillRank
from tests.tiny import MODEL, SECRET, TinyCluster, load_tiny


class KeptWeights:
    """Decoded once: models of several ranks of one process are made of the same tensors."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._kept: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._kept:
            self._kept[name] = self._weights[name]
        return self._kept[name]

    def table_rows(self, name: str, rows: Tensor) -> Tensor:
        return self._weights.table_rows(name, rows)


@cache
def tiny_spec() -> ModelSpec:
    return ModelSpec.load(MODEL)


@cache
def tiny_weights() -> KeptWeights:
    torch.set_num_threads(1)
    return KeptWeights(random_weights(tiny_spec(), 0))


def tiny_part(
    exchange: Exchange, *, group: str = "group", extra: int = 0
) -> tuple[ExpertGroup, Transformer]:
    """One rank's experts of the tiny model, and the model around them."""
    experts = ExpertGroup.first(exchange, group, tiny_spec(), extra)
    model = Transformer(tiny_spec(), tiny_weights(), make_experts=experts.make_experts)
    return experts, model


MakePart = Callable[..., tuple[ExpertGroup, Transformer]]
"""As tiny_part: from its end of the exchange, the group's name and how many extra experts."""


class GroupedCluster(TinyCluster):
    """`GroupedCluster(config, prefill=(2,), decode=(4, 2))`: sizes of the groups, 1: no group."""

    def __init__(
        self,
        config: ClusterConfig,
        *,
        prefill: Sequence[int],
        decode: Sequence[int],
        extra: int = 0,
        make_part: MakePart = tiny_part,
        patience_s: float = 30.0,
    ) -> None:
        """`patience_s` is how long a rank waits for the others of its group."""
        super().__init__(prefill=0, decode=0, model=load_tiny(), config=config)
        self._make_part, self._patience_s = make_part, patience_s
        self.prefill = [
            rank
            for number, size in enumerate(prefill)
            for rank in self._group(PrefillRank, number, size, extra)
        ]
        self.decode = [
            rank
            for number, size in enumerate(decode)
            for rank in self._group(DecodeRank, number, size, extra)
        ]

    def _group(self, kind: type[Any], number: int, size: int, extra: int) -> list[Any]:
        group = f"{kind.role}-{number}"
        parts: list[dict[str, Any]] = [{"model": self.model}]
        if size > 1:
            ends = local_exchanges(size, timeout_s=self._patience_s)
            made = [self._make_part(one, group=group, extra=extra) for one in ends]
            parts = [{"experts": experts, "model": model} for experts, model in made]
        return [
            kind(
                config=self.config,
                name=f"{group}/{index}",
                secret=SECRET,
                find_router=self.find_router,
                **part,
            )
            for index, part in enumerate(parts)
        ]

    async def __aexit__(self, *error: object) -> None:
        await asyncio.gather(*(rank.stop() for rank in self.ranks))  # a group leaves as one
        await super().__aexit__(*error)
