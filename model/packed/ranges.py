"""Names for parts of a forward in a profiler's trace; they cost nothing while nobody records."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch.autograd import profiler

_UNNAMED: AbstractContextManager[None] = nullcontext()


def named(name: str) -> AbstractContextManager[object]:
    """A range of that name in torch's trace, and in NVTX where torch emits it."""
    if not profiler._is_profiler_enabled:
        return _UNNAMED
    return profiler.record_function(name)
