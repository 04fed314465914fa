"""The rows of kernels/bench.py for what is bound by memory, and for the choice of rows."""

# mypy: allow-untyped-calls

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.bench_peers import deep_gemm_scores
from kernels.formats import pack
from kernels.measure import Limits, Row, check, median, seconds
from kernels.ops import hyper_connection, index_topk
from kernels.ops.compress import compress
from kernels.ops.norm_rows import norm_rows
from kernels.ops.norm_rows import reference as norm_reference
from kernels.ops.rope_pack import reference as rope_reference
from kernels.ops.rope_pack import rope_pack

WIDTH, HEAD_DIM, STREAMS, ENTRIES = 5120, 512, 4, 24  # of the real model
ROWS = 8192


def fused_rows(limits: Limits, peers: bool) -> Iterator[Row]:
    x, weight = torch.randn(ROWS, WIDTH, device="cuda").bfloat16(), torch.randn(WIDTH).cuda()
    expected = norm_reference(x[:64], weight, 1e-6, fp8=True).rounded_TD
    check("norm", norm_rows(x[:64], weight, 1e-6, fp8=True), expected)
    taken = seconds(lambda: norm_rows(x, weight, 1e-6, fp8=True))
    name = f"RMSNorm, rounded to FP8, {ROWS} rows of {WIDTH}"
    yield limits.moved(name, 2 * x.nbytes, taken)
    plain = seconds(lambda: torch.nn.functional.rms_norm(x, (WIDTH,), weight.bfloat16()))
    yield Row("RMSNorm of torch, without FP8", plain * 1e6, plain / taken, "x our time")
    liger = _liger(x, weight.bfloat16()) if peers else None
    if liger:
        yield Row("RMSNorm of Liger, without FP8", liger * 1e6, liger / taken, "x our time")
    rows = 8 * ROWS
    for row_format, nbytes in (("fp8", 528), ("fp4_e4m3", 288)):
        taken = _rotation(rows, row_format, nbytes)
        moved = rows * (2 * HEAD_DIM + nbytes + 256 + 8)
        yield limits.moved(f"rotation, rounding, {rows} rows of {nbytes} bytes", moved, taken)
    both = [torch.randn(rows, 2 * HEAD_DIM, device="cuda").bfloat16().chunk(2, 1) for _ in "ab"]
    with torch.no_grad():
        check("pooling", compress(*both[0], *both[1]), compress.reference(*both[0], *both[1]))
        taken = seconds(lambda: compress(*both[0], *both[1]))
    yield limits.moved(f"pooling of the compressor, {rows} rows", rows * 5 * 2 * HEAD_DIM, taken)
    for count in (64, 4096):
        yield from _hyper_connections(count, limits)


def _rotation(rows: int, row_format: str, nbytes: int) -> float:
    """Seconds that new cache rows take."""
    kv = torch.randn(rows, HEAD_DIM, device="cuda").bfloat16()
    turns = torch.polar(torch.ones(rows, 32), torch.randn(rows, 32)).cuda()
    one, other = (torch.zeros(rows * nbytes, dtype=torch.uint8, device="cuda") for _ in range(2))
    at = torch.randperm(rows, device="cuda") * nbytes
    rope_pack(kv[:64], turns[:64], one, at[:64], row_format)
    rope_reference(kv[:64], turns[:64], other, at[:64], row_format)
    check("rotation and packing", one, other)
    return seconds(lambda: rope_pack(kv, turns, one, at, row_format))


def _liger(x: Tensor, weight: Tensor) -> float | None:
    """Seconds that Liger's norm takes."""
    try:
        from liger_kernel.ops.rms_norm import (  # type: ignore[import-not-found, unused-ignore]
            LigerRMSNormFunction,
        )
    except ImportError:
        return None
    with torch.no_grad():
        return seconds(lambda: LigerRMSNormFunction.apply(x, weight, 1e-6))


class _Streams(NamedTuple):
    """A sublayer's end and the next one's beginning."""

    streams_TnD: Tensor
    out_TD: Tensor
    project_Em: Tensor
    base_m: Tensor
    eps: Tensor

    def ours(self) -> Tensor:
        logits_Tm = hyper_connection.mixing_logits(self.streams_TnD, *self[2:])
        pre, post, mix = hyper_connection.mixes(logits_Tm, STREAMS, 20, 1e-6)
        written = hyper_connection.spread(self.out_TD, self.streams_TnD, post, mix)
        return hyper_connection.collapse(written, pre)

    def eager(self) -> Tensor:
        streams_TnD = self.streams_TnD.float()
        logits_Tm = hyper_connection.mixing_logits.reference(streams_TnD, *self[2:])
        pre, post, mix = hyper_connection.mixes.reference(logits_Tm, STREAMS, 20, 1e-6)
        written = hyper_connection.spread.reference(self.out_TD.float(), streams_TnD, post, mix)
        return hyper_connection.collapse.reference(written, pre).bfloat16()


