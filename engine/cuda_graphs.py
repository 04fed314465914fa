"""Captures steps as CUDA graphs that share one pool of memory, since only one plays at a time."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, suppress

import torch

from engine.graphs import Graph, Step
from model.packed.rows import Shape

Rehearsal = Callable[[Shape], AbstractContextManager[None]]
"""Within it, a step of that shape reads and writes nothing that anybody needs."""


class CudaCapture:
    """engine.graphs.Capture; graphs play on the stream that is current then."""

    def __init__(self, step: Step, rehearsal: Rehearsal, device: torch.device) -> None:
        self._step, self._rehearsal, self._device = step, rehearsal, device
        with torch.cuda.device(device):
            self._pool = torch.cuda.graph_pool_handle()
            # the default stream cannot be captured
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __call__(self, shape: Shape) -> Graph:
        """Raises RuntimeError, torch's own of CUDA."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._device), self._rehearsal(shape):
            before = torch.cuda.mem_get_info()[0]
            self._step(shape)  # compiles kernels and takes libraries' workspaces: no graph can
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                # other threads move request state meanwhile, and may allocate and synchronise
                graph.capture_begin(self._pool, capture_error_mode="thread_local")
                try:
                    self._step(shape)
                except BaseException:
                    with suppress(RuntimeError):
                        graph.capture_end()
                    raise
                graph.capture_end()
            torch.cuda.current_stream().wait_stream(self._stream)
            nbytes = max(0, before - torch.cuda.mem_get_info()[0])
        return Graph(graph.replay, nbytes)
