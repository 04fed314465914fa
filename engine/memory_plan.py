"""What the ranks of a configuration will hold in memory, before any of it is taken.

From the configuration and the model's config.json alone: weights in the form that a rank computes
with, request state as the slab lays it out, what transfers write into, and an estimate of what
lives within a step. Pure. Libraries and fragments are not in it: the share that is not planned is
theirs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from cluster.config import ClusterConfig, PoolSection
from cluster.errors import StartupError
from cluster.expert_placement import extra_experts
from kv_transfer.layout import REQUESTS_ON_A_DEVICE, Layout
from model.census import take_census
from model.spec import ModelSpec
from model.state import state_fields
from model.weight_bytes import Form, weight_bytes

Experts = Literal["shared", "whole"]
"""Whether the ranks of a group split the routed experts among them, or each holds them all."""


@dataclass(frozen=True)
class GpuMemory:
    """Of one GPU, in bytes, and the share of it that may be planned."""

    nbytes: int
    share: float

    @property
    def planned(self) -> int:
        return int(self.nbytes * self.share)


@dataclass(frozen=True)
class RankMemory:
    """One rank of a pool; every rank of a pool holds the same."""

    pool: str
    groups: int
    ranks: int  # of a group
    weights: Mapping[str, int]  # bytes by what
    transfer: Mapping[str, int]
    steps: Mapping[str, int]  # estimates of what lives within a step
    num_blocks: int
    num_slots: int
    block_bytes: int
    slot_bytes: int
    blocks_of_one: int  # blocks that a request of the asked length takes
    node_bytes: int  # Engram tables: memory-mapped, so once a node, in host memory

    @property
    def state(self) -> dict[str, int]:
        return {
            f"state: {self.num_blocks:,} blocks": self.num_blocks * self.block_bytes,
            f"state: {self.num_slots:,} slots": self.num_slots * self.slot_bytes,
        }

    @property
    def parts(self) -> dict[str, int]:
        return {**self.weights, **self.state, **self.transfer, **self.steps}

    @property
    def nbytes(self) -> int:
        return sum(self.parts.values())

    @property
    def fixed_bytes(self) -> int:
        """What does not depend on how many requests there are."""
        parts = (self.weights, self.transfer, self.steps)
        return sum(sum(part.values()) for part in parts)

    @property
    def requests(self) -> int:
        """How many of the asked length its blocks and slots hold at once."""
        return min(self.num_blocks // self.blocks_of_one, self.num_slots)

    def most_requests(self, memory: GpuMemory) -> int:
        """How many it would hold if all memory that may be planned and is left were state."""
        one = self.blocks_of_one * self.block_bytes + self.slot_bytes
        return max(0, memory.planned - self.fixed_bytes) // one

    def check(self, memory: GpuMemory) -> None:
        """StartupError, with the numbers and what to change, if one GPU does not hold it."""
        if self.nbytes <= memory.planned:
            return
        left = memory.planned - self.fixed_bytes - self.num_slots * self.slot_bytes
        advice = f"lower {self.pool}.engine.num_blocks to {max(0, left) // self.block_bytes:,}"
        if left < self.blocks_of_one * self.block_bytes:
            advice = (
                f"weights and buffers alone are {_gb(self.fixed_bytes)}: split the experts "
                f"over more ranks ({self.pool}.ranks is {self.ranks}), or lower "
                f"{self.pool}.engine.num_slots and the transfer's sizes"
            )
        raise StartupError(
            f"{self.pool}: a rank needs {_gb(self.nbytes)} of GPU memory; of {_gb(memory.nbytes)} "
            f"{memory.share:.0%} may be planned, {_gb(memory.planned)}; {advice}"
        )


def plan_memory(
    config: ClusterConfig, spec: ModelSpec, *, length: int, experts: Experts = "shared"
) -> tuple[RankMemory, ...]:
    """One rank of each pool that has groups; `length` is that of an example request, in tokens.

    Raises ValueError for a length or block size that cannot be.
    """
    if length < 1:
        raise ValueError(f"a request has at least one token, not {length}")
    layout = Layout(state_fields(spec), config.model.block_tokens)
    census = take_census(spec)
    pools: dict[str, PoolSection] = {"prefill": config.prefill, "decode": config.decode}
    return tuple(
        RankMemory(
            pool=name,
            groups=pool.groups,
            ranks=pool.ranks,
            weights=_weights(spec, pool, form_of(config, pool), shared=experts == "shared"),
            transfer=_transfer(config, name, on_gpus=_on_gpus(pool)),
            steps=_steps(spec, pool),
            num_blocks=pool.engine.num_blocks,
            num_slots=pool.engine.num_slots,
            block_bytes=layout.block_bytes,
            slot_bytes=layout.slot_bytes,
            blocks_of_one=-(-length // config.model.block_tokens),
            node_bytes=census.part_bytes["engram_tables"],
        )
        for name, pool in pools.items()
        if pool.groups
    )


def form_of(config: ClusterConfig, pool: PoolSection) -> Form:
    """What a rank of this pool keeps weights as; engine/rank_start.py decides by the same rules."""
    in_float32 = config.model.dtype == "float32" or pool.cp > 1
    return "stored" if _on_gpus(pool) and not in_float32 else "float32"


def _on_gpus(pool: PoolSection) -> bool:
    return pool.accelerator == "nvidia" or (pool.accelerator == "auto" and pool.gpus > 0)


def _weights(spec: ModelSpec, pool: PoolSection, form: Form, *, shared: bool) -> dict[str, int]:
    """Every rank has as many slots, redundant ones among them."""
    routed = mine = spec.n_routed_experts
    if shared and pool.shares_experts:
        mine = (routed + extra_experts(routed, pool.extra_experts, pool.ranks)) // pool.ranks
    found = weight_bytes(spec, form)
    return {
        "weights: all but routed experts": found.dense,
        f"weights: {mine} of {routed} experts a layer": spec.num_hidden_layers
        * mine
        * found.expert,
        "weights: drafter": found.drafter,
    } | ({"weights: vision": found.vision} if pool.vision else {})


def _steps(spec: ModelSpec, pool: PoolSection) -> dict[str, int]:
    """The widest moments of a forward, and those of graphs, which have memory of their own.

    A row has its residual streams three times; queries, heads and what they become; and the outputs
    of its experts, in float32. Logits are of as many rows as can be sampled.
    """
    engine = pool.engine
    streams = 3 * 2 * spec.hc_mult * spec.hidden_size
    heads = 4 * 2 * spec.num_attention_heads * spec.head_dim
    experts = spec.num_experts_per_tok * (4 * spec.hidden_size + 6 * spec.moe_intermediate_size)
    rows = engine.chunk_tokens + 2 * engine.max_rows
    logits = 4 * 4 * engine.max_rows * spec.vocab_size
    return {
        f"steps: {rows:,} rows, about": rows * (streams + heads + experts),
        "steps: logits": logits,
    }


def _transfer(config: ClusterConfig, pool: str, *, on_gpus: bool) -> dict[str, int]:
    moves = config.transfer
    segment = moves.cells * moves.cell_bytes
    if pool == "prefill":
        cells = moves.cells * (REQUESTS_ON_A_DEVICE if on_gpus else 1)
        return {f"staging: {cells} cells": cells * moves.cell_bytes}
    segments = moves.ring_bytes // segment
    return {f"receive ring: {segments:,} segments": segments * segment}


# ------------------------------------------------------------------ for people


def plan_lines(
    plans: tuple[RankMemory, ...], length: int, memory: GpuMemory | None = None
) -> list[str]:
    """A table for each pool; with `memory`, what of it is left."""
    lines = []
    for plan in plans:
        count = plan.groups * plan.ranks
        size = f"{plan.groups} x {plan.ranks} ranks" if count > 1 else "1 rank"
        lines += [f"{plan.pool}, {size}; bytes of one rank:"]
        lines += [f"  {what:<42}{nbytes:>19,}" for what, nbytes in plan.parts.items() if nbytes]
        lines += [f"  {'all':<42}{plan.nbytes:>19,}  {_gb(plan.nbytes)}"]
        if memory is not None:
            left = memory.planned - plan.nbytes
            lines += [
                f"  {f'left of {memory.share:.0%} of {_gb(memory.nbytes)}':<42}{left:>19,}"
                f"  {_gb(left)}"
            ]
        lines += [
            f"  requests of {length:,} tokens ({plan.blocks_of_one:,} blocks each): "
            f"{plan.requests:,} a rank, {plan.requests * count:,} in the pool"
        ]
        if memory is not None:
            lines += [f"  all memory as state would hold {plan.most_requests(memory):,} a rank"]
        if plan.node_bytes:
            tables = f"Engram tables, mapped once a node: {_gb(plan.node_bytes)}"
            lines += [f"  host memory: {tables}"]
    return lines


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:,.1f} GB"
