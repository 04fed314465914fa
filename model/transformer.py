"""DeepSeek-V4.1's language model: ragged batches in, logits out, request state in a cache.

A forward takes chunks of prompts and decode rows of any requests together. Knows nothing of
requests' lives, of sampling, or of how a cache stores its rows.
Source: model code and technical report of DeepSeek-V4.1-Flash.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from model.batch import ForwardBatch
from model.block import Residual
from model.cache import Cache
from model.drafter import Choose, Drafter, Drafts
from model.engram import CompressedIds, Engram, engram_hashes
from model.layer import Layer
from model.moe import LocalExperts, MakeExperts
from model.norm import RMSNorm
from model.options import ModelOptions
from model.rows import Rows, pad_tensor
from model.spec import ModelSpec
from model.step import Step
from model.weight_source import WeightSource

__all__ = ["Drafts", "ModelOptions", "Transformer"]

# T = padded rows, N = longest n-gram, n = streams, D = hidden size, V = vocabulary


class Transformer:
    def __init__(
        self,
        spec: ModelSpec,
        weights: WeightSource,
        options: ModelOptions | None = None,
        token_map: Tensor | None = None,
        *,
        make_experts: MakeExperts = LocalExperts,
    ) -> None:
        """`token_map`: Engram's compressed id of each token id; None where it is the identity.

        Raises ValueError for a config that cannot be truncated as the options ask.
        """
        self.spec, self.options = spec, options or ModelOptions()
        self.weights = weights
        if self.options.truncation != "off":
            _check_cut(spec)
        self._frequencies = {
            has_rows: torch.tensor(spec.rope_frequencies(int(has_rows)), dtype=torch.float64)
            for has_rows in (False, True)
        }
        self._embed_VD = weights["embed.weight"]
        self._norm = RMSNorm(weights, "norm", spec)
        self._head_DV = weights["head.weight"].t().contiguous()
        self._compressed_ids = CompressedIds(spec, token_map)
        self._engrams = {
            layer: Engram(weights, layer, hashing, spec, self.options)
            for layer, hashing in engram_hashes(spec).items()
        }
        self._layers = [
            Layer(weights, layer, spec, self.options, make_experts)
            for layer in range(spec.num_hidden_layers)
        ]
        self._drafter = Drafter(
            weights,
            spec,
            self.options,
            make_experts,
            embed_VD=self._embed_VD,
            head_DV=self._head_DV,
            frequencies_P=self._frequencies[False],
        )

    def forward(self, batch: ForwardBatch, cache: Cache) -> Tensor:
        """Logits [len(batch.logit_rows), V], float32; the state of all rows goes into the cache.

        A row's results do not depend on the rest of the batch, nor on how a prompt was cut into
        chunks. Raises ValueError for window starts that the options do not allow.
        """
        self._check(batch)
        step = Step(Rows.of(batch, self._frequencies, self.spec.dspark_block_size), cache)
        ngrams_TN = self._compressed_ids(pad_tensor(batch.ngrams_Tn))
        residual = Residual.of(self._embed(batch), self.spec.hc_mult)
        taps = []
        for number, layer in enumerate(self._layers):
            if engram := self._engrams.get(number):
                streams_TnD = engram(residual.streams_TnD, ngrams_TN, step.rows)
                residual = residual._replace(streams_TnD=streams_TnD)
            if number in self.spec.dspark_target_layer_ids:
                taps.append(residual.streams_TnD.mean(1))
            residual = layer(residual, step)
            if not step.rows.count:  # a chunk wholly below its window start ends at the cut
                return residual.streams_TnD.new_zeros(0, self.spec.vocab_size)
        self._drafter.observe(torch.cat(taps, 1), step.rows, cache)
        return self._logits(residual, step.places_of(batch.logit_rows))

    def draft(
        self,
        anchors: Sequence[int],
        lengths: Sequence[int],
        cache: Cache,
        *,
        window_starts: Sequence[int] | None = None,
        choose: Choose | None = None,
    ) -> Drafts:
        """Guess what follows `anchors`, sampled but not processed, after `lengths` positions.

        `window_starts` as in the forwards that filled the cache; default 0. Greedy unless
        `choose` samples the tokens.
        """
        starts = [0] * len(lengths) if window_starts is None else window_starts
        anchors_R, lengths_R, starts_R = map(torch.tensor, (anchors, lengths, starts))
        return self._drafter(anchors_R, lengths_R, starts_R, cache, choose)

    def _embed(self, batch: ForwardBatch) -> Tensor:
        hidden_TD = self._embed_VD[pad_tensor(batch.token_ids_T)]
        if batch.embeddings_TD is not None:
            given_T = batch.images_T
            if batch.embedded_T is not None:
                given_T = given_T & batch.embedded_T
            hidden_TD[: batch.num_rows][given_T] = batch.embeddings_TD[given_T]
        return hidden_TD

    def _logits(self, residual: Residual, rows: Tensor) -> Tensor:
        index = pad_tensor(rows)
        wanted = Residual(residual.streams_TnD[index], residual.pre_Tn[index])
        return (self._norm(wanted.read()) @ self._head_DV)[: len(rows)]

    def _check(self, batch: ForwardBatch) -> None:
        starts_R = batch.window_starts_R
        if not bool(starts_R.any()):
            return
        if self.options.truncation == "off":
            raise ValueError("the batch has window starts, but prefill truncation is off")
        rows = batch.logit_rows
        if bool((batch.positions_T[rows] < starts_R[batch.requests_T[rows]]).any()):
            raise ValueError("logits are wanted of rows below their request's window start")


def _check_cut(spec: ModelSpec) -> None:
    """After the cut only some rows exist, so nothing there may need the others."""
    cut = spec.cut_layer
    if max(spec.engram_layer_ids, default=0) > cut:
        raise ValueError(f"prefill cannot be truncated at layer {cut}: Engram follows it")
    if min(spec.dspark_target_layer_ids) <= cut or spec.candidate_source_layer_id < cut:
        raise ValueError(f"prefill cannot be truncated at layer {cut}: later layers look before it")
