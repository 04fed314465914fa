"""Peers that kernels/bench.py can measure: optional packages, that nothing else imports."""

# mypy: allow-untyped-calls

from __future__ import annotations

import torch

from kernels.measure import seconds

HEADS, SIZE, PAGE = 32, 128, 64  # index heads and keys of the real model; DeepGEMM's pages


def deep_gemm_scores(rows: int, length: int) -> float:
    """Seconds that DeepGEMM takes for the scores of `rows` requests of `length` keys, in its own
    format: FP8 keys with a float32 scale, 132 bytes each. As in our own row, requests share keys.
    """
    import deep_gemm  # type: ignore[import-not-found, unused-ignore]

    pages = length // PAGE
    values = torch.randn(pages, PAGE * SIZE, device="cuda").to(torch.float8_e4m3fn)
    scales = torch.ones(pages, PAGE, device="cuda")
    memory = torch.cat([values.view(torch.uint8), scales.view(torch.uint8)], 1)
    memory = memory.view(pages, PAGE, 1, SIZE + 4)
    q = torch.randn(rows, 1, HEADS, SIZE, device="cuda").to(torch.float8_e4m3fn)
    weights = torch.randn(rows, HEADS, device="cuda")
    lengths = torch.full((rows, 1), length, dtype=torch.int32, device="cuda")
    table = torch.randperm(pages, device="cuda").int().repeat(rows, 1)
    units = torch.cuda.get_device_properties(0).multi_processor_count
    plan = deep_gemm.get_paged_mqa_logits_metadata(lengths, PAGE, units)
    return seconds(
        lambda: deep_gemm.fp8_paged_mqa_logits(
            q, memory, weights, lengths, table, plan, length, False
        )
    )
