"""Kernels that read and write memory once against the steps that they join."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.formats import pack, unpack
from kernels.ops import compress as compression
from kernels.ops import hyper_connection, index_topk, rope_pack
from tests.kernels.packed import error

ROWS = [0, 1, 7, 130]
F32_ERROR = 1e-5


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


# ------------------------------------------------------------------ on any machine


def index_keys(rows: int, pages: int, page: int, device: str = "cpu") -> index_topk.Paged:
    packed = pack(noise(4 * pages * page, 128), "fp4")
    which = torch.randint(0, 4 * pages, (rows, pages), generator=torch.Generator().manual_seed(3))
    return index_topk.Paged(
        packed.flatten().to(device), (which * page * packed.shape[1]).to(device), page
    )


def test_the_references_choice_is_that_of_plain_products() -> None:
    q, weights = noise(3, 8, 128), noise(3, 8)
    keys, seen = index_keys(3, 5, 16), torch.tensor([80, 33, 2])
    found = index_topk.reference(q, weights, keys, seen, 16)
    for t in range(3):
        rows = [
            keys.memory[at + n * 68 : at + n * 68 + 68]
            for at in keys.at_TP[t].tolist()
            for n in range(16)
        ]
        exact = unpack(torch.stack(rows[: seen[t]]), "fp4", 128).double()
        scores = ((exact @ q[t].double().T).relu() * weights[t].double()).sum(1)
        best = sorted(range(len(scores)), key=lambda j: (-float(scores[j]), j))[:16]
        assert found[t].tolist() == sorted(best) + [-1] * (16 - len(best))


def test_rows_of_the_cache_are_turned_and_packed_where_they_belong() -> None:
    x, at = noise(4, 128), torch.tensor([264, -1, 0, 132])
    turns = torch.polar(torch.ones(4, 8), noise(4, 8))
    memory = torch.full((4 * 132,), 7, dtype=torch.uint8)
    rope_pack.reference(x, turns, memory, at, "fp8")
    assert (memory[396:] == 7).all()
    found = unpack(memory[:132].unsqueeze(0), "fp8", 128)[0]
    turned = torch.view_as_real(torch.view_as_complex(x[2, 112:].view(8, 2)) * turns[2]).flatten()
    assert error(found, torch.cat([x[2, :112], turned])) < 0.05


# ------------------------------------------------------------------ on a GPU


def of_equal_bytes(found: Tensor, expected: Tensor) -> float:
    """A sum's last bit may decide a rounding: nearly all bytes are the same."""
    return float((found == expected).double().mean()) if found.numel() else 1.0


@pytest.mark.gpu
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("row_format", ["fp8", "fp4_e4m3"])
def test_rows_are_turned_packed_and_written_at_once(rows: int, row_format: str) -> None:
    x = noise(rows, 512).cuda().bfloat16()
    turns = torch.polar(torch.ones(rows, 32), noise(rows, 32)).cuda()
    nbytes = 528 if row_format == "fp8" else 288
    at = torch.randperm(2 * rows, generator=torch.Generator().manual_seed(1))[:rows] * nbytes
    at[1::3] = -1
    memories = [torch.full((2 * rows * nbytes,), 9, dtype=torch.uint8).cuda() for _ in range(2)]
    rope_pack.rope_pack(x, turns, memories[0], at.cuda(), row_format)
    rope_pack.reference(x, turns, memories[1], at.cuda(), row_format)
    assert of_equal_bytes(*memories) > 0.999


@pytest.mark.gpu
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_pooling_two_positions_is_its_reference(rows: int, kind: torch.dtype) -> None:
    first, last = (noise(rows, 1024, seed=s).cuda().to(kind) for s in (1, 2))
    parts = (*first.chunk(2, 1), *last.chunk(2, 1))
    with torch.no_grad():
        found = compression.compress(*parts)
    expected = compression.compress.reference(*(part.double() for part in parts))
    assert error(found, expected) < (F32_ERROR if kind == torch.float32 else 3e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("n", "width"), [(4, 5120), (2, 96), (4, 160)])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_hyper_connections_are_their_references(
    rows: int, n: int, width: int, kind: torch.dtype
) -> None:
    streams, out = noise(rows, n, width).cuda().to(kind), noise(rows, width).cuda().to(kind)
    entries, more = n * (n + 2), noise(rows, width, seed=9).cuda()
    project, base = noise(n * width, entries).cuda() / 20, noise(entries).cuda()
    eps = torch.tensor(1e-6).cuda()
    with torch.no_grad():
        logits = hyper_connection.mixing_logits(streams, project, base, eps)
        mixes = hyper_connection.mixes(logits, n, 20, 1e-6)
        spread = hyper_connection.spread(out, streams, mixes.post_Tn, mixes.mix_Tnn, more)
        read = hyper_connection.collapse(spread, mixes.pre_Tn)
    exact = hyper_connection.mixing_logits.reference(
        *(one.double() for one in (streams, project, base, eps))
    )
    assert error(logits, exact) < F32_ERROR
    for found, expected in zip(
        mixes, hyper_connection.mixes.reference(logits.double(), n, 20, 1e-6), strict=True
    ):
        assert error(found, expected) < F32_ERROR
    rounding = F32_ERROR if kind == torch.float32 else 3e-3
    wanted = hyper_connection.spread.reference(
        *(one.double() for one in (out, streams, mixes.post_Tn, mixes.mix_Tnn, more))
    )
    assert error(spread, wanted) < rounding
    wanted = hyper_connection.collapse.reference(spread.double(), mixes.pre_Tn.double())
    assert error(read, wanted) < rounding


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize("portable", [False, True])
def test_index_scores_are_their_reference(rows: int, portable: bool) -> None:
    q = unpack(pack(noise(rows * 32, 128), "fp4"), "fp4", 128).view(rows, 32, 128).cuda()
    weights, keys = noise(rows, 32).cuda(), index_keys(rows, 9, 128, "cuda")
    seen = torch.tensor([1152, 1, 0, 700, 129][:rows], dtype=torch.int32).cuda()
    found = index_topk.index_scores(q.bfloat16(), weights, keys, seen, portable=portable)
    expected = index_topk.scores_reference(q, weights, keys, seen)
    live = expected > -torch.inf
    assert error(found[live], expected[live]) < F32_ERROR


@pytest.mark.gpu
@pytest.mark.parametrize("length", [128, 512, 700, 8192, 8193, 262144, 1 << 20])
def test_the_best_scores_are_chosen_exactly_and_ties_take_the_lower_row(length: int) -> None:
    scores = noise(3, length).round(decimals=2).cuda()
    scores[1] = 0.0
    scores[1, ::2] = -0.0
    seen = torch.tensor([length, length, length * 3 // 4], dtype=torch.int32).cuda()
    found = index_topk.select(scores, seen, 512)
    hidden = torch.arange(length, device="cuda") >= seen.unsqueeze(1)
    expected = index_topk.select_reference(scores.masked_fill(hidden, -torch.inf), 512)
    assert torch.equal(found, expected)


@pytest.mark.gpu
def test_fewer_keys_than_asked_for_are_all_chosen() -> None:
    q, weights = noise(4, 32, 128).cuda().bfloat16(), noise(4, 32).cuda()
    keys, seen = index_keys(4, 3, 128, "cuda"), torch.tensor([384, 5, 0, 128], dtype=torch.int32)
    found = index_topk.index_topk(q, weights, keys, seen.cuda(), 512)
    for row, count in zip(found.tolist(), seen.tolist(), strict=True):
        assert row == [*range(count)] + [-1] * (512 - count)
