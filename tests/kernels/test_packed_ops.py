"""Ops on packed rows and weights against their references, and what they do at the edges."""

from __future__ import annotations

import pytest
import torch

from kernels.expert_blocks import blocks_of
from kernels.expert_blocks import reference as blocks_reference
from kernels.ops import packed_attention as attention
from kernels.ops import packed_experts as experts
from tests.kernels.packed import error, fp4_matrices, located, routed

gpu = pytest.mark.gpu
BF16_ERROR = 1e-2  # of the norm: q exact, softmax weights or hidden values rounded to 8 bits
F32_ERROR = 1e-5


# ------------------------------------------------------------------ on any machine


def test_the_references_softmax_is_over_both_lists_and_the_sink() -> None:
    q = torch.randn(2, 4, 128, generator=torch.Generator().manual_seed(3))
    window, selected = located(2, 5, 128, "fp8", "cpu"), located(2, 7, 128, "fp4_e4m3", "cpu")
    sink = torch.tensor([0.5, -1.0, 2.0, 0.0])
    found = attention.reference(q, window, selected, sink)
    for t in range(2):
        keys = [
            attention._keys(rows, row_format, 128)[0][t, n].double()
            for rows, row_format in ((window, "fp8"), (selected, "fp4_e4m3"))
            for n in range(rows.at_TN.shape[1])
            if rows.at_TN[t, n] >= 0
        ]
        for h in range(4):
            logits = torch.stack([q[t, h].double() @ key for key in keys]) * 128**-0.5
            weights = logits.exp() / (logits.exp().sum() + sink[h].double().exp())
            wanted = sum(weight * key for weight, key in zip(weights, keys, strict=True))
            assert torch.allclose(found[t, h].double(), torch.as_tensor(wanted), atol=1e-5)


@pytest.mark.parametrize("size", [1, 4, 16])
def test_blocks_hold_every_assignment_once_and_one_expert_each(size: int) -> None:
    chosen, _ = routed(23, 3, 8, "cpu", seed=size)
    chosen[:5, 0] = 6  # a row may name an expert twice: each is an assignment of its own
    blocks = blocks_of(chosen, 8, size)
    live = blocks.assignment_BM >= 0
    assert sorted(blocks.assignment_BM[live].tolist()) == list(range(69))
    for expert, assignments in zip(blocks.expert_B.tolist(), blocks.assignment_BM, strict=True):
        own = assignments[assignments >= 0].long()
        assert (chosen.flatten()[own] == expert).all() if expert >= 0 else len(own) == 0


def test_no_rows_have_no_blocks() -> None:
    assert blocks_of(torch.zeros(0, 3, dtype=torch.int64), 8, 16).expert_B.numel() == 0


# ------------------------------------------------------------------ on a GPU


@gpu
@pytest.mark.parametrize("rows", [0, 1, 7])
@pytest.mark.parametrize(
    ("heads", "size", "window", "selected", "parts"),
    [
        (64, 512, 128, 512, 1),
        (64, 512, 128, 512, 3),
        (64, 512, 1, 33, 1),
        (64, 512, 128, 0, 2),
        (4, 128, 16, 24, 2),
        (40, 256, 65, 1, 3),
    ],
)
def test_attention_equals_its_reference(
    rows: int, heads: int, size: int, window: int, selected: int, parts: int
) -> None:
    q = torch.randn(rows, heads, size).cuda().bfloat16()
    sink = torch.randn(heads).cuda()
    near = located(rows, window, size, "fp8", "cuda", seed=1)
    far = located(rows, selected, size, "fp4_e4m3", "cuda", seed=2) if selected else None
    found = attention.packed_attention(q, near, far, sink, parts=parts)
    expected = attention.reference(q.float(), near, far, sink)
    assert found.shape == (rows, heads, size)
    assert error(found, expected) < BF16_ERROR


@gpu
def test_attention_in_float32_is_exact_up_to_sums() -> None:
    q, sink = torch.randn(9, 4, 128).cuda(), torch.randn(4).cuda()
    near = located(9, 16, 128, "fp8", "cuda", seed=1)
    far = located(9, 24, 128, "fp4_e4m3", "cuda", seed=2)
    found = attention.packed_attention(
        q, near, far, sink, parts=2, tiling=attention.Tiling(tile=16, stages=2)
    )
    assert error(found, attention.reference(q, near, far, sink)) < F32_ERROR


@gpu
@pytest.mark.parametrize("parts", [1, 4])
def test_a_row_without_keys_gets_zeros(parts: int) -> None:
    q, sink = torch.randn(3, 64, 512).cuda().bfloat16(), torch.randn(64).cuda()
    near = located(3, 128, 512, "fp8", "cuda", live=0.0)
    far = located(3, 512, 512, "fp4_e4m3", "cuda", live=0.0)
    assert not attention.packed_attention(q, near, far, sink, parts=parts).any()


