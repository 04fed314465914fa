"""Every CPU op gives a row the same bits in any batch, also where widths fill no whole vector."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels.formats import fake_quant, pack
from kernels.op import elementwise, padded
from kernels.ops.compress import compress
from kernels.ops.engram import engram_gates
from kernels.ops.expert_mlp import expert_mlp, gated_mlp
from kernels.ops.hyper_connection import collapse, mixes, mixing_logits, spread
from kernels.ops.index_score import index_score
from kernels.ops.rms_norm import rms_norm
from kernels.ops.rope import rope, rotations
from kernels.ops.route import route
from kernels.ops.sparse_attention import sparse_attention
from kernels.ops.top_rows import top_rows

Rowwise = Callable[[Tensor], tuple[Tensor, ...]]
ROWS = 600
EPS = torch.tensor(1e-20)


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


X = noise(ROWS, 192)
STREAMS, PAIR = noise(ROWS, 4, 160), noise(ROWS, 2, 96)
KEYS, QUERIES = noise(ROWS, 21, 64), noise(ROWS, 4, 64)
MASK = torch.zeros(ROWS, 1, 21).masked_fill_(noise(ROWS, 1, 21) > 0.8, -torch.inf)
SCORES = noise(ROWS, 77).round(decimals=1)
EXPERTS = noise(ROWS, 6).argsort(1)[:, :3].contiguous()
POSITIONS = torch.randint(0, 1 << 20, (ROWS,), generator=torch.Generator().manual_seed(1))
GATE_UP, DOWN = noise(6, 192, 128) / 14, noise(6, 64, 192) / 8
FREQUENCIES = torch.tensor([10000.0 ** (-i / 16) for i in range(16)], dtype=torch.float64)

OPS: dict[str, Rowwise] = {
    "linear": lambda r: (X[r] @ GATE_UP[0], X[r] @ GATE_UP[0][:, :6], X[r] @ GATE_UP[0][:, :1]),
    "grouped linear": lambda r: (
        torch.bmm(X[r].view(-1, 3, 64).transpose(0, 1), noise(3, 64, 40)).transpose(0, 1),
    ),
    "rms_norm": lambda r: (rms_norm(X[r], X[0], EPS),),
    "rope": lambda r: (
        rope(QUERIES[r].clone(), rotations(POSITIONS[r], FREQUENCIES)),
        rope(QUERIES[r].clone(), rotations(POSITIONS[r], FREQUENCIES).conj()),
    ),
    "mixes of 4": lambda r: mixes(2 * X[r, :24], 4, 20, 1e-6),
    "mixes of 2": lambda r: mixes(2 * X[r, :8], 2, 20, 1e-6),
    "mixing_logits": lambda r: (mixing_logits(STREAMS[r], noise(640, 24) / 25, X[0, :24], EPS),),
    "spread and collapse": lambda r: (
        spread(X[r, :160], STREAMS[r], X[r, :4], X[r, :16].view(-1, 4, 4)),
        collapse(STREAMS[r], X[r, :4]),
        spread(X[r, :96], PAIR[r], X[r, :2], X[r, :4].view(-1, 2, 2)),
        collapse(PAIR[r], X[r, :2]),
    ),
    "attention": lambda r: (
        sparse_attention(
            QUERIES[r],
            KEYS[r, :16],
            MASK[r, :, :16],
            X[0, :4].view(1, 4, 1),
            KEYS[r, 16:],
            MASK[r, :, 16:],
        ),
    ),
    "route": lambda r: (*route(X[r, :6], X[0, :6], 3, 1.5), *route(X[r, :32], X[0, :32], 6, 1.5)),
    "experts": lambda r: (
        expert_mlp(X[r], EXPERTS[r], X[r, :3], GATE_UP, DOWN, count=len(r), limit=2.0, fp8=False),
        expert_mlp(X[r], EXPERTS[r], X[r, :3], GATE_UP, DOWN, count=len(r), limit=2.0, fp8=True),
        gated_mlp(X[r], GATE_UP[0], DOWN[0], limit=2.0, fp8=False),
    ),
    "engram gates": lambda r: (
        engram_gates(STREAMS[r], STREAMS[r].flip(1), STREAMS[0], EPS),
        engram_gates(PAIR[r], PAIR[r].flip(1), PAIR[0], EPS),
    ),
    "compress": lambda r: (compress(X[r], X[r].flip(1), X[r].roll(1, 1), X[r].roll(2, 1)),),
    "top_rows": lambda r: (top_rows(SCORES[r], 16),),
    "sigmoid": lambda r: (
        elementwise(torch.sigmoid, X[r, :1]),
        elementwise(torch.sigmoid, X[r, :5]),
        elementwise(torch.sigmoid, X[r]),
    ),
    "formats": lambda r: tuple(
        form(X[r], name) for form in (fake_quant, pack) for name in ("fp8", "fp4", "fp4_e4m3")
    ),
}


@pytest.mark.parametrize("name", OPS)
def test_a_row_has_the_same_bits_in_any_batch(name: str) -> None:
    op, generator = OPS[name], torch.Generator().manual_seed(3)
    with torch.inference_mode():
        everything = op(torch.arange(ROWS))
        for count in (1, 2, 3, 5, 8, 16, 31, 40, 64, 100, 257, 511):
            for _ in range(3):
                rows = torch.randperm(ROWS, generator=generator)[: padded(count)]
                for found, whole in zip(op(rows), everything, strict=True):
                    assert torch.equal(found, whole[rows]), count


def test_index_scores_depend_neither_on_the_batch_nor_on_how_many_keys_there_are() -> None:
    for heads in (3, 4, 32):
        q, weights, keys = noise(3, 24, heads, 64), noise(3, 24, heads), noise(3, 400, 64)
        nothing = torch.zeros(3, 24, 400, dtype=torch.bool)
        with torch.inference_mode():
            whole = index_score(q, weights, keys, nothing)
            for requests, queries, count in ((1, 8, 16), (1, 16, 48), (2, 8, 112), (3, 24, 320)):
                found = index_score(
                    q[:requests, :queries].clone(),
                    weights[:requests, :queries],
                    keys[:requests, :count],
                    nothing[:requests, :queries, :count],
                )
                assert torch.equal(found, whole[:requests, :queries, :count])
