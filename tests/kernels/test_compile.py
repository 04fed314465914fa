"""Every kernel compiles for the GPUs we serve on, without one: what an interpreter lets pass."""

from __future__ import annotations

import math
import subprocess
import sys
from importlib.metadata import version
from typing import Any

import pytest

from kernels.ops.gumbel import FIRST, GOLDEN, SECOND

pytestmark = pytest.mark.full  # a second or two each

ATTEND = {
    **dict.fromkeys(("window", "selected"), "*u8"),
    **dict.fromkeys(("window_at", "selected_at"), "*i64"),
    **dict.fromkeys(("sink", "most", "sums"), "*fp32"),
    "scale": "fp32",
    "heads": "i32",
}
REAL = {"WINDOW": 128, "SELECTED": 512, "H": 64, "D": 512, "ALIGN8": 16, "ALIGN4": 16}
TINY = {"WINDOW": 16, "SELECTED": 24, "H": 16, "D": 128, "ALIGN8": 4, "ALIGN4": 8}
MULTIPLY = {
    "x": "*i32",
    **dict.fromkeys(("codes", "scales"), "*u8"),
    **dict.fromkeys(("expert_B", "assignment_BM"), "*i32"),
    "shares": "*fp32",
    "limit": "fp32",
}
ONE_PART = ATTEND | {"q": "*bf16", "out": "*bf16"}
PARTS = ATTEND | {"q": "*bf16", "out": "*fp32"}
FLOAT32 = ATTEND | {"q": "*fp32", "out": "*fp32"}

U8, F32, I32, BF16 = "*u8", "*fp32", "*i32", "*bf16"
COUNT = {"rows": "i32"}

