"""DeepSeek-V4.1's language model on weights and request state as they are stored.

The maths of model/transformer.py, which runs in any precision anywhere and is the reference; this
one does a step in few launches that depend on nothing but shapes: where all requests have few
rows it can be captured as a graph. Knows nothing of requests' lives or of what a slab is.
Source: model code and technical report of DeepSeek-V4.1-Flash.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from kernels.ops.norm_rows import collapse_norm
from model.engram import CompressedIds, engram_hashes
from model.leaving import check_cut
from model.options import ModelOptions
from model.packed.block import Residual
from model.packed.engram import Engram
from model.packed.geometry import Geometry
from model.packed.layer import Layer
from model.packed.observer import Observer
from model.packed.product import float32_product
from model.packed.ranges import named
from model.packed.rows import Extras, OnLayer, PackedRows, Shape
from model.packed.state import StateView
from model.packed.step import Step
from model.packed.weight_source import MakeExperts, Source
from model.spec import ModelSpec
from model.vision import VisionEncoder

# T = rows, N = longest n-gram, n = streams, D = hidden size, L = rows of logits, V = vocabulary


class PackedTransformer:
    def __init__(
        self,
        spec: ModelSpec,
        weights: Source,
        options: ModelOptions | None = None,
        token_map: Tensor | None = None,
        *,
        make_experts: MakeExperts[Source],
        vision: VisionEncoder | None = None,
    ) -> None:
        """All is computed on the device of the weights and in their dtype.

        `token_map`: Engram's compressed id of each token id, on the host; None is the identity.
        Raises ValueError for a config that cannot be truncated as the options ask.
        """
        self.spec, self.options, self.vision = spec, options or ModelOptions(), vision
        if self.options.truncation != "off":
            check_cut(spec)
        self.device, self.dtype = weights.device, weights.dtype
        kinds = (spec.rope_frequencies(0), spec.rope_frequencies(1), spec.rope_frequencies(1))
        self._frequencies_3P = torch.tensor(kinds, dtype=torch.float64, device=self.device)
        self._embed_VD = weights.matrix("embed.weight")
        self._norm = weights.vector("norm.weight")
        self._head_DV = weights.matrix("head.weight").t()
        self._host_ids = CompressedIds(spec, token_map)
        on_device = None if token_map is None else token_map.to(self.device)
        self._compressed_ids = CompressedIds(spec, on_device)
        self._engrams = {
            layer: Engram(weights, layer, hashing, spec, self.options)
            for layer, hashing in engram_hashes(spec).items()
        }
        self._layers = [
            Layer(weights, layer, spec, self.options, make_experts)
            for layer in range(spec.num_hidden_layers)
        ]
        self._observer = Observer(weights, spec, self.options)

    @property
    def looks_up_on_device(self) -> bool:
        """Whether a forward finds Engram's values itself; else it must be given them."""
        return all(engram.on_device for engram in self._engrams.values())

    def host_engram(self, ngrams_TN: Tensor) -> Mapping[int, Tensor]:
        """Values of Engram's tables by layer, for PackedRows.engram; all on the host."""
        ids_TN = self._host_ids(ngrams_TN)
        return {layer: engram.values(ids_TN) for layer, engram in self._engrams.items()}

    @torch.inference_mode()
    def forward(
        self,
        rows: PackedRows,
        shape: Shape,
        state: StateView,
        extras: Extras | None = None,
        on_layer: OnLayer | None = None,
    ) -> Tensor:
        """Logits [L, V] of the rows that the extras name, or of all rows; float32.

        The state of all rows goes into memory. `extras` are needed unless the shape is in place.
        `on_layer` hears of each KV source whose rows have been written: not of those that wait
        to be, on a device; record an event there.
        """
        assert shape.in_place or extras is not None
        step = self._step(rows, shape, state, extras, on_layer)
        with named("embed"):
            residual = Residual.of(self._embed(rows, extras), self.spec.hc_mult)
            ids_TN = self._compressed_ids(rows.ngrams_TN) if self._engrams else rows.ngrams_TN
        taps: list[Tensor] = []
        for number, layer in enumerate(self._layers):
            if engram := self._engrams.get(number):
                streams_TnD = engram(residual.streams_TnD, ids_TN, step.rows, step.images_T)
                residual = residual._replace(streams_TnD=streams_TnD)
            if number in self.spec.dspark_target_layer_ids:
                with named("tap"):
                    taps.append(residual.streams_TnD.mean(1))
            residual = layer(residual, step)
            if number == self.spec.cut_layer and step.leaving is not None:
                index_T = step.leaving.going_on_T
                if not len(index_T):  # chunks wholly below their window starts end at the cut
                    return self._logits(residual)
                taps = [tap.index_select(0, index_T) for tap in taps]
                ids_TN = ids_TN.index_select(0, index_T)
        self._observer(taps, step)
        return self._logits(residual if extras is None else residual.select(extras.logit_rows))

    def _step(
        self,
        rows: PackedRows,
        shape: Shape,
        state: StateView,
        extras: Extras | None,
        on_layer: OnLayer | None,
    ) -> Step:
        images_T, leaving, after_cut = None, None, None
        if extras is not None:
            images_T, leaving = extras.images_T, extras.leaving
        if images_T is None:
            images_T = rows.token_ids_T == self.spec.image_token_id
        if leaving is not None:
            left = leaving.rows
            if rows.engram is not None:
                found = rows.engram.items()
                given = {one: values[leaving.going_on_T] for one, values in found}
                left = replace(left, engram=given)
            after_cut = self._geometry(left, leaving.shape, extras)
        geometry = self._geometry(rows, shape, extras)
        return Step(geometry, after_cut, leaving, state, images_T, on_layer)

    def _geometry(self, rows: PackedRows, shape: Shape, extras: Extras | None) -> Geometry:
        return Geometry(
            rows,
            shape,
            None if extras is None else extras.ends_R,
            self._frequencies_3P,
            self.spec.sliding_window,
            self.spec.dspark_block_size,
        )

    def _embed(self, rows: PackedRows, extras: Extras | None) -> Tensor:
        hidden_TD = self._embed_VD.index_select(0, rows.token_ids_T)
        if extras is None or extras.embedded is None:
            return hidden_TD
        return hidden_TD.index_copy(
            0, extras.embedded.rows_N, extras.embedded.values_ND.to(hidden_TD)
        )

    def _logits(self, residual: Residual) -> Tensor:
        with named("logits"):
            x_TD = collapse_norm(*residual, self._norm, self.spec.rms_norm_eps).plain_TD
            return float32_product(x_TD, self._head_DV)
