"""The rows of kernels/bench.py for products with FP8 matrices and the small ops around them."""

# mypy: allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from kernels.block_kernels import block_matmul, decode, tiling_for
from kernels.formats import Encoded, encode_fp8_blocks, encode_fp8_rows
from kernels.measure import Limits, Row, check, seconds
from kernels.ops.block_matmul import reference
from kernels.ops.engram_gather import engram_gather
from kernels.ops.route import route, route_top
from kernels.ops.turn_fp4 import turn_fp4
from kernels.ops.turn_heads import turn_heads

MATRICES = {  # of the real model: outputs, dims
    "wq_a and wkv": (1792, 5120),
    "wq_b and the index's": (36864, 1280),
    "wo_b": (5120, 8192),
    "shared expert, first": (4608, 5120),
    "shared expert, second": (5120, 2304),
    "main_proj": (5120, 15360),
    "Engram's wkv": (25600, 6144),
}
CACHE = 160_000_000  # bytes of copies that are read in turn, so that none is in the cache still
HEADS, HEAD_DIM, INDEX_HEADS, INDEX_DIM, PAIRS, EXPERTS, SLOTS = 64, 512, 32, 128, 32, 384, 6


def dense_rows(limits: Limits) -> Iterator[Row]:
    with torch.inference_mode():
        for name, (outs, dims) in MATRICES.items():
            yield from _products(name, outs, dims, limits)
        for rows in (8, 64, 4096):
            yield from _small(rows, limits)


def _products(name: str, outs: int, dims: int, limits: Limits) -> Iterator[Row]:
    count = max(2, -(-CACHE // (outs * dims)))
    matrix = encode_fp8_blocks(torch.randn(outs, dims, device="cuda") * dims**-0.5)
    copies = [Encoded(*(part.clone() for part in matrix)) for _ in range(count)]
    decoded = [decode(*copy) for copy in copies]
    for rows in (1, 8, 16, 32, 64, 4096):
        x = torch.randn(rows, dims, device="cuda").bfloat16()
        check(name, block_matmul(x[:64], *matrix), reference(x[:64].float(), *matrix))
        taken = _in_turn([partial(block_matmul, x, *one) for one in copies])
        title = f"{name}, {rows} rows x {outs} x {dims}"
        if rows <= 64:
            setting = str(tuple(tiling_for(outs, dims, rows)))
            yield limits.moved(title, matrix.codes.numel(), taken, setting)
        else:
            yield limits.computed(title, 2 * rows * outs * dims, taken)
        other = _in_turn([partial(torch.mm, x, one.T) for one in decoded])
        yield Row(f"{title}: cuBLAS, bf16", other * 1e6, other / taken, "x our time")


def _in_turn(calls: Sequence[Callable[[], object]]) -> float:
    return seconds(lambda: [call() for call in calls], 8) / len(calls)


def _small(rows: int, limits: Limits) -> Iterator[Row]:
    turns = torch.polar(torch.ones(rows, PAIRS), torch.randn(rows, PAIRS)).cuda()
    heads = torch.randn(rows, HEADS, HEAD_DIM, device="cuda").bfloat16()
    part = rows * HEADS * 2 * PAIRS * 2  # bytes of what turns
    taken = seconds(lambda: turn_heads(heads, turns))
    yield limits.moved(f"turning heads, {rows} rows", 2 * part, taken)
    taken = seconds(lambda: turn_heads(heads, turns, inverse=True, fp8=True))
    yield limits.moved(f"turning heads back, to FP8, {rows} rows", 4 * heads.numel(), taken)
    queries = torch.randn(rows, INDEX_HEADS, INDEX_DIM, device="cuda").bfloat16()
    taken = seconds(lambda: turn_fp4(queries, turns))
    yield limits.moved(f"turning index queries, to FP4, {rows} rows", 4 * queries.numel(), taken)
    logits, bias = torch.randn(rows, EXPERTS, device="cuda"), torch.zeros(EXPERTS, device="cuda")
    taken = seconds(lambda: route_top(logits, bias, SLOTS, 1.5))
    yield limits.moved(f"choice of experts, {rows} rows", logits.numel() * 4, taken)
    plain = seconds(lambda: route(logits, bias, SLOTS, 1.5))
    yield Row(f"choice of experts, {rows} rows: torch", plain * 1e6, plain / taken, "x our time")
    table = encode_fp8_rows(torch.randn(1 << 16, 256))
    numbers = torch.randint(len(table.codes), (rows, 24), device="cuda")
    for place, codes, scales in (
        ("the GPU", table.codes.cuda(), table.scales.cuda()),
        ("the host", table.codes.pin_memory(), table.scales.pin_memory()),
    ):
        taken = seconds(partial(engram_gather, codes, scales, numbers))
        moved = numbers.numel() * (264 + 512)
        yield limits.moved(f"Engram rows from {place}, {rows} x 24", moved, taken)
