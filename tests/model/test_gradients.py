"""Gradients of the forward that serves: they reach every weight that training can move, and agree
with finite differences.

Rounding passes a gradient straight through: that of the forward in which every rounding error is a
constant. So the finite differences here repeat the errors of the first forward, and its picked
rows, since scores of rounded values are often equal.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from kernels import formats
from kernels.ops.top_rows import top_rows
from model.batch import Chunk, build_batch
from model.dense_cache import DenseCache
from model.options import ModelOptions
from model.state import state_fields
from model.transformer import Transformer
from model.weights import random_weights
from tests.model.cases import BY_NAME
from tests.model.running import float64

CASE = BY_NAME["micro"]
# These only choose: experts, rows. What is chosen has no gradient.
CHOOSING = re.compile(r".*(\.gate\.bias(_vl)?|\.indexer\..*)")
IDLE = re.compile(r"mtp\..*\.experts\.\d+\..*")  # a draft's few rows need not choose each
Constants = list[Tensor]


@dataclass(frozen=True)
class Leaves:
    """Weights by name, each a leaf; `shift` adds a multiple of some directions to them."""

    values: dict[str, Tensor]
    directions: dict[str, Tensor]
    shift: float = 0.0

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.directions:
            return self.values[name]
        return self.values[name] + self.shift * self.directions[name]

    def table_rows(self, name: str, rows: Tensor) -> Tensor:
        return self[name][rows]


def leaves() -> dict[str, Tensor]:
    weights = random_weights(CASE.spec, CASE.seed)
    found = {}
    for name in weights.names():
        if name.endswith("engram.embed"):
            every = torch.arange(len(weights.stored(name).tensor))
            values = weights.table_rows(name, every)
        else:
            values = weights[name]
        found[name] = values.double().requires_grad_()
    return found


def loss(weights: Leaves, options: ModelOptions) -> Tensor:
    """Of two chunks and a draft: what the second and the draft see of the first is cached."""
    model = Transformer(CASE.spec, weights, options)
    cache = DenseCache(state_fields(CASE.spec), 1, positions=64)
    logits = []
    for start, count in ((0, 33), (33, 7)):
        chunk = Chunk(CASE.prompt, start, count, logits="all")
        batch = build_batch([chunk], image_token_id=CASE.spec.image_token_id, ngram=4)
        logits.append(model.forward(batch, cache))
    drafts = model.draft([17], [40], cache, choose=lambda logits, place: torch.tensor([7 + place]))
    scores = [*torch.cat(logits).log_softmax(1), *drafts.logits[0].log_softmax(1)]
    noise = torch.randn(
        len(scores), CASE.spec.vocab_size, generator=torch.Generator().manual_seed(1)
    )
    return (torch.stack(scores) * noise).mean() + drafts.confidence.square().mean()


@contextmanager
def remembered(constants: Constants) -> Iterator[None]:
    """Rounding errors and picked rows go into `constants`."""
    right = formats._rounded

    def rounded(values: Tensor, row_format: str) -> Tensor:
        found = right(values, row_format)
        constants.append(found - values)
        return found

    def picked(scores: Tensor, count: int) -> Tensor:
        constants.append(top_rows(scores, count))
        return constants[-1]

    with patch.object(formats, "_rounded", rounded), patch("model.indexer.top_rows", picked):
        yield


@contextmanager
def repeated(constants: Constants) -> Iterator[None]:
    ahead = iter(constants)

    def rounded(values: Tensor, row_format: str) -> Tensor:
        return values + next(ahead)

    def picked(scores: Tensor, count: int) -> Tensor:
        return next(ahead)

    with patch.object(formats, "_rounded", rounded), patch("model.indexer.top_rows", picked):
        yield


@pytest.mark.parametrize("options", [ModelOptions(), ModelOptions("fp8", "fp8")], ids=str)
def test_gradients_reach_every_weight_and_are_the_slopes_of_the_forward(
    options: ModelOptions,
) -> None:
    constants: Constants = []
    with float64(), remembered(constants):
        values = leaves()
        names = [name for name in values if not CHOOSING.fullmatch(name)]
        found = torch.autograd.grad(
            loss(Leaves(values, {}), options), [values[name] for name in names]
        )
    gradients = dict(zip(names, found, strict=True))
    for name, gradient in gradients.items():
        assert gradient.isfinite().all(), name
        assert gradient.any() or IDLE.fullmatch(name), name
    for kind, pattern in KINDS.items():
        chosen = {name: direction(values[name]) for name in names if re.fullmatch(pattern, name)}
        slope = sum(float((gradients[name] * toward).sum()) for name, toward in chosen.items())
        ends = []
        for shift in (1e-6, -1e-6):
            with float64(), torch.no_grad(), repeated(constants):
                ends.append(float(loss(Leaves(values, chosen, shift), options)))
        assert (ends[0] - ends[1]) / 2e-6 == pytest.approx(slope, rel=1e-4), kind


KINDS = {
    "everything": r".*",
    "embeddings and head": r"(embed|head)\.weight",
    "norms": r".*norm.*",
    "queries and outputs": r".*(wq_a|wq_b|wo_a|wo_b)",
    "keys": r".*\.wkv",
    "sinks": r".*attn_sink",
    "compressors": r".*compressor.*",
    "routers": r".*gate\.weight",
    "experts": r".*experts.*",
    "hyper-connections": r".*hc_.*",
    "memory": r".*engram.*",
    "drafter": r"mtp.*",
}


def direction(values: Tensor) -> Tensor:
    """Random, about as large as the values."""
    noise = torch.randn(values.shape, generator=torch.Generator().manual_seed(values.numel()))
    return noise.to(values) * values.detach().square().mean().sqrt()
