"""Run by test_joint_attention.py with TRITON_INTERPRET=1: kernels against their reference."""

from __future__ import annotations

import torch

from examples.mini import joint_attention
from examples.mini.joint_attention import Bounds, reference

B, S, H, D, W = 2, 128, 4, 32, 64


def compare(ratio: int, *, chosen: bool) -> None:
    starts = torch.zeros(B, S, dtype=torch.int64)
    starts[1, 50:], starts[1, 100:] = 50, 100
    floors = starts.clone()
    floors[0] = 20
    bounds = Bounds.of(starts, floors)
    q, window, sink = torch.randn(B, S, H, D), torch.randn(B, S, D), torch.randn(H)
    inputs = [q, window, sink]
    if ratio:
        inputs.append(torch.randn(B, S // ratio, D))
    for one in inputs:
        one.requires_grad_(True)
    rows = inputs[3] if ratio else None
    mask = (torch.rand(B, S, S // ratio) < 0.5).to(torch.int8) if chosen else None
    weight = torch.randn(B, S, H, D)
    found = []
    for function in (joint_attention.joint_attention, reference):
        out, lse = function(q, window, rows, sink, bounds, mask, W, ratio)
        found.append((out, lse, *torch.autograd.grad((out * weight).sum(), inputs)))
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
    print(f"ratio {ratio}: equal")


if __name__ == "__main__":
    torch.manual_seed(0)
    joint_attention.INTERPRETED = True
    compare(0, chosen=False)
    compare(1, chosen=True)
    compare(2, chosen=False)
