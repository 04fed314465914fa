"""A row gives the same bits alone and in any batch, whatever the chunks (promise P1 on CPU).

Whole prompts alone are compared with random schedules: any subset of the requests in a step, any
chunk sizes, prompts and decode rows mixed. Everything is compared bit for bit.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from model.batch import Chunk, build_batch
from model.dense_cache import DenseCache
from model.options import ModelOptions
from model.spec import ModelSpec
from model.state import state_fields
from model.transformer import Transformer
from model.weights import random_weights
from tests.model.cases import BY_NAME, TINY

LENGTHS = (1, 2, 7, 8, 33, 40, 61)
KEEP = 21  # > the window: no chunk border shows through the cut


@dataclass(frozen=True)
class Members:
    """Some requests of a cache as the requests of one batch."""

    cache: DenseCache
    members: Tensor

    def write(self, field: str, layer: int, requests: Tensor, rows: Tensor, values: Tensor) -> None:
        self.cache.write(field, layer, self.members[requests], rows, values)

    def read(self, field: str, layer: int, requests: Tensor, rows: Tensor) -> Tensor:
        return self.cache.read(field, layer, self.members[requests], rows)

    def rows_are_final(self, layer: int) -> None:
        self.cache.rows_are_final(layer)


class Prompts:
    """Several requests that a schedule advances in chunks; logits by request and position."""

    def __init__(self, model: Transformer, prompts: Sequence[Sequence[int]]) -> None:
        self.model, self.prompts = model, prompts
        self.cache = DenseCache(state_fields(model.spec), len(prompts))
        self.done = [0] * len(prompts)
        self.logits: dict[tuple[int, int], Tensor] = {}

    def advance(self, sizes: dict[int, int]) -> None:
        """One forward: so many rows of each request."""
        truncated = self.model.options.truncation != "off"
        chunks = [
            Chunk(
                self.prompts[request],
                self.done[request],
                size,
                window_start=max(0, len(self.prompts[request]) - KEEP) if truncated else 0,
                logits="all",
            )
            for request, size in sizes.items()
        ]
        spec = self.model.spec
        batch = build_batch(
            chunks, image_token_id=spec.image_token_id, ngram=spec.engram_max_ngram_size
        )
        kept = batch.positions_T >= batch.window_starts_R[batch.requests_T]
        batch = replace(batch, logit_rows=kept.nonzero().squeeze(1))
        members = torch.tensor(list(sizes))
        with torch.inference_mode():
            logits = self.model.forward(batch, Members(self.cache, members))
        for row, values in zip(batch.logit_rows.tolist(), logits, strict=True):
            request = int(members[batch.requests_T[row]])
            self.logits[request, int(batch.positions_T[row])] = values
        for request, size in sizes.items():
            self.done[request] += size

    def alone(self) -> Prompts:
        for request, prompt in enumerate(self.prompts):
            self.advance({request: len(prompt)})
        return self

    def scheduled(self, seed: int) -> Prompts:
        choose = random.Random(seed)
        while open_ := [r for r, ids in enumerate(self.prompts) if self.done[r] < len(ids)]:
            members = choose.sample(open_, choose.randint(1, len(open_)))
            limit = choose.choice((1, 1, 5, 90))
            left = {r: len(self.prompts[r]) - self.done[r] for r in members}
            self.advance({r: choose.randint(1, min(limit, left[r])) for r in sorted(members)})
        return self


def micro(name: str, options: ModelOptions) -> Transformer:
    spec = BY_NAME[name].spec
    return Transformer(spec, random_weights(spec, 3), options)


def tiny() -> Transformer:
    spec = ModelSpec.load(TINY.parent)
    return Transformer(spec, random_weights(spec, 3))


MODELS: dict[str, Callable[[], Transformer]] = {
    "tiny": tiny,
    "narrow, fp8": lambda: micro("narrow", ModelOptions(activations="fp8", wo_a="fp8")),
    "other sizes, truncated": lambda: micro("other_sizes", ModelOptions(truncation="compact")),
    "full window at the cut": lambda: micro(
        "micro", ModelOptions(truncation="compact", cut_window="full")
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_row_has_the_same_bits_in_any_batch(name: str) -> None:
    model = MODELS[name]()
    prompts = random_prompts(model.spec)
    alone = Prompts(model, prompts).alone()
    for seed in range(2):
        together = Prompts(model, prompts).scheduled(seed)
        assert together.logits.keys() == alone.logits.keys()
        for key, logits in alone.logits.items():
            assert torch.equal(together.logits[key], logits), (seed, key)
        ours = state_of(together)
        for (field, layer, request), rows in state_of(alone).items():
            found = ours[field, layer, request]
            assert torch.equal(found, rows), (seed, field, layer, request)


def state_of(prompts: Prompts) -> dict[tuple[str, int, int], Tensor]:
    """The rows that a continuation needs."""
    return {
        (field.name, layer, request): prompts.cache.rows()[field.name, layer][
            request, list(field.growth.rows(len(ids)))
        ]
        for field in state_fields(prompts.model.spec)
        for layer in field.layers
        for request, ids in enumerate(prompts.prompts)
    }


@pytest.mark.parametrize("name", ["tiny", "narrow, fp8"])
def test_a_draft_has_the_same_bits_in_any_batch(name: str) -> None:
    model = MODELS[name]()
    prompts = random_prompts(model.spec)
    cache = Prompts(model, prompts).alone().cache
    lengths = [len(prompt) for prompt in prompts]
    anchors = list(range(10, 10 + len(prompts)))
    with torch.inference_mode():
        together = model.draft(anchors, lengths, cache)
        for request, (anchor, length) in enumerate(zip(anchors, lengths, strict=True)):
            member = Members(cache, torch.tensor([request]))
            alone = model.draft([anchor], [length], member)
            assert torch.equal(alone.tokens[0], together.tokens[request])
            assert torch.equal(alone.logits[0], together.logits[request])
            assert torch.equal(alone.confidence[0], together.confidence[request])


def random_prompts(spec: ModelSpec) -> list[list[int]]:
    choose = random.Random(7)
    prompts = [[choose.randrange(3, spec.vocab_size - 4) for _ in range(n)] for n in LENGTHS]
    prompts[4][10] = prompts[4][20] = prompts[4][21] = spec.image_token_id
    return prompts
