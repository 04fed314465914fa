"""The trained tensors: those of a checkpoint, stacked over layers and experts.

Which tensors there are follows from the config (model/catalogue.py). A stack holds one kind of
weight of all layers: rounding and updating it costs a few launches. Knows nothing of training.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from examples.mini.quantise import rounded
from model.catalogue import Kind, catalogue
from model.spec import ModelSpec

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True)
class Stack:
    """Weights of one kind: `members` are their names in a checkpoint, in order."""

    kind: Kind
    shape: tuple[int, ...]  # of one
    members: tuple[str, ...]

    @property
    def experts(self) -> int:
        """Experts of each layer, 1 for what is not an expert's."""
        layers = {name.split(".")[1] for name in self.members}
        return len(self.members) // len(layers) if ".experts." in self.members[0] else 1


def stacks(spec: ModelSpec) -> dict[str, Stack]:
    """By name with `*` for each number; draft stages (mtp) apart from layers."""
    found: dict[str, list[str]] = {}
    tensors = catalogue(spec, vision=False)
    for name in tensors:
        alone = name.endswith("engram.embed")  # tables differ in size
        found.setdefault(name if alone else _NUMBER.sub("*", name), []).append(name)
    return {
        key: Stack(tensors[names[0]].kind, tensors[names[0]].shape, tuple(names))
        for key, names in found.items()
    }


def is_draft(key: str) -> bool:
    """Whether a weight belongs to the drafter, which is trained after the rest."""
    return key.startswith("mtp.")


class Parameters:
    def __init__(self, spec: ModelSpec, values: Mapping[str, Tensor]) -> None:
        """`values` float32 [members, *shape] by stack."""
        self.stacks = stacks(spec)
        self.values = {key: values[key] for key in self.stacks}

    @classmethod
    def drawn(cls, spec: ModelSpec, seed: int) -> Parameters:
        """Where training starts."""
        random = torch.Generator().manual_seed(seed)
        return cls(spec, {key: _start(key, one, random) for key, one in stacks(spec).items()})

    def to(self, device: torch.device) -> None:
        for key, value in self.values.items():
            self.values[key] = value.to(device)

    def prepared(
        self, keys: Iterable[str], dtype: torch.dtype, *, quantised: bool
    ) -> dict[str, Tensor]:
        """Weights by their names in a checkpoint, as the network computes with them.

        Experts of a layer come as one tensor, named without their number. Vectors and tables stay
        in float32.
        """
        ready: dict[str, Tensor] = {}
        for key in keys:
            stack = self.stacks[key]
            value = rounded(self.values[key], stack.kind) if quantised else self.values[key]
            is_matrix = key in _MATRICES or key.endswith(_MATRIX_ENDS)
            if is_matrix or stack.kind in ("fp8", "fp4"):
                value = value.to(dtype)
            names = stack.members
            if stack.experts > 1:
                value = value.view(-1, stack.experts, *stack.shape)
                names = tuple(_expert_free(name) for name in names[:: stack.experts])
            ready |= zip(names, value.unbind(0), strict=True)
        return ready

    def unstacked(self) -> dict[str, Tensor]:
        """Float32 values by their names in a checkpoint."""
        return {
            name: value
            for key, stack in self.stacks.items()
            for name, value in zip(stack.members, self.values[key].detach(), strict=True)
        }


_MATRICES = (
    "embed.weight",
    "head.weight",
    "layers.*.attn.compressor.wkv.weight",
    "layers.*.attn.compressor.wgate.weight",
    "layers.*.attn.indexer.wk.weight",
    "layers.*.attn.indexer.weights_proj.weight",
)
_MATRIX_ENDS = ("ffn.gate.weight", "hc_attn_fn", "hc_ffn_fn")
"""Besides those of FP8 and FP4: matrices that are multiplied in the network's precision."""


def _expert_free(name: str) -> str:
    return re.sub(r"\.experts\.\d+\.", ".experts.", name)


def _start(key: str, stack: Stack, random: torch.Generator) -> Tensor:
    """Norms at one; what adds to the streams small; streams kept apart by hyper-connections."""
    shape = (len(stack.members), *stack.shape)
    last = key.rsplit(".", 1)[-1]
    if "norm" in key or last in ("q_weight", "k_weight"):
        return torch.ones(shape)
    if last in ("bias", "bias_vl", "attn_sink"):
        return torch.zeros(shape)
    if last.endswith("_scale"):
        return torch.full(shape, 0.5)
    if last.endswith("_base"):
        return _mixing_base(shape)
    noise = torch.randn(shape, generator=random)
    if last.endswith("_fn"):
        return noise * (0.3 / math.sqrt(shape[-1]))
    if key.endswith(("embed.weight", "engram.embed")):
        return noise * 0.5
    scale = 1 / math.sqrt(shape[-1])
    if last in ("wo_b", "w2") or key == "head.weight" or "markov_head.head" in key:
        scale *= 0.3
    return noise * scale


def _mixing_base(shape: tuple[int, ...]) -> Tensor:
    """A sublayer reads the mean of the streams, adds to all of them, and hardly mixes them."""
    count = math.isqrt(shape[-1] + 1) - 1  # n of 2 n + n * n
    reads = torch.full((count,), -math.log(max(count - 1, 1e-3)) if count > 1 else 0.0)
    mixes = 3.0 * torch.eye(count).flatten()
    adds = torch.linspace(-0.5, 0.5, count)  # of different strength: else they stay copies
    return torch.cat([reads, adds, mixes]).expand(shape).clone()
