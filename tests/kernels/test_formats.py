"""Number formats: known bytes, and rounding against a search through all codes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from kernels import formats, formats_cpu
from kernels.formats import fake_quant, pack, unpack

Floats = npt.NDArray[np.float64]
FORMATS = ("fp8", "fp4", "fp4_e4m3")

E4M3 = np.array(
    [(c & 7) * 2.0**-9 if c < 8 else (8 + (c & 7)) * 2.0 ** ((c >> 3) - 10) for c in range(127)]
)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def nearest(values: Floats, magnitudes: Floats) -> npt.NDArray[np.int64]:
    """Codes of the nearest magnitudes by search, ties to the even code."""
    gaps = np.abs(np.abs(values)[..., None] - magnitudes)
    best = gaps.min(-1, keepdims=True)
    even_first = np.where(gaps == best, np.arange(len(magnitudes)) % 2, 2)
    codes: npt.NDArray[np.int64] = even_first.argmin(-1)
    return codes


def expected_row(row: Floats, row_format: str) -> bytes:
    """The packed bytes of one row by the formats' definitions, in float64."""
    group = 16 if row_format == "fp4_e4m3" else 32
    top, floor = {"fp8": (448, 1e-4), "fp4": (6, 6 * 2.0**-126), "fp4_e4m3": (6, 6 * 2.0**-9)}[
        row_format
    ]
    codes, scales = [], []
    for values in row.reshape(-1, group):
        wanted = max(np.abs(values).max(), floor) / top
        if row_format == "fp4_e4m3":
            scale_code = int(nearest(np.array(wanted), E4M3))
            scale = E4M3[scale_code]
        else:
            exponent = int(np.ceil(np.log2(wanted)))
            scale_code, scale = exponent + 127, 2.0**exponent
        magnitudes, sign = (E4M3, 0x80) if row_format == "fp8" else (E2M1, 0x8)
        code = nearest(values / scale, magnitudes) | np.where(np.signbit(values), sign, 0)
        if row_format != "fp8":
            code = code[0::2] | code[1::2] << 4
        codes += code.tolist()
        scales.append(scale_code)
    return bytes(codes + scales)


def sample(rows: int = 60) -> Tensor:
    """Rows of many magnitudes, zeros, negative zeros, powers of two and values next to them."""
    noise = torch.randn(rows, 128, generator=torch.Generator().manual_seed(1))
    noise *= 2.0 ** torch.randint(-20, 16, (rows, 1), generator=torch.Generator().manual_seed(2))
    noise[0], noise[1] = 0.0, -0.0
    noise[2, :32], noise[3, :32], noise[4] = 448 * 2.0**-3, 6 * 2.0**5, 6.0
    noise[5] = torch.nextafter(torch.tensor(7.0), torch.tensor(8.0))
    noise[6] = torch.nextafter(torch.tensor(3.0), torch.tensor(4.0))
    noise[7, ::3] = -1e-30
    return noise


@pytest.mark.parametrize("row_format", FORMATS)
def test_packed_bytes_are_those_of_a_search_through_all_codes(row_format: str) -> None:
    rows = sample()
    packed = pack(rows, row_format)
    for row, found in zip(rows.double().numpy(), packed, strict=True):
        assert bytes(found.tolist()) == expected_row(row, row_format)


@pytest.mark.parametrize("row_format", FORMATS)
def test_unpacking_gives_what_fake_quant_gave_and_packing_that_changes_no_value(
    row_format: str,
) -> None:
    rows = sample().clamp(-300, 300)
    rounded = fake_quant(rows, row_format)
    assert torch.equal(unpack(pack(rows, row_format), row_format, 128), rounded)
    if row_format != "fp4_e4m3":  # whose tiny scales do not survive a second rounding
        assert torch.equal(unpack(pack(rounded, row_format), row_format, 128), rounded)


