"""Compile the push kernel for the real model's rows, down to machine code; needs no GPU.

python -m tests.kernels.compiled_push CAPABILITY
"""

from __future__ import annotations

import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.ops.kv_push import _kv_push, kinds
from kernels.push_table import PARTS, row_formats

formats = row_formats([288, 68, 528, 4096])
arguments = {"table": "*i64", "pieces": "i32", "factors": "*i64"}
signature = {**arguments, "digests": "*i64", "done": "*i64"}
for copy, hashed in ((True, True), (False, True)):
    constants = {
        "FORMATS": len(formats), "KINDS": kinds(formats), "COPY": copy, "HASH": hashed,
    }  # fmt: skip
    source = ASTSource(
        fn=_kv_push,
        signature={**signature, **dict.fromkeys(constants, "constexpr")},
        constexprs=constants,
    )
    target = GPUTarget("cuda", int(sys.argv[1]), 32)
    compiled = triton.compile(source, target=target, options={"num_warps": PARTS})
    ptx = compiled.asm["ptx"]
    assert compiled.asm["cubin"]
    assert "atom.global.sys.release" in ptx or "atom.sys.release" in ptx or ".release.sys" in ptx
    if copy:  # sixteen bytes a lane, both ways
        assert "st.global.v4.b32" in ptx
        assert "ld.global.v4.b32" in ptx
