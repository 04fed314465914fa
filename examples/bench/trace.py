"""A trace of one step for Chrome or Perfetto, in which each op is named with its backend.

`top_rows [cpu]` is the form for CPUs, `rms_norm [torch]` one in torch's own ops, `[triton]` a
kernel of ours; what a GPU runs stands beside them under its own name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from inspect import isfunction
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from kernels.accelerator import Accelerator
from kernels.op import Op

OPS, CALLERS = "kernels.ops.", ("model.", "engine.", "kv_transfer.")


def traced(step: Callable[[], object], accelerator: Accelerator, path: Path) -> None:
    """One step, written to `path`."""
    activities = [ProfilerActivity.CPU]
    if accelerator.kind == "nvidia":
        activities.append(ProfilerActivity.CUDA)
    path.parent.mkdir(parents=True, exist_ok=True)
    with named_ops():
        step()  # what a first call alone costs is no part of the trace
        with profile(activities=activities) as found:
            step()
            accelerator.synchronize()
    found.export_chrome_trace(str(path))


@contextmanager
def named_ops() -> Iterator[None]:
    """Inside, each op that a model calls is an event of its own. Costs nothing outside."""
    with ExitStack() as undo:
        for name, module in list(sys.modules.items()):
            for attribute, op in list(vars(module).items()) if name.startswith(CALLERS) else ():
                if _is_op(op):
                    setattr(module, attribute, _named(op))
                    undo.callback(setattr, module, attribute, op)
        yield


def _is_op(value: object) -> bool:
    if isfunction(value):
        return value.__module__.startswith(OPS)
    return isinstance(value, Op)


def _named(op: Callable[..., Any]) -> Callable[..., Any]:
    name = op.name if isinstance(op, Op) else op.__name__
    call = op.__call__ if isinstance(op, Op) else op

    @wraps(call)
    def named(*args: Any, **kwargs: Any) -> Any:
        with record_function(f"{name} [{_backend(op, args[0] if args else None)}]"):
            return op(*args, **kwargs)

    return named


def _backend(op: Callable[..., Any], first: object) -> str:
    if isinstance(op, Op):
        return op.backend(first)
    on_gpu = isinstance(first, Tensor) and first.is_cuda
    return "triton" if on_gpu and hasattr(sys.modules[op.__module__], "triton") else "torch"
