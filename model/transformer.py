"""DeepSeek-V4.1's language model: ragged batches in, logits out, request state in a cache.

A forward takes chunks of prompts and decode rows of any requests together. Knows nothing of
requests' lives, of sampling, or of how a cache stores its rows.
Source: model code and technical report of DeepSeek-V4.1-Flash.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from model.batch import ForwardBatch
from model.block import Residual
from model.cache import Cache
from model.context_parallel import Gather, shared
from model.drafter import Choose, Drafter, Drafts
from model.engram import CompressedIds, Engram, engram_hashes
from model.layer import Layer
from model.leaving import check_cut, going_on
from model.moe import LocalExperts, MakeExperts
from model.norm import RMSNorm
from model.options import ModelOptions
from model.rows import Ints, Rows, pad_tensor
from model.spec import ModelSpec
from model.step import Step
from model.vision import VisionEncoder
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
        vision: bool = False,
    ) -> None:
        """All is computed on the device that the weights are on, and in their precision.

        `token_map`: Engram's compressed id of each token id, on the host; None is the identity.
        `vision`: build the vision encoder too; it needs the weights of that group.

        Raises ValueError for a config that cannot be truncated as the options ask.
        """
        self.spec, self.options = spec, options or ModelOptions()
        self.weights = weights
        if self.options.truncation != "off":
            check_cut(spec)
        self._frequencies = {
            has_rows: torch.tensor(spec.rope_frequencies(int(has_rows)), dtype=torch.float64)
            for has_rows in (False, True)
        }
        self._embed_VD = weights["embed.weight"]
        self.device = self._embed_VD.device
        self.vision = VisionEncoder(weights, spec.vision) if vision and spec.vision else None
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

    def forward(self, batch: ForwardBatch, cache: Cache, ranks: Gather | None = None) -> Tensor:
        """Logits [len(batch.logit_rows), V], float32; the state of all rows goes into the cache.

        A row's results do not depend on the rest of the batch, nor on how a prompt was cut into
        chunks. Several `ranks` can share the work (context parallelism): each calls this with
        the same batch, fills its own cache wholly, and gets all logits.

        Raises ValueError for window starts that the options do not allow.
        """
        self._check(batch)
        rollback = self.spec.dspark_block_size
        whole = rows = Rows.of(batch, self._frequencies, rollback, self.device)
        logit_rows = batch.logit_rows.numpy()
        if ranks is not None:
            share = shared(whole, ranks)
            rows, batch = share.rows(), batch.take(share.taken)
        step = Step(rows, cache, going_on(whole, logit_rows, self.spec, self.options))
        ngrams_TN = self._compressed_ids(pad_tensor(batch.ngrams_Tn))
        residual = Residual.of(self._embed(batch), self.spec.hc_mult)
        taps = []
        for number, layer in enumerate(self._layers):
            if engram := self._engrams.get(number):
                streams_TnD = engram(residual.streams_TnD, ngrams_TN, step.rows)
                residual = residual._replace(streams_TnD=streams_TnD)
            if number in self.spec.dspark_target_layer_ids:
                taps.append(self._drafter.tap(residual.streams_TnD, step.rows))
            residual = layer(residual, step)
            if not step.rows.whole.count:  # a chunk wholly below its window start ends at the cut
                return residual.streams_TnD.new_zeros(0, self.spec.vocab_size)
        self._drafter.observe(torch.cat(taps, 1), step.rows, cache)
        return self._logits(residual, step, logit_rows)

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
        geometry = np.array(lengths), np.array(starts)
        anchors_R = torch.tensor(anchors).to(self.device)
        return self._drafter(anchors_R, *geometry, cache, choose)

    def _embed(self, batch: ForwardBatch) -> Tensor:
        hidden_TD = self._embed_VD[pad_tensor(batch.token_ids_T).to(self.device)]
        if batch.embeddings_TD is None:
            return hidden_TD
        given_T = batch.images_T.numpy()
        if batch.embedded_T is not None:
            given_T = given_T & batch.embedded_T.numpy()
        rows = torch.from_numpy(given_T.nonzero()[0]).to(self.device)
        given_TD = batch.embeddings_TD.to(hidden_TD)
        return hidden_TD.index_copy(0, rows, given_TD.index_select(0, rows))

    def _logits(self, residual: Residual, step: Step, rows: Ints) -> Tensor:
        places = step.places_of(rows)
        wanted = Residual(*(step.rows.collect(part, places) for part in residual))
        return (self._norm(wanted.read()) @ self._head_DV)[: len(rows)]

    def _check(self, batch: ForwardBatch) -> None:
        starts_R = batch.window_starts_R.numpy()
        if not starts_R.any():
            return
        if self.options.truncation == "off":
            raise ValueError("the batch has window starts, but prefill truncation is off")
        rows = batch.logit_rows.numpy()
        if (batch.positions_T.numpy()[rows] < starts_R[batch.requests_T.numpy()[rows]]).any():
            raise ValueError("logits are wanted of rows below their request's window start")