@pytest.mark.parametrize("row_format", FORMATS)
def test_both_forms_agree_to_the_sign_of_zero(row_format: str) -> None:
    rows = sample(2000)
    by_torch = formats._rounded(rows, row_format)
    encoded = torch.cat(list(formats._encode_rows(rows, row_format)), -1)
    assert torch.equal(
        formats_cpu.fake_quant(rows, row_format).view(torch.int32), by_torch.view(torch.int32)
    )
    assert torch.equal(formats_cpu.pack(rows, row_format), encoded)


def test_known_values_and_row_sizes() -> None:
    row = torch.zeros(512)
    row[:4] = torch.tensor([0.3, -1.7, 5.2, 0.01])
    assert fake_quant(row, "fp8")[:4].tolist() == [0.3125, -1.75, 5.0, 0.009765625]
    assert fake_quant(row, "fp4")[:4].tolist() == [0.5, -1.5, 6.0, 0.0]
    assert fake_quant(row, "fp4_e4m3")[:4].tolist() == [0.4375, -1.75, 5.25, 0.0]
    assert [len(pack(row, f)) for f in FORMATS] == [528, 272, 288]
    assert len(pack(row[:128], "fp4")) == 68
    assert torch.equal(unpack(pack(row, "f32"), "f32", 512), row)


def test_golden_checkpoint_bytes() -> None:
    """The first bytes of two tensors of the published checkpoint."""
    scale = torch.tensor([[0x73]], dtype=torch.uint8)
    codes = torch.tensor([[0xD8, 0x71]], dtype=torch.uint8)
    assert formats.decode_fp8_blocks(codes, scale).tolist() == [[-0.00390625, 0.03515625]]
    codes = torch.zeros(1, 16, dtype=torch.uint8)
    codes[0, :4] = torch.tensor([0xA0, 0xA8, 0xEC, 0x4A])
    values = formats.decode_fp4_rows(codes, torch.tensor([[0x78]], dtype=torch.uint8))
    assert (values[0, :8] * 128).tolist() == [0, -1, 0, -1, -2, -4, -1, 2]


def test_weight_blocks_share_a_scale_also_at_ragged_edges() -> None:
    weight = torch.randn(40, 70, generator=torch.Generator().manual_seed(3))
    codes, scales = formats.encode_fp8_blocks(weight)
    assert scales.shape == (2, 3)
    corner = float(weight[32:, 64:].abs().max())
    assert int(scales[1, 2]) == 127 + int(np.ceil(np.log2(corner / 448)))
    decoded = formats.decode_fp8_blocks(codes, scales)
    assert torch.equal(formats.decode_fp8_blocks(*formats.encode_fp8_blocks(decoded)), decoded)
    assert float((decoded - weight).abs().max()) < float(weight.abs().max()) / 16


def test_rows_of_tables_and_of_expert_weights_round_trip() -> None:
    values = sample().clamp(-300, 300)
    table = formats.decode_fp8_rows(*formats.encode_fp8_rows(values))
    assert torch.equal(table, fake_quant(values, "fp8"))
    weight = formats.decode_fp4_rows(*formats.encode_fp4_rows(values))
    assert torch.equal(weight, fake_quant(values, "fp4"))


def test_all_codes_decode() -> None:
    codes = torch.arange(256, dtype=torch.int16).to(torch.uint8)
    found = formats.decode_e4m3(codes)
    assert torch.equal(found[:127].double(), torch.from_numpy(E4M3))
    assert torch.isnan(found[[127, 255]]).all()
    assert formats.decode_ue8m0(codes[[0, 127, 254]]).tolist() == [2.0**-127, 1.0, 2.0**127]
    assert torch.isnan(formats.decode_ue8m0(codes[255:])).all()


def test_the_gradient_passes_straight_through() -> None:
    values = torch.randn(3, 64, requires_grad=True)
    (gradient,) = torch.autograd.grad(fake_quant(values, "fp8").sum(), values)
    assert torch.equal(gradient, torch.ones(3, 64))


def test_rows_that_are_not_whole_groups_are_refused() -> None:
    for row_format in FORMATS:
        with pytest.raises(ValueError, match="not whole groups"):
            pack(torch.zeros(2, 40), row_format)
