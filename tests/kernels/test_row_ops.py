"""The small ops of a packed forward: their references by hand, and their kernels by these."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.formats import fake_quant, unpack
from kernels.ops import (
    block_maxima,
    candidate_rows,
    gated_rows,
    norm_rows,
    row_addresses,
)
from kernels.ops.joined import begin_sublayer, engram_mix, norm_rope_pack
from kernels.ops.row_addresses import Records
from tests.kernels.packed import error
from tests.kernels.test_compile import Case, compile_for

ROWS = [0, 1, 7, 130]
F32_ERROR, BF16_ERROR = 1e-5, 4e-3


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def turns(rows: int, pairs: int) -> Tensor:
    return torch.polar(torch.ones(rows, pairs), noise(rows, pairs))


# ------------------------------------------------------------------ on any machine


def test_a_narrow_norm_is_computed_wide_and_rounded_once() -> None:
    x, weight = noise(3, 64).bfloat16(), noise(64)
    exact = x.double()
    exact = exact / (exact.square().mean(1, keepdim=True) + 1e-6).sqrt() * weight.double()
    found = norm_rows.norm_rows(x, weight, 1e-6)
    assert found.dtype == torch.bfloat16
    assert error(found, exact) < BF16_ERROR
    assert torch.equal(norm_rows.norm_rows(x, weight, 1e-6, fp8=True), fake_quant(found, "fp8"))


def test_streams_are_added_up_before_their_norm() -> None:
    streams, pre, weight = noise(3, 4, 64), noise(3, 4), noise(64)
    total = (streams.double() * pre.double().unsqueeze(2)).sum(1)
    exact = total / (total.square().mean(1, keepdim=True) + 1e-6).sqrt() * weight.double()
    found = norm_rows.collapse_norm(streams, pre, weight, 1e-6, fp8=True)
    assert error(found.plain_TD, exact) < F32_ERROR
    assert torch.equal(found.rounded_TD, fake_quant(found.plain_TD, "fp8"))


def test_gates_are_clamped_from_above_and_factors_from_both_sides() -> None:
    gate_up = torch.tensor([[12.0, -30.0, 1.0, 15.0, -15.0, 2.0]])
    found = gated_rows.gated_rows(gate_up, 10.0).double()
    silu = [10 / (1 + 2.718281828459045**-10), -30 * 2.718281828459045**-30, 1 / (1 + 2**-1.442695)]
    assert error(found, torch.tensor([[silu[0] * 10, silu[1] * -10, silu[2] * 2]])) < F32_ERROR


def test_rows_are_found_through_tables_of_records() -> None:
    records = Records(rows=4, record_bytes=1000, row_bytes=10)
    tables = torch.tensor([[7, 3, 0], [2, 5, 9]])
    numbers = torch.tensor([[0, 3, 4, -1], [11, 6, -1, 0]], dtype=torch.int32)
    found = row_addresses.row_addresses(numbers, torch.tensor([0, 1]), tables, records)
    assert found.tolist() == [[7000, 7030, 3000, -1], [9030, 5020, -1, 2000]]


def test_a_table_of_one_record_is_a_ring() -> None:
    records = Records(rows=6, record_bytes=500, row_bytes=8)
    numbers = torch.tensor([[5, 6, 13]])
    found = row_addresses.row_addresses(
        numbers, torch.tensor([1]), torch.tensor([[4], [2]]), records
    )
    assert found.tolist() == [[1040, 1000, 1008]]


def test_window_rows_are_normed_turned_and_packed_where_they_belong() -> None:
    wide, weight, at = noise(3, 96), noise(64), torch.tensor([132, -1, 0])
    x, turned_by = wide[:, 32:], turns(3, 8)
    memory = torch.full((3 * 66,), 7, dtype=torch.uint8)
    norm_rope_pack.norm_rope_pack(x, weight, 1e-6, turned_by, memory, at)
    assert (memory[66:132] == 7).all()
    normed = norm_rows.norm_rows(x, weight, 1e-6)[2]
    pairs = torch.view_as_complex(normed[48:].view(8, 2)) * turned_by[2]
    expected = torch.cat([normed[:48], torch.view_as_real(pairs).flatten()])
    assert torch.equal(unpack(memory[:66], "fp8", 64), fake_quant(expected, "fp8"))


def test_blocks_have_their_best_score_and_the_newest_is_always_chosen() -> None:
    scores = torch.tensor([[1.0, 5, 2, 3, 9, torch.nan, torch.nan], [4.0, 1, 0, 2, 7, 1, 8]])
    scores = torch.cat([scores, scores[:1]])
    found = block_maxima.block_maxima(scores, torch.tensor([5, 7, 0]), 2)
    least, most = -torch.inf, torch.inf
    assert found.tolist() == [[5, 3, most, least], [4, 2, 7, most], [least] * 4]


def test_places_among_candidates_are_rows_of_their_blocks() -> None:
    blocks = torch.tensor([[2, 5, 9], [0, 7, -1]], dtype=torch.int32)
    places = torch.tensor([[0, 3, 4, 11], [5, 6, -1, -1]], dtype=torch.int32)
    found = candidate_rows.candidate_rows(places, blocks, 4)
    assert found.tolist() == [[8, 11, 20, 39], [29, 30, -1, -1]]


def test_each_stream_takes_in_what_its_gate_lets_through() -> None:
    streams, memory = noise(2, 3, 32).double(), noise(2, 4 * 32).double()
    weight, closed = noise(3, 32).double(), torch.tensor([False, True])
    found = engram_mix.engram_mix(streams, memory, weight, 1e-6, closed)
    assert torch.equal(found[1], streams[1])
    keys, value = memory[0, :96].view(3, 32), memory[0, 96:]
    for stream, key, scale, mixed in zip(streams[0], keys, weight, found[0], strict=True):
        lengths = (stream.square().mean() + 1e-6).sqrt() * (key.square().mean() + 1e-6).sqrt()
        match = (stream * key * scale).sum() / lengths / 32**0.5
        gate = torch.sigmoid(match.sign() * match.abs().sqrt())
        assert error(mixed, stream + gate * value) < 1e-12


# ------------------------------------------------------------------ on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", [96, 128, 1280, 5120])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_norms_are_their_references(rows: int, width: int, kind: torch.dtype) -> None:
    wide, weight = noise(rows, width + 32).cuda().to(kind), noise(width).cuda()
    x = wide[:, 32:]
    bound = F32_ERROR if kind == torch.float32 else BF16_ERROR
    expected = norm_rows.reference(x.double(), weight.double(), 1e-6).plain_TD
    assert error(norm_rows.norm_rows(x, weight, 1e-6), expected) < bound
    rounded = norm_rows.norm_rows(x, weight, 1e-6, fp8=True)
    plain = norm_rows.norm_rows(x, weight, 1e-6)
    assert torch.equal(rounded, fake_quant(plain, "fp8"))
    streams, pre = noise(rows, 4, width, seed=1).cuda().to(kind), noise(rows, 4).cuda()
    found = norm_rows.collapse_norm(streams, pre, weight, 1e-6, fp8=True)
    exact = norm_rows.collapse_reference(streams.double(), pre.double(), weight.double(), 1e-6)
    assert error(found.plain_TD, exact.plain_TD) < 2 * bound
    assert torch.equal(found.rounded_TD, fake_quant(found.plain_TD, "fp8"))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("inner", [64, 2304])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_gated_rows_are_their_reference(rows: int, inner: int, kind: torch.dtype) -> None:
    gate_up = 8 * noise(rows, 2 * inner).cuda().to(kind)
    found = gated_rows.gated_rows(gate_up, 10.0)
    bound = F32_ERROR if kind == torch.float32 else BF16_ERROR
    assert error(found, gated_rows.reference(gate_up.double(), 10.0)) < bound
    assert torch.equal(gated_rows.gated_rows(gate_up, 10.0, fp8=True), fake_quant(found, "fp8"))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", [64, 128, 512])
def test_new_window_rows_have_the_references_bytes(rows: int, width: int) -> None:
    wide, weight = noise(rows, width + 32).cuda().bfloat16(), noise(width).cuda()
    nbytes = width + width // 32
    at = torch.randperm(2 * rows, generator=torch.Generator().manual_seed(1))[:rows] * nbytes
    at[1::3] = -1
    memories = [torch.full((2 * rows * nbytes,), 9, dtype=torch.uint8).cuda() for _ in range(2)]
    arguments = (wide[:, 32:], weight, 1e-6, turns(rows, 16).cuda())
    norm_rope_pack.norm_rope_pack(*arguments, memories[0], at.cuda())
    norm_rope_pack.reference(*arguments, memories[1], at.cuda())
    if rows:  # a sum's last bit may decide a rounding
        assert float((memories[0] == memories[1]).double().mean()) > 0.995


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_addresses_are_their_reference(kind: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    numbers = torch.randint(-1, 700, (37, 129), generator=generator, dtype=kind).cuda()
    owners = torch.randint(5, (37,), generator=generator).cuda()
    tables = torch.randint(1 << 20, (5, 11), generator=generator).cuda()
    for records in (Records(64, 890_048, 288), Records(7, 1 << 20, 528)):
        found = row_addresses.row_addresses(numbers, owners, tables, records)
        assert torch.equal(found, row_addresses.reference(numbers, owners, tables, records))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("n", "width"), [(4, 5120), (2, 96)])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_memory_is_taken_in_as_by_the_reference(
    rows: int, n: int, width: int, kind: torch.dtype
) -> None:
    streams, memory = noise(rows, n, width).cuda().to(kind), noise(rows, (n + 1) * width).cuda()
    weight, closed = noise(n, width).cuda(), (noise(rows) > 1).cuda()
    memory = memory.to(kind)
    found = engram_mix.engram_mix(streams, memory, weight, 1e-6, closed)
    expected = engram_mix.reference(
        streams.double(), memory.double(), weight.double(), 1e-6, closed
    )
    assert error(found, expected) < (F32_ERROR if kind == torch.float32 else BF16_ERROR)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("n", "width"), [(4, 5120), (2, 96), (4, 384)])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_a_sublayer_begins_as_by_its_steps(
    rows: int, n: int, width: int, kind: torch.dtype
) -> None:
    streams, weight = noise(rows, n, width).cuda().to(kind), noise(width).cuda()
    entries, pre = n * (n + 2), noise(rows, n).cuda()
    project, base = noise(n * width, entries).cuda() / 20, noise(entries).cuda()
    mixing = begin_sublayer.Mixing(project, base, 20, 1e-6)
    with torch.no_grad():
        made, x = begin_sublayer.begin_sublayer(streams, pre, mixing, weight, 1e-6, fp8=True)
        wide = begin_sublayer.Mixing(project.double(), base.double(), 20, 1e-6)
        exact = begin_sublayer.reference(
            streams.double(), pre.double(), wide, weight.double(), 1e-6
        )
    for found, expected in zip(made, exact.mixes, strict=True):
        assert error(found, expected) < 3e-5  # products of 20,480 terms, then 20 divisions
    assert error(x.plain_TD, exact.x.plain_TD) < (
        F32_ERROR if kind == torch.float32 else 2 * BF16_ERROR
    )
    assert torch.equal(x.rounded_TD, fake_quant(x.plain_TD, "fp8"))


@pytest.mark.gpu
@pytest.mark.parametrize(("length", "block"), [(7, 2), (4096, 8), (20_003, 8)])
def test_block_maxima_are_their_reference(length: int, block: int) -> None:
    scores, seen = noise(3, length).cuda(), torch.tensor([length, length // 2, 0]).int().cuda()
    found = block_maxima.block_maxima(scores, seen, block)
    assert torch.equal(found, block_maxima.reference(scores, seen, block))


@pytest.mark.gpu
def test_rows_of_candidates_are_those_of_the_reference() -> None:
    generator = torch.Generator().manual_seed(2)
    places = torch.randint(-1, 800, (7, 513), generator=generator, dtype=torch.int32).cuda()
    blocks = torch.randint(1 << 20, (7, 100), generator=generator, dtype=torch.int32).cuda()
    found = candidate_rows.candidate_rows(places, blocks, 8)
    assert torch.equal(found, candidate_rows.reference(places, blocks, 8))


# ------------------------------------------------------------------ without one

U8, F32, BF16, I64 = "*u8", "*fp32", "*bf16", "*i64"
COMPILED: dict[str, Case] = {
    "norm": (
        "ops.norm_rows",
        "_norm",
        {
            **{"x": BF16, "pre": F32, "weight": F32, "plain": BF16, "rounded": BF16},
            **{"row_stride": "i32", "eps": "fp32"},
        },
        {"STREAMS": 4, "D": 5120, "BLOCK": 8192, "PLAIN": True, "FP8": True},
    ),
    "gates": (
        "ops.gated_rows",
        "_gated",
        {"gate_up": BF16, "out": BF16, "limit": "fp32"},
        {"F": 2304, "BLOCK": 1024, "FP8": True},
    ),
    "window rows": (
        "ops.joined.norm_rope_pack",
        "_norm_rope_pack",
        {
            **{"x": BF16, "weight": F32, "turns": F32, "memory": U8, "at_N": I64},
            **{"row_stride": "i32", "eps": "fp32"},
        },
        {"D": 512, "P": 32, "ALIGN": 16},
    ),
    "memory": (
        "ops.joined.engram_mix",
        "_engram_mix",
        {
            **{"streams": BF16, "memory": BF16, "weight": F32, "closed": "*i1", "out": BF16},
            "eps": "fp32",
        },
        {"STREAMS": 4, "D": 5120, "BLOCK": 8192},
    ),
    "beginning of a sublayer": (
        "ops.joined.begin_sublayer",
        "_begin",
        {
            **{"streams": BF16, "plain": BF16, "rounded": BF16, "rows": "i32"},
            **dict.fromkeys(("partial", "squares", "base", "pre_in", "weight"), F32),
            **dict.fromkeys(("pre", "post", "mix"), F32),
            **{"eps": "fp32", "mixing_eps": "fp32"},
        },
        {
            **{"N": 4, "D": 5120, "WIDE": 32, "PIECES": 160, "ITERATIONS": 20},
            **{"S": 256, "BLOCK": 8192, "FP8": True},
        },
    ),
    "rows of candidates": (
        "ops.candidate_rows",
        "_candidate_rows",
        {
            **dict.fromkeys(("places", "blocks", "out"), "*i32"),
            **dict.fromkeys(("count", "width", "candidates"), "i32"),
        },
        {"SIZE": 8, "BLOCK": 1024},
    ),
    "block maxima": (
        "ops.block_maxima",
        "_block_maxima",
        {
            **{"scores": F32, "seen_T": "*i32", "maxima": F32},
            **dict.fromkeys(("length", "blocks"), "i32"),
        },
        {"SIZE": 8, "COUNT": 256},
    ),
    "addresses": (
        "ops.row_addresses",
        "_row_addresses",
        {
            **{"numbers": "*i32", "owners": I64, "table": I64, "out": I64},
            **dict.fromkeys(("count", "width", "places"), "i32"),
        },
        {"ROWS": 64, "RECORD_BYTES": 890048, "ROW_BYTES": 288, "BLOCK": 1024},
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("chip", [90, 100])
@pytest.mark.parametrize("name", COMPILED)
def test_compiles_to_machine_code(name: str, chip: int) -> None:
    compile_for(chip, COMPILED[name], warps=4)
