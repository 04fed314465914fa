"""Draws by noise: a kernel chooses what the reference chooses, to the last bit of the noise."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest
import torch

from kernels.ops.gumbel import gumbel_argmax, noise, reference


def test_the_interpreted_kernel_is_its_reference() -> None:
    """In a process of its own: Triton reads the variable when it is imported."""
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.interpreted_gumbel"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_what_must_not_come_does_not() -> None:
    keys_S = torch.arange(200)
    scaled_SV = torch.full((200, 30), -math.inf, dtype=torch.float64)
    scaled_SV[:, [4, 17]] = 0.0
    found = gumbel_argmax(scaled_SV, keys_S)
    assert set(found.tolist()) == {4, 17}
    assert 70 < int((found == 4).sum()) < 130  # five standard deviations


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "size"), [(1, 129_280), (64, 129_280), (3, 500), (5, 16_385)])
def test_a_gpu_draws_what_the_cpu_draws(rows: int, size: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    limits = torch.iinfo(torch.int64)
    keys_S = torch.randint(limits.min, limits.max, (rows,), generator=generator)
    some_SV = torch.randn(rows, size, dtype=torch.float64, generator=generator) * 3
    some_SV[:, ::5] = -math.inf
    # logits that the noise takes back: one that were another by a bit would not leave the first
    level_SV = -noise(keys_S, size)
    for scaled_SV in (some_SV, torch.zeros_like(some_SV), level_SV):
        found = gumbel_argmax(scaled_SV.cuda(), keys_S.cuda())
        assert torch.equal(found.cpu(), reference(scaled_SV, keys_S))
    assert torch.equal(noise(keys_S.cuda(), size).cpu(), noise(keys_S, size))
