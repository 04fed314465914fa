"""The kernel of kernels/ops/gumbel.py against its reference on a CPU, to the bit:

    TRITON_INTERPRET=1 python -m tests.kernels.interpreted_gumbel

in a process of its own: Triton reads the variable when it is imported.
"""

from __future__ import annotations

import math

import torch

from kernels import gumbel_kernel
from kernels.ops import gumbel


def main() -> None:
    generator = torch.Generator().manual_seed(1)
    limits = torch.iinfo(torch.int64)
    for rows, size in ((1, 7), (3, 2048), (2, 16_385)):
        keys_S = torch.randint(limits.min, limits.max, (rows,), generator=generator)
        flat_SV = torch.zeros(rows, size, dtype=torch.float64)
        # noise alone decides, so that every part of a row does somewhere
        found = gumbel_kernel.gumbel_argmax(flat_SV, keys_S)
        assert torch.equal(found, gumbel.reference(flat_SV, keys_S))
        some_SV = torch.randn(rows, size, dtype=torch.float64, generator=generator) * 3
        some_SV[:, ::3] = -math.inf
        found = gumbel_kernel.gumbel_argmax(some_SV, keys_S)
        assert torch.equal(found, gumbel.reference(some_SV, keys_S))
        # logits that the noise takes back, but for its last bits: the first of equals is left
        level_SV = -gumbel.noise(keys_S, size)
        assert gumbel_kernel.gumbel_argmax(level_SV, keys_S).tolist() == [0] * rows
    print("ok")


if __name__ == "__main__":
    main()
