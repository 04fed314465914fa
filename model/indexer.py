"""The indexer of an index source: which compressed rows each row attends to.

The candidate source scores all rows and also keeps the best blocks of rows; the index sources
after it look only there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.formats import fake_quant
from kernels.op import padded
from kernels.ops.index_score import index_score
from kernels.ops.rope import rope
from kernels.ops.top_rows import top_rows
from model.rows import Ints, Rows
from model.spec import ModelSpec
from model.state import compressed, index_keys
from model.step import Selected, Step
from model.weight_source import WeightSource

_PIECE = 64  # rows of a long chunk that are scored together
_KEY_MULTIPLE = 16  # of index keys scored at once: a score must not depend on how many there are

# T = padded rows, G = pieces of a group, Q = padded rows of each, J = padded index keys of each,
# B = blocks of J, K = rows chosen, h = index heads, d = index head size


@dataclass(frozen=True)
class Group:
    """Pieces of requests, of equally many rows, that are scored together."""

    count: int  # rows of each piece
    rows: Tensor  # [G * count] of the forward
    rows_GQ: Tensor
    visible_GQ: Tensor  # compressed rows that are complete at each row's position; 0: padding
    requests_GJ: Tensor
    keys_GJ: Tensor  # row numbers of index keys, -1 beyond what a piece can see
    hidden_GQJ: Tensor  # keys that a row does not see yet
    most: int  # the largest of visible_GQ

    @classmethod
    def of(cls, rows: Rows, first_G1: Ints, count: int, ratio: int, block: int) -> Group:
        """Pieces that begin at rows `first`; J is a multiple of `block`."""
        offsets_Q = np.arange(padded(count))
        rows_GQ = first_G1 + np.minimum(offsets_Q, count - 1)
        visible_GQ = (rows.positions_T[rows_GQ] + 1) // ratio
        visible_GQ[:, count:] = 0
        known_G1 = visible_GQ.max(1, keepdims=True)
        most = int(known_G1.max())
        keys_J = np.arange(-(-max(most, 1) // block) * block)
        keys_GJ = np.where(keys_J < known_G1, keys_J, -1)
        requests_G1 = rows.tensor(rows.requests_T[first_G1])
        return cls(
            count,
            rows.tensor(rows_GQ[:, :count].ravel()),
            rows.tensor(rows_GQ),
            rows.tensor(visible_GQ),
            requests_G1.expand(keys_GJ.shape),
            rows.tensor(keys_GJ),
            rows.tensor(keys_J >= visible_GQ[:, :, None]),
            most,
        )


def groups_of(rows: Rows, ratio: int, block: int) -> list[Group]:
    """Short chunks of equal length make one group; of long ones, each piece sees only what it
    can, which halves the work of a whole prompt.
    """
    found = []
    first_N, counts_N = rows.runs
    for count in sorted(set(counts_N.tolist())):
        first_G1 = first_N[counts_N == count][:, None]
        if count <= _PIECE:
            found.append(Group.of(rows, first_G1, count, ratio, block))
            continue
        for start in range(0, count, _PIECE):
            length = min(_PIECE, count - start)
            found += [
                Group.of(rows, first[None] + start, length, ratio, block) for first in first_G1
            ]
    return found


class Indexer:
    def __init__(self, weights: WeightSource, layer: int, spec: ModelSpec) -> None:
        self._source, self._ratio = spec.kv_source(layer), spec.compress_ratios[layer]
        self._heads, self._size = spec.index_n_heads, spec.index_head_dim
        self._top_rows, self._top_blocks = spec.index_topk, spec.candidate_topk_blocks
        self._block = spec.candidate_block_size
        self._chooses_candidates = layer == spec.candidate_source_layer_id
        self._narrowed = layer > spec.candidate_source_layer_id
        project = weights[f"layers.{layer}.attn.indexer.weights_proj.weight"]
        self._weights_Dh = project.t().contiguous() * (self._size * self._heads) ** -0.5

    def __call__(self, queries: Tensor, x_TD: Tensor, step: Step) -> None:
        """Choose rows for this layer and those after it. `queries` [T, h * d], not rotated."""
        rows = step.rows
        groups = rows.plan(groups_of, self._ratio, math.lcm(_KEY_MULTIPLE, self._block))
        q_Thd = rope(queries.view(-1, self._heads, self._size), rows.turns(self._ratio))
        q_Thd = fake_quant(q_Thd, "fp4")
        weights_Th = x_TD @ self._weights_Dh
        chosen_TK = torch.full((x_TD.shape[0], self._top_rows), -1, device=x_TD.device)
        for number, group in enumerate(groups):
            chosen_GQK = self._choose(q_Thd, weights_Th, number, group, step)
            chosen_TK.index_copy_(0, group.rows, chosen_GQK[:, : group.count].flatten(0, 1))
        requests_TK = rows.tensor(rows.requests_T).unsqueeze(1).expand_as(chosen_TK)
        keys_TKd = step.cache.read(compressed(self._ratio), self._source, requests_TK, chosen_TK)
        mask_TK = torch.zeros(chosen_TK.shape, device=x_TD.device)
        mask_TK.masked_fill_(chosen_TK < 0, -torch.inf)
        step.selected = Selected(keys_TKd, mask_TK.unsqueeze(1))

    def _choose(
        self, q_Thd: Tensor, weights_Th: Tensor, number: int, group: Group, step: Step
    ) -> Tensor:
        """Row numbers [G, Q, K], ascending, -1 where there are no more."""
        narrow = self._chooses_candidates and group.most > self._top_blocks * self._block
        candidates = step.candidates.get(number) if self._narrowed else None
        if group.most <= self._top_rows and candidates is None and not narrow:
            rows_K = torch.arange(self._top_rows, device=q_Thd.device)
            return torch.where(rows_K < group.visible_GQ.unsqueeze(2), rows_K, -1)
        keys_GJd = self._keys(number, group, step)
        q_GQhd, weights_GQh = q_Thd[group.rows_GQ], weights_Th[group.rows_GQ]
        scores_GQJ = index_score(q_GQhd, weights_GQh, keys_GJd, group.hidden_GQJ)
        if narrow:
            step.candidates[number] = self._candidates(scores_GQJ, group)
        if candidates is not None:
            scores_GQJ = scores_GQJ.masked_fill(~candidates, -torch.inf)
        return top_rows(scores_GQJ, self._top_rows)

    def _candidates(self, scores_GQJ: Tensor, group: Group) -> Tensor:
        """bool [G, Q, J]: the best blocks of rows; the newest visible row's block always."""
        scores_GQB = scores_GQJ.view(*group.rows_GQ.shape, -1, self._block).amax(3)
        newest_GQ1 = ((group.visible_GQ - 1).clamp(min=0) // self._block).unsqueeze(2)
        scores_GQB = scores_GQB.scatter(2, newest_GQ1, torch.inf)
        best = top_rows(scores_GQB, self._top_blocks)
        blocks = scores_GQB.shape[2]
        shape = (*best.shape[:2], blocks + 1)
        chosen_GQB = torch.zeros(shape, dtype=torch.bool, device=best.device)
        chosen_GQB.scatter_(2, best.masked_fill(best < 0, blocks), True)
        return chosen_GQB[:, :, :blocks].repeat_interleave(self._block, 2)

    def _keys(self, number: int, group: Group, step: Step) -> Tensor:
        """Index keys [G, J, d]; index sources that share them read them once."""
        key = (self._source, number)
        if key not in step.index_keys:
            step.index_keys[key] = step.cache.read(
                index_keys(self._ratio), self._source, group.requests_GJ, group.keys_GJ
            )
        return step.index_keys[key]