Case = tuple[str, str, dict[str, str], dict[str, Any]]
CASES: dict[str, Case] = {
    "attention": ("ops.packed_attention", "_attend", ONE_PART, REAL | {"PARTS": 1, "TILE": 64}),
    "attention, parts": ("ops.packed_attention", "_attend", PARTS, REAL | {"PARTS": 5, "TILE": 64}),
    "attention, float32": (
        "ops.packed_attention",
        "_attend",
        FLOAT32,
        TINY | {"PARTS": 2, "TILE": 16},
    ),
    "merge": (
        "ops.packed_attention",
        "_merge",
        {**dict.fromkeys(("parts", "most", "sums"), F32), "out": BF16, "heads": "i32"},
        {"PARTS": 5, "D": 512, "PAIRED": True},
    ),
    "experts, first product": (
        "ops.packed_experts",
        "_multiply",
        MULTIPLY | {"out": BF16},
        {"ROWS": 4608, "DIMS": 5120, "FAN": 6, "GATED": True, "OUT": 64, "M": 16, "PAIRS": 128},
    ),
    "experts, second product": (
        "ops.packed_experts",
        "_multiply",
        MULTIPLY | {"out": F32},
        {"ROWS": 5120, "DIMS": 2304, "FAN": 1, "GATED": False, "OUT": 128, "M": 64, "PAIRS": 64},
    ),
    "draw": (
        "gumbel_kernel",
        "_draw",
        {
            **dict.fromkeys(("scaled", "most_SP"), "*fp64"),
            **dict.fromkeys(("keys_S", "at_SP"), "*i64"),
            **dict.fromkeys(("size", "part"), "i32"),
        },
        {"GOLDEN": GOLDEN, "FIRST": FIRST, "SECOND": SECOND}
        | {"ROOT": math.sqrt(0.5), "LN2": math.log(2.0), "BLOCK": 1024},
    ),
    "blocks of experts": (
        "expert_blocks",
        "_blocks",
        {"chosen": "*i64", "expert_B": I32, "assignment": I32, "count": "i32", "most": "i32"},
        {"BINS": 32, "SIZE": 16, "CHUNK": 1024},
    ),
    "rows in word order, blocks of experts": (
        "hopper_experts",
        "_prepare",
        {
            **{"x": BF16, "out": BF16, "chosen": "*i64", "expert_B": I32, "assignment": I32},
            **dict.fromkeys(("count", "most", "experts"), "i32"),
        },
        {"D": 5120, "BLOCK": 1024, "FP8": True, "BINS": 32, "SIZE": 16, "CHUNK": 1024},
    ),
    "sums of experts": (
        "hopper_experts",
        "_sum_parts",
        {"parts": F32, "out": F32},
        {"D": 5120, "SLOTS": 6, "BLOCK": 512},
    ),
    "index scores": (
        "ops.index_topk",
        "_score",
        {
            **{"q": BF16, "weights": F32, "memory": U8, "at_TP": "*i64", "seen_T": I32},
            **{"scores": F32, "pages": "i32", **COUNT},
        },
        {"PAGE": 128, "H": 32, "D": 128, "TILE": 128},
    ),
    "selection, maxima": (
        "ops.index_topk",
        "_maxima",
        {"scores": F32, "seen_T": I32, "maxima": I32, **COUNT, "tiles": "i32"},
        {"TILE": 64, "COUNT": 64},
    ),
    "selection, bound": (
        "ops.index_topk",
        "_bound",
        {"maxima": I32, "bounds": I32, "tiles": "i32"},
        {"COUNT": 512, "SIZE": 4096},
    ),
    "selection, first level": (
        "ops.index_topk",
        "_select_chunk",
        {
            **{"scores": F32, "seen_T": I32, "bounds": I32, "best": F32, "best_row": I32},
            **{"chunks": "i32", **COUNT},
        },
        {"COUNT": 512, "CHUNK": 8192},
    ),
    "selection, second level": (
        "ops.index_topk",
        "_select",
        {"best": F32, "best_row": I32, "seen_T": I32, "out": I32, "found": "i32"},
        {"ROWS": True, "COUNT": 512, "SIZE": 16384},
    ),
    **{
        f"rotation and packing, {name}": (
            "ops.rope_pack",
            "_rope_pack",
            {"x": BF16, "turns": F32, "memory": U8, "at_N": "*i64", **COUNT},
            {"D": 512, "P": 32, "FP8": name == "fp8", "ALIGN": 16, "ROWS": 1},
        )
        for name in ("fp8", "fp4")
    },
    "pooling": (
        "compress_kernel",
        "_pool",
        {
            **dict.fromkeys(("first_kv", "first_gate", "kv", "gate", "out"), BF16),
            **dict.fromkeys(("first_stride", "stride", "D", "COUNT"), "i32"),
        },
        {"BLOCK": 2048},
    ),
    "mixing weights": (
        "hyper_connection_kernels",
        "_logits",
        {"streams": BF16, "project": F32, "partial": F32, "squares": F32, **COUNT},
        {"E": 20480, "M": 24, "WIDE": 32, "PIECE": 512, "ROWS": 64, "STEP": 64},
    ),
    "mixing weights, added up": (
        "hyper_connection_kernels",
        "_finish",
        {**dict.fromkeys(("partial", "squares", "base", "eps", "logits"), F32), **COUNT},
        {"E": 20480, "M": 24, "WIDE": 32, "PIECES": 40, "ROWS": 8},
    ),
    "Sinkhorn": (
        "hyper_connection_kernels",
        "_mixes",
        {**dict.fromkeys(("logits", "pre", "post", "mix"), F32), **COUNT, "eps": "fp32"},
        {"N": 4, "ITERATIONS": 20, "ROWS": 32},
    ),
    "reading streams": (
        "hyper_connection_kernels",
        "_collapse",
        {"streams": BF16, "pre": F32, "out": BF16},
        {"N": 4, "D": 5120, "BLOCK": 1024},
    ),
    "writing streams": (
        "hyper_connection_kernels",
        "_spread",
        {"added": F32, "more": BF16, "streams": BF16, "post": F32, "mix": F32, "out": BF16},
        {"N": 4, "D": 5120, "BLOCK": 1024, "MORE": True},
    ),
    "products with FP8 blocks": (
        "block_kernels",
        "_multiply",
        {
            **{"x": BF16, "codes": U8, "scales": U8, "out": BF16},
            **{**COUNT, "x_stride": "i32", "outs": "i32"},
        },
        {"K": 5120, "OUT": 64, "M": 64, "PAIRS": 64},
    ),
    "FP8 blocks into bf16": (
        "block_kernels",
        "_decode",
        {"codes": U8, "scales": U8, "out": BF16, "outs": "i32"},
        {"K": 5120},
    ),
    **{
        f"turning heads, {to or 'exact'}": (
            "turn_kernels",
            "_turn",
            {
                **{"x": BF16, "turns": F32, "out": BF16, **COUNT, "heads": "i32"},
                **dict.fromkeys(("token_stride", "head_stride", "out_stride"), "i32"),
            },
            {
                **{"D": size, "P": 32, "BLOCK": size, "ROWS": 2048 // size},
                **{"INVERSE": to == "fp8", "ROUND": to},
            },
        )
        for to, size in (("", 64), ("fp8", 512), ("fp4", 128))
    },
    "turning and packing of index keys": (
        "turn_kernels",
        "_pack_keys",
        {"x": BF16, "turns": F32, "memory": U8, "at_N": "*i64", **COUNT, "stride": "i32"},
        {"D": 128, "P": 32, "ROWS": 8},
    ),
    **{
        f"rows of bytes, {'out' if take else 'in'}": (
            "row_kernels",
            "_copy_rows",
            {"memory": U8, "at_N": "*i64", "rows": U8},
            {"NBYTES": 528, "UNIT": 4, "ALIGN": 16, "TAKE": take, "BLOCK": 256},
        )
        for take in (False, True)
    },
    "rows of tables": (
        "row_kernels",
        "_gather",
        {"codes": U8, "scales": U8, "numbers": "*i64", "out": BF16, "count": "i32"},
        {"DIM": 256, "B": 256, "R": 4},
    ),
    "choice of experts": (
        "route_kernel",
        "_route",
        {
            **{"logits": F32, "bias": F32, "experts": "*i64", "shares": F32},
            **{"bias_stride": "i32", "scale": "fp32"},
        },
        {"E": 384, "COUNT": 6, "BLOCK": 512, "SLOTS": 8},
    ),
}
LISTS = {"WINDOW": 128, "SELECTED": 512}
STREAM = {
    "x": BF16,
    **dict.fromkeys(("codes", "scales"), U8),
    **dict.fromkeys(("expert_B", "assignment_BN"), I32),
    "shares": F32,
    "limit": "fp32",
}
BLOCKS = {
    **{"x": BF16, "codes": U8, "scales": U8, "out": BF16, "partial": F32, "arrived": I32},
    **{**COUNT, "x_stride": "i32", "outs": "i32", "dims": "i32", "parts": "i32"},
}
HOPPER_CASES: dict[str, Case] = {
    **{
        f"products with FP8 blocks, {rows} rows": (
            "hopper_blocks",
            "multiply",
            BLOCKS,
            {"SPLIT": split, "N": rows, "W": 4, "STAGES": 4, "SUB": 1},
        )
        for rows, split in ((8, False), (64, True))
    },
    "index scores": (
        "hopper_index",
        "score",
        {
            **{"q": BF16, "weights": F32, "memory": U8, "at_TP": "*i64", "seen_T": I32},
            **{"scores": F32, "pages": "i32", **COUNT},
        },
        {"PAGE": 128, "TILES": 16},
    ),
    "attention": ("hopper_attention", "attend", ONE_PART, LISTS | {"PARTS": 1}),
    "attention, parts": ("hopper_attention", "attend", PARTS, LISTS | {"PARTS": 10}),
    "experts, first product": (
        "hopper_experts",
        "stream",
        STREAM | {"out": BF16},
        {
            **{"ROWS": 4608, "DIMS": 5120, "FAN": 6, "GATED": True},
            **{"FP8": True, "N": 8, "STAGES": 2},
        },
    ),
    "experts, second product": (
        "hopper_experts",
        "stream",
        STREAM | {"out": F32},
        {
            **{"ROWS": 5120, "DIMS": 2304, "FAN": 1, "GATED": False},
            **{"FP8": True, "N": 16, "STAGES": 2},
        },
    ),
}

SCRIPT = """
import importlib, sys, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
module, name, types, values, chip, warps = eval(sys.argv[1])
kernel = getattr(importlib.import_module("kernels." + module), name)
signature = {arg: types.get(arg, "constexpr") for arg in kernel.arg_names}
aligned = {
    (place,): [["tt.divisibility", 16]]
    for place, type_ in enumerate(signature.values())
    if type_.startswith("*")
}
kind = ASTSource
if type(kernel).__name__ == "GluonJITFunction":
    from triton.experimental.gluon._runtime import GluonASTSource as kind
source = kind(kernel, signature=signature, constexprs=values, attrs=aligned)
options = {"num_warps": warps, "num_stages": 2}
done = triton.compile(source, target=GPUTarget("cuda", chip, 32), options=options)
print(len(done.asm["cubin"]), done.metadata.shared)
"""
WITH_TRITON_37 = tuple(map(int, version("triton").split(".")[:2])) >= (3, 7)
MOST_SHARED = 227 << 10  # bytes of shared memory that a block may have


@pytest.mark.parametrize("chip", [90, 100])
@pytest.mark.parametrize("name", CASES)
def test_compiles_to_machine_code(name: str, chip: int) -> None:
    if name == "experts, first product" and chip == 100 and not WITH_TRITON_37:
        pytest.skip("Triton 3.6 fails on two accumulators of a kernel for Blackwell")
    compile_for(chip, CASES[name], warps=8)


@pytest.mark.parametrize("name", HOPPER_CASES)
def test_a_kernel_for_hopper_compiles_for_it(name: str) -> None:
    # their layouts name every warp
    compile_for(90, HOPPER_CASES[name], warps=8 if name.startswith("attention") else 4)


def compile_for(chip: int, case: Case, *, warps: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, repr((*case, chip, warps))],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    size, shared = map(int, done.stdout.split())
    assert size > 1000
    assert shared <= MOST_SHARED
