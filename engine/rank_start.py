"""What a rank begins with: its device, its place in a group that shares experts, its model.

Each of these blocks, and raises StartupError that says what cannot be. Knows no sockets, no
requests, and nothing of what becomes of it all.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch

from cluster.config import ClusterConfig, PoolSection
from cluster.errors import StartupError
from cluster.seat import Seat
from engine.context_team import ContextTeam
from engine.expert_collectives import join
from engine.expert_group import ExpertGroup
from engine.lockstep import Lead
from engine.packed_runner import AnyModel
from kernels.accelerator import Accelerator, choose
from model.load import load_model
from model.moe import LocalExperts
from model.options import ModelOptions
from model.spec import ModelSpec


def device_of(name: str, pool: PoolSection) -> Accelerator:
    """Left to itself, a rank that was given no GPU computes on the CPU, whatever it sees."""
    wanted = "cpu" if pool.accelerator == "auto" and not pool.gpus else pool.accelerator
    try:
        return choose(wanted)
    except ValueError as error:
        raise StartupError(f"{name}: {error}") from error


def take_seat(
    name: str, seat: Seat, config: ClusterConfig, pool: PoolSection, accelerator: Accelerator
) -> ExpertGroup:
    """Meets the other ranks of the group. Which experts are whose follows from their number."""
    try:
        spec = ModelSpec.load(config.model.path)
    except (OSError, ValueError) as error:
        raise StartupError(f"{name}: cannot load {config.model.path}: {error}") from error
    exchange = join(
        seat,
        accelerator,
        host=config.wire.host,
        start_timeout_s=config.life.start_timeout_s,
        timeout_s=config.life.stuck_after_s,
    )
    return ExpertGroup.first(exchange, name.rpartition("/")[0], spec, pool.extra_experts)


def team_of(
    experts: ExpertGroup, pool: PoolSection, accelerator: Accelerator
) -> ContextTeam | None:
    """The ranks that run prompts together with this one; None: it runs them alone."""
    if pool.cp == 1:
        return None
    ranks = experts.exchange.part(pool.cp)
    return ContextTeam(ranks, accelerator.device, torch.get_default_dtype())


def lead_of(
    experts: ExpertGroup, team: ContextTeam | None, follow: Callable[[], None]
) -> Lead | None:
    """Of a rank that computes what another one leads: `follow` is its part."""
    if team is None or team.leads:
        return None
    return Lead(experts.index - team.index, follow)


def load(
    name: str,
    config: ClusterConfig,
    pool: PoolSection,
    accelerator: Accelerator,
    experts: ExpertGroup | None,
) -> AnyModel:
    """Of the routed experts only this rank's, where a group shares them."""
    dtype = dtype_of(name, config, pool, accelerator)
    try:
        model = _load(dtype, config, pool, accelerator, experts)
    except (OSError, ValueError) as error:
        raise StartupError(f"{name}: cannot load {config.model.path}: {error}") from error
    gc.freeze()  # what stays for the life of the process need not be searched again and again
    return model


def dtype_of(
    name: str, config: ClusterConfig, pool: PoolSection, accelerator: Accelerator
) -> torch.dtype:
    """What this rank computes in; StartupError for what it cannot."""
    asked = config.model.dtype
    why = None
    if accelerator.kind != "nvidia":
        why = f"that needs an NVIDIA GPU, and this rank computes on {accelerator.kind}"
    elif pool.cp > 1:
        why = f"ranks that run prompts together (cp {pool.cp}) do it in float32"
    if asked == "bfloat16" and why:
        raise StartupError(f"{name}: model.dtype is bfloat16, but {why}; set it to auto or float32")
    return torch.float32 if asked == "float32" or why else torch.bfloat16


def _load(
    dtype: torch.dtype,
    config: ClusterConfig,
    pool: PoolSection,
    accelerator: Accelerator,
    experts: ExpertGroup | None,
) -> AnyModel:
    where = config.model
    options = ModelOptions(truncation=where.truncation)
    if dtype == torch.bfloat16:
        from model.packed.experts import PackedLocalExperts  # these need Triton
        from model.packed.load import load_packed

        return load_packed(
            where.path,
            weights=where.weights,
            seed=where.seed,
            options=options,
            device=accelerator.device,
            dtype=dtype,
            vision=pool.vision,
            make_experts=PackedLocalExperts if experts is None else experts.make_packed_experts,
        )
    return load_model(
        where.path,
        weights=where.weights,
        seed=where.seed,
        options=options,
        device=accelerator.device,
        vision=pool.vision,
        make_experts=LocalExperts if experts is None else experts.make_experts,
    )
