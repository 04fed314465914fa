"""Small kernels against their references on a CPU, in float32:

    TRITON_INTERPRET=1 python -m tests.kernels.interpreted_ops

in a process of its own: Triton reads the variable when it is imported.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import row_kernels, turn_kernels
from kernels.formats import encode_fp8_rows
from kernels.ops import engram_gather, pack_index_keys, put_rows, turn_fp4, turn_heads
from tests.kernels.packed import error


def main() -> None:
    torch.manual_seed(0)
    turning()
    packing()
    moving()
    gathering()
    print("ok")


def turning() -> None:
    for rows, heads, size, pairs in ((3, 2, 64, 8), (1, 5, 96, 16), (7, 1, 32, 16)):
        x = torch.randn(rows, heads, size)
        turns = torch.polar(torch.ones(rows, pairs), torch.randn(rows, pairs))
        for inverse in (False, True):
            # without rounding: the interpreter cuts e4m3 off where a GPU rounds
            expected = turn_heads.reference(x, turns, inverse=inverse)
            for part in (x.clone(), part_of_wider(x)):
                found = turn_kernels.turn_heads(part, turns, inverse=inverse)
                assert found.is_contiguous()
                assert error(found, expected) < 1e-6
        expected = turn_fp4.reference(x, turns)
        assert error(turn_kernels.turn_fp4(part_of_wider(x), turns), expected) < 1e-2


def part_of_wider(x_THd: Tensor) -> Tensor:
    rows, heads, size = x_THd.shape
    wide = torch.randn(rows, heads * size + 32)
    wide[:, : heads * size] = x_THd.flatten(1)
    return wide[:, : heads * size].view(rows, heads, size)


def packing() -> None:
    x, at = torch.randn(5, 70)[:, :64], torch.tensor([0, 34, -1, 102, 340])
    turns = torch.polar(torch.ones(5, 8), torch.randn(5, 8))
    memories = [torch.full((400,), 9, dtype=torch.uint8) for _ in range(2)]
    turn_kernels.pack_index_keys(x, turns, memories[0], at)
    pack_index_keys.reference(x, turns, memories[1], at)
    assert (memories[0] == memories[1]).double().mean() > 0.99
    assert (memories[0][374:] == 9).all()


def moving() -> None:
    for nbytes in (7, 34, 68, 288, 528, 9000):
        step = 16 * nbytes  # rows begin where words may
        at = torch.tensor([3, -1, 0, 1]) * step
        memory = torch.randint(256, (4 * step + nbytes,), dtype=torch.uint8)
        rows = torch.randint(256, (4, nbytes), dtype=torch.uint8)
        expected = memory.clone()
        put_rows.put_rows.reference(expected, at, rows)
        row_kernels.put_rows(memory, at, rows)
        assert torch.equal(memory, expected)
        taken = row_kernels.take_rows(memory, at, nbytes)
        assert torch.equal(taken, put_rows.take_rows.reference(memory, at, nbytes))


def gathering() -> None:
    for size in (32, 96, 256):
        table = encode_fp8_rows(torch.randn(40, size) * 3)
        rows = torch.randint(40, (5, 3))
        for dtype in (torch.float32, torch.bfloat16):
            found = row_kernels.engram_gather(rows, *table, dtype)
            assert torch.equal(found, engram_gather.reference(rows, *table, dtype))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
