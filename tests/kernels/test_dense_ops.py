"""Products with FP8 matrices, and the small ops around them, against their definitions."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels.formats import Encoded, encode_fp8_blocks, encode_fp8_rows, pack, unpack
from kernels.ops.block_matmul import block_matmul
from kernels.ops.engram_gather import engram_gather
from kernels.ops.pack_index_keys import pack_index_keys
from kernels.ops.put_rows import put_rows, take_rows
from kernels.ops.route import route, route_top
from kernels.ops.turn_fp4 import turn_fp4
from kernels.ops.turn_heads import turn_heads
from tests.kernels.packed import error

gpu = pytest.mark.gpu
KINDS = [torch.float32, torch.float64, torch.bfloat16]
BF16_ERROR = 3e-3  # of the norm: rounding the result once


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def turns_of(rows: int, pairs: int) -> Tensor:
    return torch.polar(torch.ones(rows, pairs), noise(rows, pairs))


def by_value(matrix: Encoded) -> Tensor:
    """float64 [N, K], by torch's own number formats."""
    codes = matrix.codes.view(torch.float8_e4m3fn).double()
    powers = torch.exp2(matrix.scales.double() - 127).kron(torch.ones(32, 32, dtype=torch.float64))
    return codes * powers[: codes.shape[0], : codes.shape[1]]


def turned(x_THd: Tensor, turns_TP: Tensor) -> Tensor:
    """float64, pair by pair."""
    exact = x_THd.double().clone()
    first = exact.shape[2] - 2 * turns_TP.shape[1]
    for pair in range(turns_TP.shape[1]):
        even, odd = exact[..., first + 2 * pair].clone(), exact[..., first + 2 * pair + 1].clone()
        cos, sin = (part[:, pair, None].double() for part in (turns_TP.real, turns_TP.imag))
        exact[..., first + 2 * pair] = even * cos - odd * sin
        exact[..., first + 2 * pair + 1] = even * sin + odd * cos
    return exact


# ------------------------------------------------------------------ on any machine


@pytest.mark.parametrize("kind", KINDS)
def test_a_product_is_that_of_the_numbers_stored(kind: torch.dtype) -> None:
    matrix, x = encode_fp8_blocks(noise(70, 160)), noise(5, 160).to(kind)
    found = block_matmul(x, *matrix)
    assert found.dtype == kind
    wanted = x.double() @ by_value(matrix).T
    assert error(found, wanted) < (1e-6 if kind != torch.bfloat16 else BF16_ERROR)


@pytest.mark.parametrize("kind", KINDS)
def test_heads_are_turned_by_pairs_and_back(kind: torch.dtype) -> None:
    x, turns = noise(3, 2, 64).to(kind), turns_of(3, 8)
    tolerance = 1e-6 if kind != torch.bfloat16 else 1e-2
    there = turn_heads(x.clone(), turns)
    assert error(there, turned(x, turns)) < tolerance
    assert error(turn_heads(there, turns, inverse=True), x) < tolerance
    rounded = turn_heads(x.clone(), turns, fp8=True)
    wanted = unpack(pack(turned(x, turns).float(), "fp8"), "fp8", 64)
    assert error(rounded, wanted) < 1e-2


@pytest.mark.parametrize("kind", KINDS)
def test_index_queries_become_what_four_bits_keep_and_keys_the_bits(kind: torch.dtype) -> None:
    x, turns = noise(4, 3, 64).to(kind), turns_of(4, 16)
    packed = pack(turned(x, turns).float(), "fp4")
    assert error(turn_fp4(x, turns), unpack(packed, "fp4", 64)) < 2e-2
    memory, at = torch.full((400,), 7, dtype=torch.uint8), torch.tensor([34, -1, 0, 204])
    pack_index_keys(x[:, 0], turns, memory, at)
    for n in (0, 2, 3):
        found = memory[at[n] : at[n] + 34]
        assert (found == packed[n, 0]).double().mean() > 0.9
    assert (memory[68:204] == 7).all()
    assert (memory[238:] == 7).all()


