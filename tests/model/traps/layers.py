"""Traps in hyper-connections, norms, experts and Engram."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.ops.expert_mlp import expert_mlp
from kernels.ops.hyper_connection import mixes, mixing_logits
from kernels.ops.rms_norm import rms_norm
from kernels.ops.route import route
from model.block import Block, Opened, Residual
from model.engram import CompressedIds, Engram
from model.hyper_connection import HyperConnection
from model.moe import MixtureOfExperts
from model.rows import Rows
from tests.model.cases import BY_NAME
from tests.model.traps.registry import trap


@trap("micro")
def a_sublayer_reads_with_its_own_pre(patch: pytest.MonkeyPatch) -> None:
    right = Block.open

    def wrong(self: Block, residual: Residual) -> Opened:
        mixes = self._attention_mixes.mixes(residual.streams_TnD)
        return right(self, residual._replace(pre_Tn=mixes.pre_Tn))

    patch.setattr(Block, "open", wrong)


@trap("micro")
def mixing_takes_the_destination_first(patch: pytest.MonkeyPatch) -> None:
    right = HyperConnection.mixes

    def wrong(self: HyperConnection, streams: Tensor) -> Any:
        mixes = right(self, streams)
        return mixes._replace(mix_Tnn=mixes.mix_Tnn.transpose(1, 2))

    patch.setattr(HyperConnection, "mixes", wrong)


@trap("other_sizes")
def sinkhorn_runs_one_iteration_less(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        "model.hyper_connection.mixes",
        lambda logits, n, iterations, eps: mixes(logits, n, iterations - 1, eps),
    )


@trap("micro")
def hyper_connections_norm_with_1e_6(patch: pytest.MonkeyPatch) -> None:
    large = torch.tensor(1e-6)

    def wrong(streams: Tensor, project: Tensor, base: Tensor, eps: Tensor) -> Tensor:
        return mixing_logits(streams, project, base, large)

    patch.setattr("model.hyper_connection.mixing_logits", wrong)


@trap("micro")
def norms_add_1e_6(patch: pytest.MonkeyPatch) -> None:
    large = torch.tensor(1e-6)
    patch.setattr("model.norm.rms_norm", lambda x, weight, eps: rms_norm(x, weight, large))


@trap("fp8")
def the_share_multiplies_after_the_down_projection(patch: pytest.MonkeyPatch) -> None:

    def wrong(x: Tensor, experts: Tensor, shares: Tensor, *rest: Tensor, **options: Any) -> Tensor:
        total = torch.zeros_like(x)
        for slot in range(experts.shape[1]):
            part = slice(slot, slot + 1)
            out = expert_mlp(
                x, experts[:, part], torch.ones_like(shares[:, part]), *rest, **options
            )
            total += out * shares[:, part]
        return total

    patch.setattr("model.moe.expert_mlp", wrong)


@trap("other_sizes")
def the_gate_is_clamped_from_below_too(patch: pytest.MonkeyPatch) -> None:
    silu, limit = torch.nn.functional.silu, BY_NAME["other_sizes"].spec.swiglu_limit
    patch.setattr(torch.nn.functional, "silu", lambda gate: silu(gate.clamp(min=-limit)))


@trap("other_sizes")
def the_gate_is_clamped_after_silu(patch: pytest.MonkeyPatch) -> None:
    def wrong(x: Tensor, gate_up: Tensor, down: Tensor, *, limit: float, fp8: bool) -> Tensor:
        gate, up = (x @ gate_up).chunk(2, -1)
        return torch.nn.functional.silu(gate).clamp(max=limit) * up.clamp(-limit, limit) @ down

    patch.setattr("model.moe.gated_mlp", wrong)


@trap("other_sizes")
def up_is_clamped_from_above_only(patch: pytest.MonkeyPatch) -> None:
    def wrong(x: Tensor, gate_up: Tensor, down: Tensor, *, limit: float, fp8: bool) -> Tensor:
        gate, up = (x @ gate_up).chunk(2, -1)
        return torch.nn.functional.silu(gate.clamp(max=limit)) * up.clamp(max=limit) @ down

    patch.setattr("model.moe.gated_mlp", wrong)


@trap("micro")
def the_bias_is_part_of_the_share(patch: pytest.MonkeyPatch) -> None:

    def wrong(logits: Tensor, bias: Tensor, count: int, scale: float) -> Any:
        routed = route(logits, bias, count, scale)
        scores = torch.nn.functional.softplus(logits).sqrt() + bias
        shares = scores.gather(1, routed.experts)
        return routed._replace(shares=shares / shares.sum(1, keepdim=True) * scale)

    patch.setattr("model.moe.route", wrong)


@trap("images")
def image_rows_are_routed_with_the_text_bias(patch: pytest.MonkeyPatch) -> None:
    right = MixtureOfExperts.__call__

    def wrong(self: MixtureOfExperts, x: Tensor, count: int, images: Tensor | None) -> Tensor:
        return right(self, x, count, None)

    patch.setattr(MixtureOfExperts, "__call__", wrong)


@trap("images")
def engram_also_speaks_at_images(patch: pytest.MonkeyPatch) -> None:
    right = Engram.__call__

    def wrong(self: Engram, streams: Tensor, ids: Tensor, rows: Rows) -> Tensor:
        return right(self, streams, ids, _without_images(rows))

    patch.setattr(Engram, "__call__", wrong)


def _without_images(rows: Rows) -> Rows:
    text = Rows.__new__(Rows)
    text.__dict__.update(vars(rows), image_rows=None)
    return text


@trap("image_ids")
def only_the_image_itself_is_dead(patch: pytest.MonkeyPatch) -> None:
    """An isolated image position cuts off the ids before it, too."""
    case = BY_NAME["image_ids"]

    def wrong(self: CompressedIds, ids: Tensor) -> Tensor:
        live = ids.clone()
        for row in range(case.length):
            for back in range(1, ids.shape[1]):
                if row >= back and row - back not in case.images:
                    live[row, back] = case.prompt[row - back]
        return live.masked_fill(live < 0, self._pad)

    patch.setattr(CompressedIds, "__call__", wrong)


@trap("micro")
def engram_comes_after_its_layer(patch: pytest.MonkeyPatch) -> None:
    right, close = Engram.__call__, Block.close
    held: list[Tensor] = []

    def wrong(self: Engram, streams: Tensor, ids: Tensor, rows: Rows) -> Tensor:
        held.append(right(self, streams, ids, rows) - streams)
        return streams

    def late(self: Block, *arguments: Any) -> Residual:
        residual = close(self, *arguments)
        if held:
            residual = residual._replace(streams_TnD=residual.streams_TnD + held.pop())
        return residual

    patch.setattr(Engram, "__call__", wrong)
    patch.setattr(Block, "close", late)