@gpu
@pytest.mark.parametrize("parts", [1, 10])
def test_the_kernel_for_any_gpu_equals_the_one_for_this(parts: int) -> None:
    q, sink = torch.randn(5, 64, 512).cuda().bfloat16(), torch.randn(64).cuda()
    near = located(5, 128, 512, "fp8", "cuda", seed=1)
    far = located(5, 512, 512, "fp4_e4m3", "cuda", seed=2)
    found = [
        attention.packed_attention(q, near, far, sink, parts=parts, tiling=tiling)
        for tiling in (None, attention.Tiling())
    ]
    assert error(found[0], found[1]) < BF16_ERROR


@gpu
def test_a_row_attends_the_same_alone_and_in_a_batch() -> None:
    q, sink = torch.randn(17, 64, 512).cuda().bfloat16(), torch.randn(64).cuda()
    near = located(17, 128, 512, "fp8", "cuda")
    far = located(17, 512, 512, "fp4_e4m3", "cuda")
    whole = attention.packed_attention(q, near, far, sink, parts=5)
    for t in (0, 8, 16):
        own = [attention.Located(rows.memory, rows.at_TN[t : t + 1]) for rows in (near, far)]
        alone = attention.packed_attention(q[t : t + 1], own[0], own[1], sink, parts=5)
        assert torch.equal(alone[0], whole[t])


@gpu
@pytest.mark.parametrize("rows", [1, 5, 30, 100])
@pytest.mark.parametrize(("dims", "inner"), [(128, 64), (256, 512), (5120, 2304)])
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("tiles", [None, experts.DECODE])
def test_experts_equal_their_reference(
    rows: int, dims: int, inner: int, fp8: bool, tiles: experts.Tiles | None
) -> None:
    count, slots = 8, 3
    gate_up = fp4_matrices(count, 2 * inner, dims, "cuda", seed=1)
    down = fp4_matrices(count, dims, inner, "cuda", seed=2)
    chosen, shares = routed(rows, slots, count, "cuda")
    x = torch.randn(rows, dims).cuda().bfloat16()
    arguments = (x, chosen, shares, gate_up, down)
    found = experts.packed_experts(*arguments, limit=10.0, fp8=fp8, tiles=tiles)
    expected = experts.reference(*arguments, limit=10.0, fp8=fp8)
    assert error(found, expected) < BF16_ERROR


@gpu
@pytest.mark.parametrize("rows", [1, 23, 700])
@pytest.mark.parametrize("size", [8, 16, 64])
def test_blocks_made_at_once_are_their_reference(rows: int, size: int) -> None:
    chosen, _ = routed(rows, 3, 10, "cuda", seed=size)
    found, expected = (make(chosen, 10, size) for make in (blocks_of, blocks_reference))
    assert torch.equal(found.expert_B, expected.expert_B)
    live = found.expert_B >= 0
    assert torch.equal(found.assignment_BM[live], expected.assignment_BM[live])


@gpu
def test_no_rows_ask_nothing_of_any_expert() -> None:
    gate_up, down = fp4_matrices(4, 128, 128, "cuda"), fp4_matrices(4, 128, 64, "cuda")
    chosen, shares = routed(0, 3, 4, "cuda")
    x = torch.zeros(0, 128, device="cuda").bfloat16()
    found = experts.packed_experts(x, chosen, shares, gate_up, down, limit=10.0)
    assert found.shape == (0, 128)


@gpu
def test_rows_that_all_choose_one_expert_fill_several_blocks() -> None:
    gate_up, down = fp4_matrices(4, 128, 128, "cuda"), fp4_matrices(4, 128, 64, "cuda")
    chosen = torch.full((50, 1), 2, device="cuda")
    shares = torch.ones(50, 1, device="cuda")
    x = torch.randn(50, 128).cuda().bfloat16()
    found = experts.packed_experts(x, chosen, shares, gate_up, down, limit=10.0)
    expected = experts.reference(x, chosen, shares, gate_up, down, limit=10.0)
    assert error(found, expected) < BF16_ERROR


@gpu
@pytest.mark.parametrize(("dims", "inner"), [(128, 64), (512, 256)])
def test_a_row_gets_the_same_from_its_experts_alone_and_in_a_batch(dims: int, inner: int) -> None:
    gate_up = fp4_matrices(8, 2 * inner, dims, "cuda")
    down = fp4_matrices(8, dims, inner, "cuda")
    chosen, shares = routed(40, 3, 8, "cuda")
    x = torch.randn(40, dims).cuda().bfloat16()
    whole = experts.packed_experts(x, chosen, shares, gate_up, down, limit=10.0)
    alone = experts.packed_experts(x[7:8], chosen[7:8], shares[7:8], gate_up, down, limit=10.0)
    assert torch.equal(alone[0], whole[7])
