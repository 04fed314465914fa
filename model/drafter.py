"""The drafter (DSpark): three stages that guess the tokens after a sampled one, all at once.

Its context is not its own: each stage keeps window rows of what the target model's last layers
read, for every position that the target has processed. A draft then takes the newest token
(the anchor, not processed yet) and placeholders after it, sees the context and its own block in
both directions, and stores nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.formats import fake_quant
from kernels.op import elementwise
from kernels.ops.rope import rotations
from kernels.ops.sparse_attention import sparse_attention
from model.block import Block, Residual
from model.cache import Cache
from model.moe import MakeExperts
from model.norm import RMSNorm
from model.options import ModelOptions
from model.rows import Ints, Rows, pad_rows, pad_tensor
from model.spec import ModelSpec
from model.state import DRAFT_WINDOW
from model.weight_source import WeightSource

# R = requests, B = block size, T = padded R * B rows, W = window size, D = hidden size,
# V = vocabulary

Choose = Callable[[Tensor, int], Tensor]
"""(logits [R, V], place in the block) -> token ids [R]"""


@dataclass(frozen=True)
class Drafts:
    """Token i of a block stands at position length + 1 + i; the anchor at `length`."""

    tokens: Tensor  # int64 [R, B]
    confidence: Tensor  # [R, B] chance that a token is accepted if those before it are
    logits: Tensor  # [R, B, V] that each token was chosen from


class Drafter:
    def __init__(
        self,
        weights: WeightSource,
        spec: ModelSpec,
        options: ModelOptions,
        make_experts: MakeExperts,
        *,
        embed_VD: Tensor,
        head_DV: Tensor,
        frequencies_P: Tensor,
    ) -> None:
        self._spec = spec
        self._embed_VD, self._head_DV, self._frequencies_P = embed_VD, head_DV, frequencies_P
        self._fp8 = options.activations == "fp8"
        self._stages = [
            Block(
                weights,
                f"mtp.{stage}.",
                spec,
                options,
                make_experts,
                experts=spec.dspark_n_routed_experts,
                chosen=spec.dspark_num_experts_per_tok,
            )
            for stage in spec.draft_stages
        ]
        last = f"mtp.{spec.num_nextn_predict_layers - 1}."
        self._main = weights["mtp.0.main_proj"].t().contiguous()
        self._main_norm = RMSNorm(weights, "mtp.0.main_norm", spec)
        self._norm = RMSNorm(weights, f"{last}norm", spec)
        self._markov_VM = weights[f"{last}markov_head.embed.weight"]
        self._markov_MV = weights[f"{last}markov_head.head.weight"].t().contiguous()
        self._confidence = weights[f"{last}confidence_head.proj.weight"].t()

    def tap(self, streams_TnD: Tensor, rows: Rows) -> Tensor:
        """What the drafter takes from a layer's input, [T, D] of each request's newest rows."""
        newest = rows.whole.newest(self._spec.sliding_window, True)
        return rows.collect(streams_TnD, newest).mean(1)

    def observe(self, taps: Tensor, rows: Rows, cache: Cache) -> None:
        """Context rows from `taps` [T, layers tapped * D]; `rows` as they were tapped."""
        rows, _ = rows.whole.plan(_newest, self._spec.sliding_window)
        if self._fp8:
            taps = fake_quant(taps, "fp8")
        main_TD = self._main_norm(taps @ self._main)
        requests = rows.tensor(rows.requests_T[: rows.count])
        positions = rows.tensor(rows.positions_T[: rows.count])
        for number, stage in enumerate(self._stages):
            kv_Td = stage.attention.window_kv(main_TD, rows.turns(0))
            cache.write(DRAFT_WINDOW, number, requests, positions, kv_Td[: rows.count])

    def __call__(
        self,
        anchors_R: Tensor,
        lengths_R: Ints,
        window_starts_R: Ints,
        cache: Cache,
        choose: Choose | None = None,
    ) -> Drafts:
        """Draft after anchors at positions `lengths`, known on the host; greedy unless `choose`
        samples.
        """
        spec, size = self._spec, self._spec.dspark_block_size
        device = anchors_R.device
        count = len(anchors_R) * size
        ids_RB = anchors_R.unsqueeze(1).repeat(1, size)
        ids_RB[:, 1:] = spec.dspark_noise_token_id
        positions_T = pad_rows((lengths_R[:, None] + np.arange(size)).ravel())
        requests_T = torch.from_numpy(pad_rows(np.arange(count) // size)).to(device)
        context = _Context.of(lengths_R, window_starts_R, spec.sliding_window, device)
        turns_T1P = rotations(torch.from_numpy(positions_T), self._frequencies_P).to(device)
        block_mask_T1B = torch.zeros(len(positions_T), 1, size, device=device)
        mask_T1W = context.mask_RW.index_select(0, requests_T).unsqueeze(1)

        residual = Residual.of(self._embed_VD[pad_tensor(ids_RB.flatten())], spec.hc_mult)
        for number, stage in enumerate(self._stages):
            opened = stage.open(residual)
            low_TL, kv_Td = stage.attention.project(opened.x_TD, turns_T1P)
            q_THd, _ = stage.attention.queries(low_TL, turns_T1P)
            block_RBd = fake_quant(kv_Td[:count], "fp8").view(len(anchors_R), size, -1)
            block_TBd = block_RBd.index_select(0, requests_T)
            heads_THd = sparse_attention(
                q_THd,
                context.keys(number, cache).index_select(0, requests_T),
                mask_T1W,
                stage.attention.sink_1H1,
                block_TBd,
                block_mask_T1B,
            )
            residual = stage.close(
                opened, stage.attention.output(heads_THd, turns_T1P), count, None
            )
        return self._guess(residual.read(), anchors_R, choose or _greedy)

    def _guess(self, x_TD: Tensor, anchors_R: Tensor, choose: Choose) -> Drafts:
        """Token after token: each shifts the logits of the next through the Markov head."""
        requests, size = len(anchors_R), self._spec.dspark_block_size
        logits_TV = self._norm(x_TD) @ self._head_DV
        x_RBD = x_TD[: requests * size].view(requests, size, -1)
        logits_RBV = logits_TV[: requests * size].view(requests, size, -1)
        tokens: list[Tensor] = []
        confidence: list[Tensor] = []
        logits: list[Tensor] = []
        previous = anchors_R
        for place in range(size):
            markov = self._markov_VM[pad_tensor(previous)]
            seen = torch.cat([pad_tensor(x_RBD[:, place]), markov], 1)
            confidence.append(elementwise(torch.sigmoid, seen @ self._confidence)[:requests, 0])
            logits.append(logits_RBV[:, place] + (markov @ self._markov_MV)[:requests])
            previous = choose(logits[-1], place)
            tokens.append(previous)
        return Drafts(torch.stack(tokens, 1), torch.stack(confidence, 1), torch.stack(logits, 1))


def _newest(rows: Rows, window: int) -> tuple[Rows, Tensor]:
    return rows.select(rows.newest(window, True))


@dataclass(frozen=True)
class _Context:
    """The window before each request's block: the same for all rows of the block."""

    requests_RW: Tensor
    rows_RW: Tensor  # -1 where there is none
    mask_RW: Tensor

    @classmethod
    def of(
        cls, lengths_R: Ints, window_starts_R: Ints, size: int, device: torch.device
    ) -> _Context:
        rows_RW = lengths_R[:, None] + np.arange(-size, 0)
        hidden_RW = rows_RW < window_starts_R[:, None]
        requests_RW = np.arange(len(lengths_R))[:, None].repeat(size, 1)
        mask_RW = torch.from_numpy(np.where(hidden_RW, -np.inf, 0.0))
        return cls(
            torch.from_numpy(requests_RW).to(device),
            torch.from_numpy(np.where(hidden_RW, -1, rows_RW)).to(device),
            mask_RW.to(torch.get_default_dtype()).to(device),
        )

    def keys(self, stage: int, cache: Cache) -> Tensor:
        """[R, W, d]"""
        return cache.read(DRAFT_WINDOW, stage, self.requests_RW, self.rows_RW)


def _greedy(logits_RV: Tensor, place: int) -> Tensor:
    return logits_RV.argmax(1)
