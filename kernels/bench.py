"""How fast the ops on packed data are: python -m kernels.bench [--peers] [--tune] [--json FILE]

Each figure is a ratio against a limit, or a peer, of the same run, on random data and after the
result was compared with the reference. The limits: BW, a copy of 4 GiB within the device, 8.6 GB
read and written; PEAK, a product of bf16 matrices of 8192 x 8192. Peers are optional packages that
only this script ever imports. Needs a GPU.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from kernels.bench_dense import dense_rows
from kernels.bench_fused import fused_rows, index_rows
from kernels.formats import encode_fp4_rows, pack
from kernels.measure import Limits, Row, check, fastest, measure_limits, seconds
from kernels.ops import packed_attention as attention
from kernels.ops import packed_experts as experts

HEADS, HEAD_DIM, WINDOW, SELECTED = 64, 512, 128, 512  # of the real model
EXPERTS, SLOTS, DIMS, INNER = 32, 6, 5120, 2304  # as many experts as a rank may have


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="kernels.bench", description=__doc__)
    parser.add_argument("--peers", action="store_true", help="measure installed peers too")
    parser.add_argument("--tune", action="store_true", help="try all settings, keep the fastest")
    parser.add_argument("--json", type=Path, help="write the rows here, too")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("kernels.bench: torch sees no GPU here", file=sys.stderr)
        return 1
    limits = measure_limits()
    device = torch.cuda.get_device_name()
    print(f"{device}: BW {limits.bytes_per_s / 1e12:.2f} TB/s, PEAK {limits.flops / 1e12:.0f} TF/s")
    rows = []
    for row in itertools.chain(
        attention_rows(limits, options.tune, options.peers),
        expert_rows(limits, options.tune),
        index_rows(limits, options.peers),
        fused_rows(limits, options.peers),
        dense_rows(limits),
    ):
        print(
            f"{row.name:56} {row.microseconds:9.1f} us  {row.ratio:6.2f} {row.against:12}"
            f" {row.setting}",
            flush=True,
        )
        rows.append(row)
    if options.json:
        table = {"device": device, "limits": asdict(limits), "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(table, indent=1), encoding="utf-8")
    return 0


# ------------------------------------------------------------------ sparse attention


def attention_rows(limits: Limits, tune: bool, peers: bool) -> Iterator[Row]:
    for rows in (1, 4, 8, 64, 128, 256):
        yield from _attention(rows, limits, tune, peers)


def _attention(rows: int, limits: Limits, tune: bool, peers: bool) -> Iterator[Row]:
    memory = 1 << 15  # rows to choose from: of requests of 32 K tokens
    near = pack(torch.randn(memory, HEAD_DIM, device="cuda"), "fp8")
    far = pack(torch.randn(memory, HEAD_DIM, device="cuda"), "fp4_e4m3")
    sink = torch.randn(HEADS, device="cuda")
    q = torch.randn(rows, HEADS, HEAD_DIM, device="cuda").bfloat16()
    window = attention.Located(near.flatten(), _anywhere(memory, rows, WINDOW, near.shape[1]))
    selected = attention.Located(far.flatten(), _anywhere(memory, rows, SELECTED, far.shape[1]))

    def call(parts: int) -> Tensor:
        return attention.packed_attention(q, window, selected, sink, parts=parts)

    default = 10 if rows <= 8 else 2 if rows <= 64 else 1
    check("attention", call(default), attention.reference(q.float(), window, selected, sink))
    taken, best = fastest([1, 2, 3, 4, 5, 10] if tune else [default], call)
    flops = rows * HEADS * (WINDOW + SELECTED) * HEAD_DIM * 4
    name = f"sparse attention, {rows} rows x {WINDOW} + {SELECTED} keys"
    yield limits.computed(name, flops, taken, f"{best} parts")
    if tune:
        portable = seconds(
            lambda: attention.packed_attention(
                q, window, selected, sink, parts=default, tiling=attention.Tiling()
            )
        )
        yield Row(f"{name}: for any GPU", portable * 1e6, portable / taken, "x our time")
    other = _flash_mla(q, sink) if peers else None
    if other:
        yield Row(f"{name}: FlashMLA", other * 1e6, other / taken, "x our time")


def _anywhere(memory: int, rows: int, keys: int, row_bytes: int) -> Tensor:
    return torch.randint(memory, (rows, keys), device="cuda") * row_bytes


def _flash_mla(q_THd: Tensor, sink_H: Tensor) -> float | None:
    """Seconds that FlashMLA takes for as many keys in its own format, 584 bytes a row."""
    try:
        from flash_mla import (  # type: ignore[import-not-found, unused-ignore]
            flash_mla_with_kvcache,
            get_mla_metadata,
        )
    except ImportError:
        return None
    rows = len(q_THd)
    # random numbers, but scales that are no NaN: bytes 576 to 583 are powers of two
    caches = []
    for _ in range(2):
        cache = torch.randint(0, 0x70, (512, 64, 1, 584), device="cuda", dtype=torch.uint8)
        cache[..., 576:] = 120
        caches.append(cache)
    picks = [
        torch.randint(512 * 64, (rows, 1, keys), device="cuda", dtype=torch.int32)
        for keys in (WINDOW, SELECTED)
    ]
    plan, _ = get_mla_metadata()

    def call() -> object:
        return flash_mla_with_kvcache(
            q_THd.unsqueeze(1),
            caches[0],
            None,
            None,
            HEAD_DIM,
            plan,
            softmax_scale=HEAD_DIM**-0.5,
            is_fp8_kvcache=True,
            indices=picks[0],
            attn_sink=sink_H,
            extra_k_cache=caches[1],
            extra_indices_in_kvcache=picks[1],
        )

    call()
    return seconds(call)


# ------------------------------------------------------------------ experts


def expert_rows(limits: Limits, tune: bool) -> Iterator[Row]:
    gate_up, down = _matrices(2 * INNER, DIMS), _matrices(DIMS, INNER)
    for rows in (4, 16, 64, 512, 4096):
        yield _experts(rows, gate_up, down, limits, tune)


def _experts(
    rows: int, gate_up: experts.Fp4Matrices, down: experts.Fp4Matrices, limits: Limits, tune: bool
) -> Row:
    x = torch.randn(rows, DIMS, device="cuda").bfloat16()
    chosen = torch.rand(rows, EXPERTS, device="cuda").argsort(1)[:, :SLOTS].contiguous()
    shares = torch.full((rows, SLOTS), 1 / SLOTS, device="cuda")

    def call(tiles: experts.Tiles | None) -> Tensor:
        return experts.packed_experts(
            x, chosen, shares, gate_up, down, limit=10.0, fp8=True, tiles=tiles
        )

    expected = experts.reference(
        x[:64], chosen[:64], shares[:64], gate_up, down, limit=10, fp8=True
    )
    check("experts", call(None)[:64], expected)
    decode = rows * SLOTS <= 16 * EXPERTS
    taken, best = fastest([None, *_tilings(decode)] if tune else [None], call)
    setting = "default" if best is None else str(tuple(best))
    name = f"experts, {rows} rows x {SLOTS} of {EXPERTS}"
    if not decode:
        return limits.computed(name, rows * SLOTS * 6 * DIMS * INNER, taken, setting)
    touched = int((torch.bincount(chosen.flatten(), minlength=EXPERTS) > 0).sum())
    read = touched * sum(part[0].numel() for part in (*gate_up, *down))
    return limits.moved(f"{name}, {read / 1e6:.0f} MB of weights", read, taken, setting)


def _matrices(out: int, dims: int) -> experts.Fp4Matrices:
    parts = [
        encode_fp4_rows(torch.randn(out, dims, device="cuda") * dims**-0.5) for _ in range(EXPERTS)
    ]
    return experts.Fp4Matrices(
        torch.stack([part.codes for part in parts]), torch.stack([part.scales for part in parts])
    )


def _tilings(decode: bool) -> list[experts.Tiles]:
    if decode:
        sizes = [
            (64, 128, 4, 4),
            (64, 64, 4, 4),
            (64, 256, 4, 3),
            (64, 128, 4, 3),
            (128, 128, 8, 3),
        ]
        return [experts.Tiles(16, *size) for size in sizes]
    sizes = [(128, 64, 8, 3), (128, 32, 8, 3), (64, 64, 4, 3), (128, 64, 8, 2)]
    return [experts.Tiles(rows, *size) for rows in (64, 128) for size in sizes]


if __name__ == "__main__":
    sys.exit(main())
