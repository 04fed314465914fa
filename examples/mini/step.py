"""One step's losses and gradients, launched kernel by kernel or replayed as a CUDA graph.

A graph takes the processor's work out of a step: ten thousand launches become one. It is captured
once for each kind of step, after that kind has run a few times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from examples.mini.batch import PackedBatch
from examples.mini.fused import fuse
from examples.mini.network import Network, Settings
from examples.mini.parameters import Parameters, is_draft

_RUNS_BEFORE_CAPTURE = 2


@dataclass(frozen=True)
class Kind:
    """What differs between steps, besides their batch."""

    length: int
    sparse: bool
    quantised: bool
    sampled: int


@dataclass(frozen=True)
class Learned:
    told: Mapping[str, Tensor]
    loads_LE: Tensor  # positions of each expert
    grads: Sequence[Tensor | None]  # of the trained stacks, in their order


class Stepper:
    def __init__(
        self,
        network: Network,
        parameters: Parameters,
        trained: Sequence[str],
        dtype: torch.dtype,
        *,
        capture: bool,
    ) -> None:
        self._network, self._parameters, self._trained = network, parameters, trained
        self._dtype, self._capture = dtype, capture
        self._main = [key for key in parameters.stacks if not is_draft(key)]
        self._runs: dict[Kind, int] = {}
        self._captured: dict[Kind, _Captured] = {}
        self._pool = torch.cuda.graph_pool_handle() if capture else None

    def __call__(self, batch: PackedBatch, kind: Kind, at_BK: Tensor | None) -> Learned:
        """`at_BK`: positions that teach the indexer, if any do."""
        if captured := self._captured.get(kind):
            return captured.replay(batch, at_BK)
        self._runs[kind] = self._runs.get(kind, 0) + 1
        if not self._capture or self._runs[kind] <= _RUNS_BEFORE_CAPTURE:
            return self._learn(batch, kind, at_BK)
        self._captured[kind] = self._record(batch, kind, at_BK)
        return self._captured[kind].replay(batch, at_BK)

    def _record(self, batch: PackedBatch, kind: Kind, at_BK: Tensor | None) -> _Captured:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        held = PackedBatch(*(tensor.clone() for tensor in batch.tensors()))
        at = None if at_BK is None else at_BK.clone()
        with torch.cuda.graph(graph, pool=self._pool):
            learned = self._learn(held, kind, at)
        return _Captured(graph, held, at, learned)

    def _learn(self, batch: PackedBatch, kind: Kind, at_BK: Tensor | None) -> Learned:
        w = self._parameters.prepared(self._main, self._dtype, quantised=kind.quantised)
        settings = Settings(self._dtype, kind.sparse)
        outcome = self._network(w, batch, settings, at_BK)
        targets, weights = batch.ids_BS.roll(-1, 1).flatten(), batch.weights_BS.flatten()
        each = cross_entropy(outcome.logits_TV, targets)
        loss = (each * weights).sum() / weights.sum().clamp(min=1)
        index_loss = sum(outcome.index_losses, torch.zeros((), device=loss.device))
        values = [self._parameters.values[key] for key in self._trained]
        grads = torch.autograd.grad(loss + index_loss, values, allow_unused=True)
        with torch.no_grad():
            text, answers = (weights == 0.5).float(), (weights == 1.0).float()
            right = (outcome.logits_TV.argmax(-1) == targets).float()
            loads = torch.stack(list(outcome.loads.values())).float()
            told = {
                "loss": loss.detach(),
                "text": (each * text).sum() / text.sum().clamp(min=1),
                "answers": (each * answers).sum() / answers.sum().clamp(min=1),
                "right": (right * answers).sum() / answers.sum().clamp(min=1),
                "index": torch.as_tensor(index_loss).detach(),
                "load": (loads.amax(1) / loads.mean(1)).mean(),
            }
        return Learned(told, loads, grads)


@dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    batch: PackedBatch
    at_BK: Tensor | None
    learned: Learned

    def replay(self, batch: PackedBatch, at_BK: Tensor | None) -> Learned:
        for mine, given in zip(self.batch.tensors(), batch.tensors(), strict=True):
            mine.copy_(given)
        if self.at_BK is not None and at_BK is not None:
            self.at_BK.copy_(at_BK)
        self.graph.replay()
        return self.learned


@fuse
def cross_entropy(logits_TV: Tensor, targets_T: Tensor) -> Tensor:
    return F.cross_entropy(logits_TV.float(), targets_T, reduction="none")
