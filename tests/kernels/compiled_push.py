"""Compile the push kernel for the real model's rows, down to machine code; needs no GPU.

python -m tests.kernels.compiled_push CAPABILITY
"""

from __future__ import annotations

import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.ops.kv_push import _WARPS, _factors, _kv_push
from kernels.push_table import row_formats

_, forms = _factors(row_formats([288, 68, 528, 4096]), torch.device("cpu"))
arguments = {"table": "*i64", "columns": "i32", "pieces": "i32", "factors": "*i64"}
signature = {**arguments, "digests": "*i64", "done": "*i64"}
for copy, hashed in ((True, True), (False, True)):
    constants = {"FORMATS": forms, "COPY": copy, "HASH": hashed}
    source = ASTSource(
        fn=_kv_push,
        signature={**signature, **dict.fromkeys(constants, "constexpr")},
        constexprs=constants,
    )
    target = GPUTarget("cuda", int(sys.argv[1]), 32)
    compiled = triton.compile(source, target=target, options={"num_warps": _WARPS})
    ptx = compiled.asm["ptx"]
    assert compiled.asm["cubin"]
    assert "atom.global.sys.release" in ptx or "atom.sys.release" in ptx or ".release.sys" in ptx
    if copy:  # sixteen bytes a lane, both ways
        assert "st.global.v4.b32" in ptx
        assert "ld.global.v4.b32" in ptx
