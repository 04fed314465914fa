"""tandem-mini over packed rows, for training: the whole batch at once, in few large launches.

The project's forward (model/transformer.py) serves ragged batches out of a cache, layer by layer
in many small launches; this one computes the same from whole rows. A test holds the two together.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from examples.mini.batch import PackedBatch
from examples.mini.indexing import Index, attention_weights, choose, index_loss
from examples.mini.joint_attention import Bounds, joint_attention
from examples.mini.sublayers import (
    Prepared,
    Residual,
    Turns,
    engram,
    experts,
    linear,
    mixes,
    ngram_ids,
    norm,
    read,
    rotate,
    rotate_rounded,
    route,
    spread,
    stored_row,
)
from model.engram import engram_hashes
from model.spec import ModelSpec

# B = rows, S = positions, T = B * S, V = vocabulary, D = hidden size, d = head size,
# J = compressed rows, K = sampled positions of each row


@dataclass(frozen=True)
class Settings:
    """How a batch is computed. `sparse`: attention sees the rows that the indexer picks, as when
    served, and not all of them.
    """

    dtype: torch.dtype = torch.float32
    sparse: bool = True


@dataclass(frozen=True)
class Outcome:
    logits_TV: Tensor
    taps_TX: Tensor  # what the drafter reads
    index_losses: list[Tensor]
    loads: dict[str, Tensor]  # positions of each expert by prefix of the layer, [E]


@dataclass
class _Pass:
    """What layers of one forward share."""

    batch: PackedBatch
    bounds: Bounds
    clipped: Bounds  # in layers from the cut on
    turns: dict[int, Turns]  # by ratio, of all T positions
    row_turns: dict[int, Turns]  # of the first positions of compressed rows
    settings: Settings
    w: Prepared
    at_BK: Tensor | None
    rows_BJd: Tensor | None = None
    keys_BJd: Tensor | None = None
    chosen_BSJ: Tensor | None = None
    candidates: list[Tensor] | None = None
    index: Index | None = None
    seen_BKJ: Tensor | None = None
    targets: list[Tensor] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    loads: dict[str, Tensor] = field(default_factory=dict)


class Network:
    def __init__(self, spec: ModelSpec, token_map: Tensor | None, device: torch.device) -> None:
        self.spec = spec
        ids = torch.arange(spec.vocab_size) if token_map is None else token_map
        self._compressed_V = ids.to(device)
        self._pad = int(ids[spec.engram_pad_token_id])
        self._hashes = {
            layer: replace(
                hashing,
                multipliers_N=hashing.multipliers_N.to(device),
                primes_Oh=hashing.primes_Oh.to(device),
                offsets_Oh=hashing.offsets_Oh.to(device),
            )
            for layer, hashing in engram_hashes(spec).items()
        }
        self._frequencies = {
            ratio: torch.tensor(spec.rope_frequencies(ratio), device=device, dtype=torch.float64)
            for ratio in sorted(set(spec.compress_ratios))
        }

    def __call__(
        self,
        w: Prepared,
        batch: PackedBatch,
        settings: Settings,
        at_BK: Tensor | None = None,
    ) -> Outcome:
        """`at_BK`: positions of each row whose attention teaches the indexer; None teaches
        nothing.
        """
        spec = self.spec
        step = self._begin(w, batch, settings, at_BK)
        ngrams_TN = ngram_ids(
            self._compressed_V[batch.ids_BS],
            batch.starts_BS,
            spec.engram_max_ngram_size,
            self._pad,
        )
        hidden_TD = F.embedding(batch.ids_BS.flatten(), w["embed.weight"]).float()
        residual = Residual.of(hidden_TD, spec.hc_mult)
        taps = []
        for layer in range(spec.num_hidden_layers):
            if hashing := self._hashes.get(layer):
                prefix = f"layers.{layer}.engram."
                streams = engram(residual.streams_TnD, ngrams_TN, hashing, w, prefix, spec)
                residual = residual._replace(streams_TnD=streams)
            if layer in spec.dspark_target_layer_ids:
                taps.append(residual.streams_TnD.mean(1))
            residual = self._layer(layer, residual, step)
        last = read(*residual, w["norm.weight"], spec.rms_norm_eps, settings.dtype)
        logits_TV = linear(last, w["head.weight"])
        return Outcome(logits_TV, torch.cat(taps, -1), step.losses, step.loads)

    def _begin(
        self, w: Prepared, batch: PackedBatch, settings: Settings, at_BK: Tensor | None
    ) -> _Pass:
        rows, length = batch.ids_BS.shape
        positions = torch.arange(length, device=batch.ids_BS.device)
        turns, row_turns = {}, {}
        for ratio, frequencies in self._frequencies.items():
            turns[ratio] = Turns.of(positions.repeat(rows), frequencies)
            if ratio:
                row_turns[ratio] = Turns.of(positions[::ratio].repeat(rows), frequencies)
        return _Pass(
            batch,
            Bounds.of(batch.starts_BS, batch.starts_BS),
            Bounds.of(batch.starts_BS, batch.clips_BS),
            turns,
            row_turns,
            settings,
            w,
            at_BK,
        )

    def _layer(self, layer: int, residual: Residual, step: _Pass) -> Residual:
        w, spec, prefix = step.w, self.spec, f"layers.{layer}."
        eps, dtype = spec.rms_norm_eps, step.settings.dtype
        mixed = mixes(residual.streams_TnD, w, f"{prefix}hc_attn", spec)
        x_TD = read(*residual, w[f"{prefix}attn_norm.weight"], eps, dtype)
        out_TD = self._attention(layer, x_TD, step)
        streams = spread(out_TD, residual.streams_TnD, mixed.post_Tn, mixed.mix_Tnn)
        later = mixes(streams, w, f"{prefix}hc_ffn", spec)
        x_TD = read(streams, mixed.pre_Tn, w[f"{prefix}ffn_norm.weight"], eps, dtype)
        ffn = f"{prefix}ffn."
        routing = route(x_TD, w, ffn, spec.num_experts_per_tok, spec.routed_scaling_factor)
        step.loads[prefix] = routing.chosen_TE.sum(0)
        out_TD = experts(x_TD, routing, w, ffn, spec.swiglu_limit)
        return Residual(spread(out_TD, streams, later.post_Tn, later.mix_Tnn), later.pre_Tn)

    def _attention(self, layer: int, x_TD: Tensor, step: _Pass) -> Tensor:
        w, spec, prefix = step.w, self.spec, f"layers.{layer}.attn."
        ratio, dtype, eps = spec.compress_ratios[layer], step.settings.dtype, spec.rms_norm_eps
        turned, shape = step.turns[ratio], step.batch.ids_BS.shape
        low = norm(linear(x_TD, w[f"{prefix}wq_a"]), w[f"{prefix}q_norm.weight"], eps, dtype)
        q = linear(low, w[f"{prefix}wq_b"]).unflatten(-1, (-1, spec.head_dim))
        q_BSHd = rotate(q, *turned, dtype).unflatten(0, shape)
        kv = linear(x_TD, w[f"{prefix}wkv"])
        kv = stored_row(kv, w[f"{prefix}kv_norm.weight"], *turned, "fp8", eps, dtype)
        if ratio:
            self._look(layer, ratio, x_TD, low, step)
        out, lse_BSH = joint_attention(
            q_BSHd,
            kv.unflatten(0, shape),
            step.rows_BJd if ratio else None,
            w[f"{prefix}attn_sink"],
            step.bounds if layer < spec.cut_layer else step.clipped,
            step.chosen_BSJ if ratio else None,
            spec.sliding_window,
            ratio,
        )
        if ratio and step.at_BK is not None:
            self._teach(layer, q_BSHd, lse_BSH, step)
        out = rotate(out.flatten(0, 1), *turned.back(), dtype)
        return project_out(out, w, prefix, spec)

    # -------------------------------------------------------------- compressed rows

    def _look(self, layer: int, ratio: int, x_TD: Tensor, low: Tensor, step: _Pass) -> None:
        """Make rows in a source of rows, and choose among them in a source of choices."""
        spec = self.spec
        if layer in spec.kv_source_layer_ids:
            self._compress(layer, ratio, x_TD, step)
        if layer not in spec.index_source_layer_ids:
            return
        index = self._index(layer, ratio, x_TD.detach(), low.detach(), step)
        step.targets, step.index, step.chosen_BSJ = [], index, None
        if step.settings.sparse:
            narrowed = layer > spec.candidate_source_layer_id
            choice = choose(
                index,
                step.bounds,
                ratio,
                spec,
                names_candidates=layer == spec.candidate_source_layer_id,
                candidates=step.candidates if narrowed else None,
            )
            step.chosen_BSJ, step.candidates = choice.rows_BSJ, choice.candidates
        if step.at_BK is not None:
            step.seen_BKJ = self._seen(ratio, step)

    def _compress(self, layer: int, ratio: int, x_TD: Tensor, step: _Pass) -> None:
        """Compressed rows, and index keys made of the latents without gradient: what the indexer
        learns does not change the rows.
        """
        w, spec, prefix = step.w, self.spec, f"layers.{layer}.attn."
        eps, dtype, rows = spec.rms_norm_eps, step.settings.dtype, len(step.batch.ids_BS)
        latents = linear(x_TD, w[f"{prefix}compressor.wkv.weight"]).float()
        if ratio == 2:
            gates = linear(x_TD, w[f"{prefix}compressor.wgate.weight"]).float()
            shares = torch.softmax(gates.unflatten(0, (-1, 2)), 1)
            latents = (latents.unflatten(0, (-1, 2)) * shares).sum(1)
        weight = w[f"{prefix}compressor.norm.weight"]
        turned = step.row_turns[ratio]
        made = stored_row(latents, weight, *turned, "fp4_e4m3", eps, dtype)
        latents = norm(latents.detach(), weight.detach(), eps, dtype)
        keys = linear(latents, w[f"{prefix}indexer.wk.weight"])
        weight = w[f"{prefix}indexer.k_norm.weight"]
        keys = stored_row(keys, weight, *turned, "fp4", eps, dtype)
        step.rows_BJd, step.keys_BJd = made.unflatten(0, (rows, -1)), keys.unflatten(0, (rows, -1))

    def _index(self, layer: int, ratio: int, x_TD: Tensor, low: Tensor, step: _Pass) -> Index:
        w, spec, prefix = step.w, self.spec, f"layers.{layer}.attn.indexer."
        queries = linear(low, w[f"{prefix}wq_b"]).unflatten(-1, (spec.index_n_heads, -1))
        queries = rotate_rounded(queries, *step.turns[ratio], "fp4", step.settings.dtype)
        scale = (spec.index_n_heads * spec.index_head_dim) ** -0.5
        weights = linear(x_TD, w[f"{prefix}weights_proj.weight"]).float() * scale
        shape = step.batch.ids_BS.shape
        assert step.keys_BJd is not None
        return Index(queries.unflatten(0, shape), weights.unflatten(0, shape), step.keys_BJd)

    # -------------------------------------------------------------- what the indexer learns

    def _seen(self, ratio: int, step: _Pass) -> Tensor:
        assert step.at_BK is not None
        rows = torch.arange(step.batch.ids_BS.shape[1] // ratio, device=step.at_BK.device)
        at = step.at_BK.unsqueeze(-1)
        starts = step.batch.starts_BS.gather(1, step.at_BK).unsqueeze(-1)
        return ((rows + 1) * ratio - 1 <= at) & (rows * ratio >= starts)

    def _teach(self, layer: int, q_BSHd: Tensor, lse_BSH: Tensor, step: _Pass) -> None:
        """At the last layer that shares a choice: the loss of the indexer that made it."""
        spec = self.spec
        assert step.at_BK is not None
        assert step.rows_BJd is not None
        assert step.index is not None
        assert step.seen_BKJ is not None
        rows_BJd, seen = step.rows_BJd.detach(), step.seen_BKJ
        step.targets.append(
            attention_weights(q_BSHd.detach(), rows_BJd, lse_BSH.detach(), step.at_BK, seen)
        )
        last = layer + 1 == spec.num_hidden_layers or layer + 1 in spec.index_source_layer_ids
        if last:
            target = torch.stack(step.targets).mean(0)
            step.losses.append(index_loss(target, step.index.sampled(step.at_BK), seen))


def project_out(out_THd: Tensor, w: Prepared, prefix: str, spec: ModelSpec) -> Tensor:
    """Heads to the hidden size: by groups, then together."""
    groups = out_THd.flatten(-2).unflatten(-1, (spec.o_groups, -1)).transpose(0, 1)
    project = w[f"{prefix}wo_a"].unflatten(0, (spec.o_groups, -1)).transpose(1, 2)
    joint = torch.bmm(groups, project).transpose(0, 1).flatten(1)
    return linear(joint, w[f"{prefix}wo_b"])
