"""The indexer over packed rows: its choice, without gradient, and the loss that teaches it.

It learns where attention looks: its scores at a few sampled positions against the weights that
heads give to rows there. Its inputs are detached, so that nothing else learns from that loss.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from examples.mini.joint_attention import Bounds, visible
from model.spec import ModelSpec

# B = rows, S = positions, K = sampled positions, H = heads, h = index heads, J = compressed rows

_PIECE = 1024  # positions scored at once


@dataclass(frozen=True)
class Index:
    queries_BShd: Tensor
    weights_BSh: Tensor
    keys_BJd: Tensor

    def scores(self, first: int, end: int, count: int) -> Tensor:
        """[B, positions first .. end, count]"""
        q, weights = self.queries_BShd[:, first:end], self.weights_BSh[:, first:end]
        return _score(q, weights, self.keys_BJd[:, :count])

    def sampled(self, at_BK: Tensor) -> Tensor:
        """[B, K, J]"""
        rows = torch.arange(len(at_BK), device=at_BK.device).unsqueeze(1)
        return _score(self.queries_BShd[rows, at_BK], self.weights_BSh[rows, at_BK], self.keys_BJd)


def _score(q_BChd: Tensor, weights_BCh: Tensor, keys_BJd: Tensor) -> Tensor:
    total: Tensor | None = None
    for head in range(q_BChd.shape[2]):  # one after another: all at once would be h times J
        products = torch.matmul(q_BChd[:, :, head], keys_BJd.transpose(-1, -2)).relu()
        term = products * weights_BCh[:, :, head, None].to(products.dtype)
        total = term if total is None else total + term
    assert total is not None
    return total.float()


@dataclass(frozen=True)
class Choice:
    """`rows_BSJ` int8: what each position attends to. `candidates` bool, in pieces of positions,
    where a later indexer may look.
    """

    rows_BSJ: Tensor
    candidates: list[Tensor] | None


@torch.no_grad()
def choose(
    index: Index,
    bounds: Bounds,
    ratio: int,
    spec: ModelSpec,
    *,
    names_candidates: bool,
    candidates: list[Tensor] | None,
) -> Choice:
    batch, length = bounds.starts_BS.shape
    device = bounds.starts_BS.device
    chosen = torch.zeros(batch, length, length // ratio, dtype=torch.int8, device=device)
    named: list[Tensor] = []
    for number, first in enumerate(range(0, length, _PIECE)):
        end = min(first + _PIECE, length)
        count = end // ratio
        mask = visible(bounds, count, ratio, first, end)
        scores = index.scores(first, end, count).masked_fill(~mask, -torch.inf)
        if names_candidates:
            named.append(_candidates(scores, mask, spec))
        if candidates is not None:
            scores = scores.masked_fill(~candidates[number], -torch.inf)
        chosen[:, first:end, :count] = _best(scores, spec.index_topk)
    return Choice(chosen, named or candidates)


def _best(scores: Tensor, count: int) -> Tensor:
    if scores.shape[-1] <= count:
        return (scores > -torch.inf).to(torch.int8)
    best = scores.topk(count, -1, sorted=False)
    mask = torch.zeros_like(scores, dtype=torch.int8)
    return mask.scatter_(-1, best.indices, (best.values > -torch.inf).to(torch.int8))


def _candidates(scores: Tensor, mask: Tensor, spec: ModelSpec) -> Tensor:
    """The best blocks of rows, the newest visible one always.

    Blocks are counted from the packed row's begin, in the model from the document's.
    """
    size = spec.candidate_block_size
    blocks = scores.unflatten(-1, (-1, size)).amax(-1)
    if blocks.shape[-1] <= spec.candidate_topk_blocks:
        return mask
    numbers = torch.arange(mask.shape[-1], device=scores.device)
    newest = torch.where(mask, numbers, -1).amax(-1, keepdim=True).clamp(min=0) // size
    blocks = blocks.scatter(-1, newest, torch.inf)
    best = blocks.topk(spec.candidate_topk_blocks, -1, sorted=False).indices
    kept = torch.zeros_like(blocks, dtype=torch.bool).scatter_(-1, best, True)
    return torch.logical_and(kept.repeat_interleave(size, -1), mask)


@torch.no_grad()
def attention_weights(
    q_BSHd: Tensor, rows_BJd: Tensor, lse_BSH: Tensor, at_BK: Tensor, seen_BKJ: Tensor
) -> Tensor:
    """What heads give to each row at sampled positions, their mean. [B, K, J]"""
    rows = torch.arange(len(at_BK), device=at_BK.device).unsqueeze(1)
    q_BKHd = q_BSHd[rows, at_BK]
    logits = torch.matmul(q_BKHd.flatten(1, 2), rows_BJd.transpose(-1, -2)).float()
    logits = logits.unflatten(1, q_BKHd.shape[1:3]) * q_BSHd.shape[-1] ** -0.5
    weights = (logits - lse_BSH[rows, at_BK].unsqueeze(-1)).exp().mean(2)
    return torch.mul(weights, seen_BKJ)


def index_loss(target_BKJ: Tensor, scores_BKJ: Tensor, seen_BKJ: Tensor) -> Tensor:
    """Cross-entropy with where attention looked; heads that look nowhere far weigh little."""
    logs = torch.log_softmax(scores_BKJ.masked_fill(~seen_BKJ, -1e4), -1)
    return -(target_BKJ * logs).sum() / target_BKJ.sum().clamp(min=1e-3)