@torch.no_grad()
def _hyper_connections(rows: int, limits: Limits) -> Iterator[Row]:
    one = _Streams(
        torch.randn(rows, STREAMS, WIDTH, device="cuda").bfloat16(),
        torch.randn(rows, WIDTH, device="cuda").bfloat16(),
        torch.randn(STREAMS * WIDTH, ENTRIES, device="cuda") / 20,
        torch.randn(ENTRIES, device="cuda"),
        torch.tensor(1e-6, device="cuda"),
    )
    check("hyper-connection", one.ours(), one.eager())
    name = f"hyper-connection, {rows} rows"
    taken, eager = seconds(one.ours), median(one.eager, 10)
    # streams are read for the weights, read and written for the sublayer, read for the next
    moved = rows * WIDTH * 2 * (4 * STREAMS + 2)
    yield limits.moved(f"{name}: weights, writing, reading", moved, taken)
    yield Row(f"{name}: torch, eager", eager * 1e6, eager / taken, "x our time")
    logits_Tm = hyper_connection.mixing_logits(one.streams_TnD, *one[2:])
    pre, post, mix = hyper_connection.mixes(logits_Tm, STREAMS, 20, 1e-6)
    flat = rows * STREAMS * WIDTH * 2
    for step, nbytes, taken in (
        (
            "weights",
            flat + one.project_Em.numel() * 4,
            seconds(lambda: hyper_connection.mixing_logits(one.streams_TnD, *one[2:])),
        ),
        (
            "writing",
            2 * flat + flat // STREAMS,
            seconds(lambda: hyper_connection.spread(one.out_TD, one.streams_TnD, post, mix)),
        ),
        (
            "reading",
            flat + flat // STREAMS,
            seconds(lambda: hyper_connection.collapse(one.streams_TnD, pre)),
        ),
    ):
        yield limits.moved(f"{name}: {step}", nbytes, taken)
    taken = seconds(lambda: hyper_connection.mixes(logits_Tm, STREAMS, 20, 1e-6))
    yield limits.moved(f"{name}: Sinkhorn", rows * 2 * ENTRIES * 4, taken)


# ------------------------------------------------------------------ choice of rows


def index_rows(limits: Limits, peers: bool) -> Iterator[Row]:
    for length in (8192, 65536, 262144):
        yield from _index(32, length, limits, peers)


def _index(rows: int, length: int, limits: Limits, peers: bool) -> Iterator[Row]:
    q = torch.randn(rows, 32, 128, device="cuda").bfloat16()
    weights = torch.randn(rows, 32, device="cuda")
    memory, page = pack(torch.randn(1 << 18, 128, device="cuda"), "fp4"), 128
    pages = [torch.randperm(len(memory) // page, device="cuda")[: length // page]] * rows
    keys = index_topk.Paged(memory.flatten(), torch.stack(pages) * page * memory.shape[1], page)
    seen = torch.full((rows,), length, dtype=torch.int32, device="cuda")
    scores = index_topk.index_scores(q, weights, keys, seen)
    first = index_topk.Paged(keys.memory, keys.at_TP[:1], page)
    exact = index_topk.scores_reference(q[:1], weights[:1], first, seen[:1])
    check("index scores", scores[:1], exact)
    if not torch.equal(
        index_topk.select(scores, seen, 512), index_topk.select_reference(scores, 512)
    ):
        raise SystemExit("the choice of rows is wrong")
    name = f"index, {rows} x {length} rows"
    taken = seconds(lambda: index_topk.index_scores(q, weights, keys, seen))
    yield limits.computed(f"{name}: scores", rows * length * 32 * 128 * 2, taken)
    chosen = seconds(lambda: index_topk.select(scores, seen, 512))
    yield limits.moved(f"{name}: best 512", rows * length * 4, chosen)
    peer = seconds(lambda: torch.topk(scores, 512, dim=-1, sorted=False))
    yield Row(f"{name}: torch.topk on our scores", peer * 1e6, peer / chosen, "x our time")
    whole = seconds(lambda: index_topk.index_topk(q, weights, keys, seen, 512))
    yield Row(f"{name}: both", whole * 1e6, (taken + peer) / whole, "x with topk")
    try:
        other = deep_gemm_scores(rows, length) if peers else None
    except Exception as error:  # a peer is another's code and built as it is first called
        other = None
        print(f"DeepGEMM: not measured: {type(error).__name__}: {str(error)[:200]}", flush=True)
    if other:
        yield Row(f"{name}: DeepGEMM's scores", other * 1e6, other / taken, "x our time")
        yield Row(
            f"{name}: DeepGEMM and topk", (other + peer) * 1e6, (other + peer) / whole, "x our time"
        )
