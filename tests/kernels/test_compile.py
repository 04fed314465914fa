"""Every kernel compiles for the GPUs we serve on, without one: what an interpreter lets pass."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

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

CASES: dict[str, tuple[str, str, dict[str, str], dict[str, Any]]] = {
    "attention": ("packed_attention", "_attend", ONE_PART, REAL | {"PARTS": 1, "TILE": 64}),
    "attention, parts": ("packed_attention", "_attend", PARTS, REAL | {"PARTS": 5, "TILE": 64}),
    "attention, float32": ("packed_attention", "_attend", FLOAT32, TINY | {"PARTS": 2, "TILE": 16}),
    "merge": (
        "packed_attention",
        "_merge",
        {**dict.fromkeys(("parts", "most", "sums"), "*fp32"), "out": "*bf16", "heads": "i32"},
        {"PARTS": 5, "D": 512},
    ),
    "experts, first product": (
        "packed_experts",
        "_multiply",
        MULTIPLY | {"out": "*bf16"},
        {"ROWS": 4608, "DIMS": 5120, "FAN": 6, "GATED": True, "OUT": 64, "M": 16, "PAIRS": 128},
    ),
    "experts, second product": (
        "packed_experts",
        "_multiply",
        MULTIPLY | {"out": "*fp32"},
        {"ROWS": 5120, "DIMS": 2304, "FAN": 1, "GATED": False, "OUT": 128, "M": 64, "PAIRS": 64},
    ),
}

SCRIPT = """
import importlib, sys, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
module, name, types, values, chip = eval(sys.argv[1])
kernel = getattr(importlib.import_module("kernels.ops." + module), name)
signature = {arg: types.get(arg, "constexpr") for arg in kernel.arg_names}
aligned = {
    (place,): [["tt.divisibility", 16]]
    for place, kind in enumerate(signature.values())
    if kind.startswith("*")
}
source = ASTSource(kernel, signature=signature, constexprs=values, attrs=aligned)
options = {"num_warps": 8, "num_stages": 2}
done = triton.compile(source, target=GPUTarget("cuda", chip, 32), options=options)
print(len(done.asm["cubin"]), done.metadata.shared)
"""
MOST_SHARED = 227 << 10  # bytes of shared memory that a block may have


@pytest.mark.parametrize("chip", [90, 100])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_compiles_to_machine_code(
    case: tuple[str, str, dict[str, str], dict[str, Any]], chip: int
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, repr((*case, chip))],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    size, shared = map(int, done.stdout.split())
    assert size > 1000
    assert shared <= MOST_SHARED
