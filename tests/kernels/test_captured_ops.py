"""Ops of a decode step in a CUDA graph: replayed on other inputs they give what a call gives."""

# mypy: allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from kernels.formats import pack
from kernels.ops import hyper_connection, index_topk, norm_rows, rope_pack
from kernels.ops.compress import compress
from kernels.ops.packed_attention import Located, packed_attention
from kernels.ops.packed_experts import packed_experts
from tests.kernels.packed import fp4_matrices, located, routed

ROWS = 5


class Step(NamedTuple):
    """A call on tensors that stay where they are, and what they may hold, before and after."""

    call: Callable[..., Tensor]
    before: tuple[Tensor, ...]
    after: tuple[Tensor, ...]


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).cuda()


def attention() -> Step:
    near, far = (
        [located(ROWS, keys, 512, kind, "cuda", seed=seed) for seed in (1, 2)]
        for keys, kind in ((128, "fp8"), (512, "fp4_e4m3"))
    )
    sink = noise(64, seed=1)

    def call(q: Tensor, window_at: Tensor, selected_at: Tensor) -> Tensor:
        window, selected = (
            Located(rows[0].memory, at) for rows, at in ((near, window_at), (far, selected_at))
        )
        return packed_attention(q, window, selected, sink, parts=5)

    before, after = (
        (noise(ROWS, 64, 512, seed=n).bfloat16(), near[n].at_TN, far[n].at_TN) for n in (0, 1)
    )
    return Step(call, before, after)


def experts() -> Step:
    gate_up, down = fp4_matrices(8, 512, 256, "cuda", 1), fp4_matrices(8, 256, 256, "cuda", 2)

    def call(x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        return packed_experts(x, chosen, shares, gate_up, down, limit=10.0, fp8=True)

    before, after = (
        (noise(ROWS, 256, seed=n).bfloat16(), *routed(ROWS, 3, 8, "cuda", seed=n)) for n in (3, 4)
    )
    return Step(call, before, after)


def index_memory(rows: int) -> Tensor:
    """Index keys from byte 4 on: pages of 8 rows begin at multiples of 4, and of no more."""
    keys = pack(noise(rows, 128, seed=1), "fp4").flatten()
    return torch.cat([keys.new_zeros(4), keys])


def index(page: int, pages: int, count: int) -> Step:
    memory = index_memory(page * pages)

    def call(q: Tensor, weights: Tensor, at: Tensor, seen: Tensor) -> Tensor:
        return index_topk.index_topk(q, weights, index_topk.Paged(memory, at, page), seen, count)

    def inputs(n: int) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(n)
        order = torch.stack([torch.randperm(pages, generator=generator) for _ in range(ROWS)])
        at = order.cuda() * page * 68 + 4
        seen = torch.randint(1, page * pages, (ROWS,), generator=generator, dtype=torch.int32)
        q = noise(ROWS, 32, 128, seed=n).bfloat16()
        return q, noise(ROWS, 32, seed=n), at, seen.cuda()

    return Step(call, inputs(0), inputs(1))


def selection() -> Step:
    def call(scores: Tensor, seen: Tensor) -> Tensor:
        return index_topk.select(scores, seen, 2048)

    before, after = (
        (noise(2, 131072, seed=n).round(decimals=3), torch.tensor(seen, dtype=torch.int32).cuda())
        for n, seen in enumerate(([131072, 100_000], [1500, 131072]))
    )
    return Step(call, before, after)


def turning() -> Step:
    def call(x: Tensor, angles: Tensor, at: Tensor) -> Tensor:
        memory = torch.zeros(2 * ROWS * 528, dtype=torch.uint8, device="cuda")
        turns = torch.polar(torch.ones_like(angles), angles)
        rope_pack.rope_pack(x, turns, memory, at, "fp8")
        return memory

    before, after = (
        (
            noise(ROWS, 512, seed=n).bfloat16(),
            noise(ROWS, 32, seed=n),
            torch.tensor([at * 528 if at >= 0 else -1 for at in rows]).cuda(),
        )
        for n, rows in enumerate(([0, 3, -1, 5, 9], [4, -1, 1, 8, 2]))
    )
    return Step(call, before, after)


def norm() -> Step:
    weight = noise(5120, seed=9)
    inputs = ((noise(ROWS, 5120, seed=n).bfloat16(),) for n in (0, 1))
    return Step(lambda x: norm_rows.norm_rows(x, weight, 1e-6, fp8=True), *inputs)


def pooling() -> Step:
    inputs = (tuple(noise(ROWS, 512, seed=4 * n + m) for m in range(4)) for n in (0, 1))
    return Step(compress, *inputs)


def streams() -> Step:
    project, base, eps = noise(4 * 512, 24, seed=1) / 20, noise(24, seed=2), torch.tensor(1e-6)

    def call(streams_TnD: Tensor, out_TD: Tensor) -> Tensor:
        logits = hyper_connection.mixing_logits(streams_TnD, project, base, eps)
        pre, post, mix = hyper_connection.mixes(logits, 4, 20, 1e-6)
        written = hyper_connection.spread(out_TD, streams_TnD, post, mix)
        return hyper_connection.collapse(written, pre)

    eps = eps.cuda()
    inputs = ((noise(ROWS, 4, 512, seed=n), noise(ROWS, 512, seed=n)) for n in (0, 1))
    return Step(call, *inputs)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "make",
    [
        attention,
        experts,
        lambda: index(128, 9, 512),
        lambda: index(8, 2048, 512),
        selection,
        turning,
        norm,
        pooling,
        streams,
    ],
    ids=[
        "attention",
        "experts",
        "index",
        "small pages",
        "selection",
        "turning",
        "norm",
        "pooling",
        "streams",
    ],
)
@torch.no_grad()
def test_a_replayed_op_reads_the_inputs_of_the_day(make: Callable[[], Step]) -> None:
    step = make()
    static = tuple(one.clone() for one in step.before)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step.call(*static)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step.call(*static)
    for inputs in (step.after, step.before):
        for buffer, values in zip(static, inputs, strict=True):
            buffer.copy_(values)
        graph.replay()
        assert torch.equal(found, step.call(*inputs))


@pytest.mark.gpu
@pytest.mark.parametrize("length", [20_000, 131_072])
def test_two_thousand_of_many_scores_are_chosen_exactly(length: int) -> None:
    scores = noise(3, length, seed=length).round(decimals=2)  # with many ties
    seen = torch.tensor([length, length - 7, 1500], dtype=torch.int32).cuda()
    hidden = torch.arange(length, device="cuda") >= seen.unsqueeze(1)
    expected = index_topk.select_reference(scores.masked_fill(hidden, -torch.inf), 2048)
    assert torch.equal(index_topk.select(scores, seen, 2048), expected)


@pytest.mark.gpu
def test_pages_of_eight_rows_may_lie_at_any_multiple_of_four_bytes() -> None:
    step = index(8, 2048, 512)
    q, weights, at, seen = step.after
    assert (at % 8 == 4).all()
    keys = index_topk.Paged(index_memory(8 * 2048), at, 8)
    found, expected = (
        make(q, weights, keys, seen)
        for make in (index_topk.index_scores, index_topk.scores_reference)
    )
    live = expected > -torch.inf
    assert torch.allclose(found[live], expected[live], rtol=1e-4, atol=1e-3)
