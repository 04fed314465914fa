"""The drafter over packed rows, for training: blocks after many anchors at once.

The target model is frozen; what it predicts after the true tokens is what the drafter learns.
The counterpart of model/drafter.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from examples.mini.batch import PackedBatch
from examples.mini.network import Outcome, project_out
from examples.mini.sublayers import (
    Prepared,
    Residual,
    Turns,
    experts,
    linear,
    mixes,
    norm,
    read,
    rotate,
    route,
    spread,
    stored_row,
)
from model.spec import ModelSpec

# B = rows, S = positions, A = anchors of each row, K = block size, W = window, D = hidden size,
# d = head size, V = vocabulary


@dataclass(frozen=True)
class Drafted:
    loss: Tensor
    accepted: Tensor  # of each place, how often the greedy draft is the target's greedy token
    drafted: Tensor  # and how often it counts, [K] each
    loads: Mapping[str, Tensor]


class DraftNetwork:
    def __init__(self, spec: ModelSpec, device: torch.device) -> None:
        self.spec = spec
        self._frequencies = torch.tensor(
            spec.rope_frequencies(0), device=device, dtype=torch.float64
        )

    def block(
        self, w: Prepared, batch: PackedBatch, taps_TX: Tensor, anchors_BA: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """What the stages make of each block, before the last norm, [B, A, K, D]; loads."""
        spec, dtype, eps = self.spec, w["mtp.0.attn.wkv"].dtype, self.spec.rms_norm_eps
        size, shape = spec.dspark_block_size, batch.ids_BS.shape
        device = anchors_BA.device
        ids_BAK = batch.ids_BS.gather(1, anchors_BA).unsqueeze(-1).repeat(1, 1, size)
        ids_BAK[..., 1:] = spec.dspark_noise_token_id
        positions_BAK = anchors_BA.unsqueeze(-1) + torch.arange(size, device=device)
        turned = Turns.of(positions_BAK.flatten(), self._frequencies)
        positions_S = torch.arange(shape[1], device=device)
        everywhere = Turns.of(positions_S.repeat(shape[0]), self._frequencies)
        back_BAW, mask = self._context(batch, anchors_BA)
        rows = torch.arange(shape[0], device=device)[:, None, None]
        main = linear(taps_TX, w["mtp.0.main_proj"])
        main = norm(main, w["mtp.0.main_norm.weight"], eps, dtype)
        hidden = F.embedding(ids_BAK.flatten(), w["embed.weight"]).float()
        residual = Residual.of(hidden, spec.hc_mult)
        loads = {}
        for stage in spec.draft_stages:
            prefix = f"mtp.{stage}."
            attn, ffn = f"{prefix}attn.", f"{prefix}ffn."
            kv_norm = w[f"{attn}kv_norm.weight"]
            kv = linear(main, w[f"{attn}wkv"])
            context = stored_row(kv, kv_norm, *everywhere, "fp8", eps, dtype).unflatten(0, shape)
            mixed = mixes(residual.streams_TnD, w, f"{prefix}hc_attn", spec)
            x = read(*residual, w[f"{prefix}attn_norm.weight"], eps, dtype)
            low = norm(linear(x, w[f"{attn}wq_a"]), w[f"{attn}q_norm.weight"], eps, dtype)
            q = linear(low, w[f"{attn}wq_b"]).unflatten(-1, (-1, spec.head_dim))
            q = rotate(q, *turned, dtype).unflatten(0, ids_BAK.shape)
            kv = linear(x, w[f"{attn}wkv"])
            own = stored_row(kv, kv_norm, *turned, "fp8", eps, dtype).unflatten(0, ids_BAK.shape)
            keys = torch.cat([context[rows, back_BAW.clamp(min=0)], own], 2)
            out = _attend(q, keys, mask, w[f"{attn}attn_sink"])
            out = rotate(out.flatten(0, 2), *turned.back(), dtype)
            out = project_out(out, w, attn, spec)
            streams = spread(out, residual.streams_TnD, mixed.post_Tn, mixed.mix_Tnn)
            later = mixes(streams, w, f"{prefix}hc_ffn", spec)
            x = read(streams, mixed.pre_Tn, w[f"{prefix}ffn_norm.weight"], eps, dtype)
            chosen = spec.dspark_num_experts_per_tok
            routing = route(x, w, ffn, chosen, spec.routed_scaling_factor)
            loads[prefix] = routing.chosen_TE.sum(0)
            out = experts(x, routing, w, ffn, spec.swiglu_limit)
            streams = spread(out, streams, later.post_Tn, later.mix_Tnn)
            residual = Residual(streams, later.pre_Tn)
        collapsed = (residual.streams_TnD * residual.pre_Tn.unsqueeze(-1)).sum(1)
        return collapsed.unflatten(0, ids_BAK.shape), loads

    def _context(self, batch: PackedBatch, anchors_BA: Tensor) -> tuple[Tensor, Tensor]:
        """Window positions before each anchor [B, A, W], and the additive mask of all keys."""
        window, size = self.spec.sliding_window, self.spec.dspark_block_size
        back = anchors_BA.unsqueeze(-1) + torch.arange(-window, 0, device=anchors_BA.device)
        floor = torch.maximum(batch.starts_BS, batch.clips_BS).gather(1, anchors_BA)
        hidden = back < floor.unsqueeze(-1)
        mask = torch.zeros(hidden.shape, device=back.device).masked_fill_(hidden, -torch.inf)
        return back, F.pad(mask, (0, size))[:, :, None, None]

    def loss(
        self, w: Prepared, batch: PackedBatch, outcome: Outcome, anchors_BA: Tensor
    ) -> Drafted:
        """Cross-entropy with what the target predicts at each place, and of the confidence."""
        spec, size = self.spec, self.spec.dspark_block_size
        last = f"mtp.{spec.num_nextn_predict_layers - 1}."
        x, loads = self.block(w, batch, outcome.taps_TX, anchors_BA)
        dtype = w["head.weight"].dtype
        normed = norm(x, w[f"{last}norm.weight"], spec.rms_norm_eps, dtype)
        base = linear(normed, w["head.weight"]).float()
        length = batch.ids_BS.shape[1]
        rows = torch.arange(len(anchors_BA), device=anchors_BA.device)[:, None, None]
        at = anchors_BA.unsqueeze(-1) + torch.arange(size, device=anchors_BA.device)
        inside = at < length - 1
        at = at.clamp(max=length - 2)
        same = batch.starts_BS[rows, at + 1] == batch.starts_BS.gather(1, anchors_BA)[..., None]
        counts = (inside & same).float()
        markov = F.embedding(batch.ids_BS[rows, at], w[f"{last}markov_head.embed.weight"])
        logits = base + F.linear(markov, w[f"{last}markov_head.head.weight"])
        target = outcome.logits_TV.unflatten(0, batch.ids_BS.shape)[rows, at].float().softmax(-1)
        logs = logits.log_softmax(-1)
        decay = counts * 0.85 ** torch.arange(size, device=counts.device)
        loss = -((target * logs).sum(-1) * decay).sum() / decay.sum().clamp(min=1)
        seen = torch.cat([x, markov], -1).detach()
        confidence = F.linear(seen, w[f"{last}confidence_head.proj.weight"]).squeeze(-1)
        overlap = torch.minimum(target, logs.detach().exp()).sum(-1)
        sure = F.binary_cross_entropy_with_logits(confidence, overlap, reduction="none")
        loss = loss + (sure * counts).sum() / counts.sum().clamp(min=1)
        right = (logits.argmax(-1) == target.argmax(-1)) & (counts > 0)
        reached = right.float().cumprod(-1)
        tried = counts * F.pad(reached, (1, -1), value=1.0)
        return Drafted(loss, reached.sum((0, 1)), tried.sum((0, 1)), loads)


def _attend(q_BAKHd: Tensor, keys_BAJd: Tensor, mask: Tensor, sink_H: Tensor) -> Tensor:
    """Each place of a block sees the whole context and the whole block."""
    heads = q_BAKHd.flatten(2, 3)
    logits = torch.matmul(heads, keys_BAJd.transpose(-1, -2)).unflatten(2, q_BAKHd.shape[2:4])
    logits = logits.float() * q_BAKHd.shape[-1] ** -0.5 + mask
    sink = sink_H.view(1, 1, 1, -1, 1).expand(*logits.shape[:-1], 1)
    weights = torch.softmax(torch.cat([logits, sink], -1), -1)[..., :-1].to(keys_BAJd.dtype)
    return torch.matmul(weights.flatten(2, 3), keys_BAJd).view(q_BAKHd.shape)


def anchors(batch: PackedBatch, count: int) -> Tensor:
    """Positions [B, A] whose next tokens count most."""
    chances = batch.weights_BS.square() + 1e-6
    chances = chances * (batch.starts_BS < torch.arange(chances.shape[1], device=chances.device))
    return torch.multinomial(chances, count, replacement=True)