def test_rows_go_where_they_belong_and_come_back() -> None:
    memory, at = torch.zeros(64, dtype=torch.uint8), torch.tensor([16, -1, 40])
    rows = torch.arange(1, 25, dtype=torch.uint8).view(3, 8)
    put_rows(memory, at, rows)
    assert memory.nonzero().flatten().tolist() == [*range(16, 24), *range(40, 48)]
    assert take_rows(memory, at, 8).tolist() == [[*range(1, 9)], [0] * 8, [*range(17, 25)]]


def test_rows_of_a_table_stand_side_by_side() -> None:
    codes, scales = encode_fp8_rows(noise(9, 64))
    rows = torch.tensor([[3, 3], [0, 8]])
    values = codes.view(torch.float8_e4m3fn).double().view(9, 2, 32)
    values = (values * torch.exp2(scales.double() - 127).unsqueeze(2)).view(9, 64)
    for kind in KINDS:
        found = engram_gather(codes, scales, rows, kind)
        assert found.dtype == kind
        assert torch.equal(found.double(), values[rows].flatten(1))


def test_interpreted_kernels_are_their_references() -> None:
    """In a process of its own: Triton reads the variable when it is imported."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.interpreted_ops"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]


# ------------------------------------------------------------------ on a GPU

REAL = [(1792, 5120), (36864, 1280), (5120, 8192), (4608, 5120), (5120, 2304), (5120, 15360)]


def matrix_of(outs: int, dims: int) -> Encoded:
    return encode_fp8_blocks(torch.randn(outs, dims, device="cuda") * dims**-0.5)


@gpu
@pytest.mark.parametrize(("outs", "dims"), [*REAL, (25600, 6144), (96, 160), (70, 64), (128, 256)])
def test_products_of_any_number_of_rows_are_their_reference(outs: int, dims: int) -> None:
    matrix = matrix_of(outs, dims)
    x = torch.randn(300, dims + 8, device="cuda").bfloat16()[:, :dims]
    with torch.inference_mode():
        wanted = block_matmul.reference(x.double(), *matrix)
        for rows in (0, 1, 3, 8, 9, 16, 31, 64, 65, 300):
            found = block_matmul(x[:rows], *matrix)
            assert found.shape == (rows, outs)
            assert error(found, wanted[:rows]) < BF16_ERROR, rows


@gpu
@pytest.mark.parametrize(("outs", "dims"), REAL[:5])
def test_a_row_has_the_same_product_alone_and_in_any_batch(outs: int, dims: int) -> None:
    matrix, x = matrix_of(outs, dims), torch.randn(64, dims, device="cuda").bfloat16()
    with torch.inference_mode():
        whole = block_matmul(x, *matrix)
        for rows in (1, 2, 5, 8, 13, 16, 29, 32, 48, 63):
            for _ in range(3):
                assert torch.equal(block_matmul(x[64 - rows :], *matrix), whole[64 - rows :])


@gpu
@pytest.mark.parametrize("known", [False, True])
def test_a_captured_product_is_repeated_with_what_lies_there(known: bool) -> None:
    matrix, x = matrix_of(1792, 5120), torch.randn(3, 5120, device="cuda").bfloat16()
    with torch.inference_mode():
        block_matmul(x, *(matrix if known else matrix_of(1792, 5120)))  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = block_matmul(x, *matrix)
        for seed in range(3):
            x.copy_(noise(3, 5120, seed=seed))
            graph.replay()
            wanted = block_matmul.reference(x.double(), *matrix)
            assert error(found, wanted) < BF16_ERROR
            assert torch.equal(block_matmul(x, *matrix), found)


def on_both(op: Callable[[], Tensor], reference: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
    with torch.inference_mode():
        return op(), reference()


@gpu
@pytest.mark.parametrize("rows", [0, 1, 7, 130])
@pytest.mark.parametrize("heads", [64, 5])
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("wider", [0, 64])
def test_heads_are_turned_at_once(rows: int, heads: int, fp8: bool, wider: int) -> None:
    wide = noise(rows, heads * 512 + wider).cuda().bfloat16()
    x = wide[:, : heads * 512].view(rows, heads, 512)
    turns = turns_of(rows, 32).cuda()
    for inverse in (False, True):
        wanted = turn_heads.reference(x, turns, inverse=inverse, fp8=fp8)
        with torch.inference_mode():
            found = turn_heads(x.clone() if wider == 0 else x, turns, inverse=inverse, fp8=fp8)
        assert found.is_contiguous()
        assert error(found, wanted) < (1e-2 if fp8 else 1e-3)
        if rows == 1:
            break  # a strided view of one row is contiguous: it has been turned in its place


@gpu
@pytest.mark.parametrize("rows", [0, 1, 7, 130])
def test_index_rows_are_turned_and_rounded_at_once(rows: int) -> None:
    x, turns = noise(rows, 32, 128).cuda().bfloat16(), turns_of(rows, 32).cuda()
    found, wanted = on_both(lambda: turn_fp4(x, turns), lambda: turn_fp4.reference(x, turns))
    if rows:
        assert (found == wanted).double().mean() > 0.999
    at = torch.randperm(2 * rows, generator=torch.Generator().manual_seed(1))[:rows] * 68
    at[1::3] = -1
    memories = [torch.full((2 * rows * 68 + 68,), 9, dtype=torch.uint8).cuda() for _ in range(2)]
    with torch.inference_mode():
        pack_index_keys(x[:, 3], turns, memories[0], at.cuda())
        pack_index_keys.reference(x[:, 3], turns, memories[1], at.cuda())
    assert (memories[0] == memories[1]).double().mean() > 0.999


@gpu
@pytest.mark.parametrize("nbytes", [68, 288, 528, 4096, 7])
def test_rows_of_bytes_are_moved_at_once(nbytes: int) -> None:
    at = torch.randperm(40, generator=torch.Generator().manual_seed(1))[:17] * nbytes
    at[2::5] = -1
    memory = torch.randint(256, (40 * nbytes,), dtype=torch.uint8)
    rows = torch.randint(256, (17, nbytes), dtype=torch.uint8)
    there = memory.cuda()
    with torch.inference_mode():
        put_rows(there, at.cuda(), rows.cuda())
        put_rows.reference(memory, at, rows)
        taken = take_rows(there, at.cuda(), nbytes)
    assert torch.equal(there.cpu(), memory)
    assert torch.equal(taken.cpu(), take_rows.reference(memory, at, nbytes))


@gpu
@pytest.mark.parametrize(("experts", "count"), [(384, 6), (16, 4)])
@pytest.mark.parametrize("rows", [0, 1, 64, 1000])
def test_experts_are_chosen_at_once(experts: int, count: int, rows: int) -> None:
    logits = (3 * noise(rows, experts)).cuda()
    logits[::2] = logits[::2].round(decimals=1)  # many are equal
    for bias in (noise(experts).cuda() / 10, noise(rows, experts).cuda() / 10):
        if rows > 2:
            bias = bias.round(decimals=1)
        with torch.inference_mode():
            found, wanted = route_top(logits, bias, count, 1.5), route(logits, bias, count, 1.5)
        assert torch.equal(found.experts, wanted.experts)
        assert error(found.shares, wanted.shares) < 1e-6


@gpu
@pytest.mark.parametrize("pinned", [False, True])
def test_rows_of_a_table_come_from_either_memory(pinned: bool) -> None:
    table = encode_fp8_rows(noise(1000, 256))
    codes, scales = (part.pin_memory() if pinned else part.cuda() for part in table)
    rows = torch.randint(1000, (65, 24))
    for kind in (torch.bfloat16, torch.float32):
        with torch.inference_mode():
            found = engram_gather(codes, scales, rows.cuda(), kind)
        assert torch.equal(found.cpu(), engram_gather(*table, rows, kind))
