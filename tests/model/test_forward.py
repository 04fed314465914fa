"""What a forward accepts and refuses, truncation, gradients, and the seam of the experts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.ops.route import Routed
from model.batch import Chunk, ForwardBatch, build_batch
from model.dense_cache import DenseCache
from model.moe import LocalExperts
from model.options import ModelOptions
from model.spec import ModelSpec
from model.state import state_fields
from model.transformer import Transformer
from model.weight_source import WeightSource
from model.weights import random_weights
from tests.model.cases import BY_NAME, OTHER_LAYERS, Case
from tests.model.running import PackedRows, Request, build

SPEC = BY_NAME["micro"].spec


def batch(*chunks: Chunk) -> ForwardBatch:
    return build_batch(chunks, image_token_id=SPEC.image_token_id, ngram=4)


def test_masked_and_dropped_rows_leave_the_kept_ones_alike() -> None:
    mask = replace(BY_NAME["compact"], name="mask", images=())
    compact = replace(mask, name="compact")
    caches = [PackedRows(SPEC), PackedRows(SPEC)]
    found = [
        Request.of(build(case), case, cache).feed(20, 18, 10)
        for case, cache in zip((mask, compact), caches, strict=True)
    ]
    assert torch.equal(*found)
    assert caches[0].pieces(mask.length) == caches[1].pieces(mask.length)


def test_below_the_cut_nothing_is_kept_but_global_rows() -> None:
    """Layers after the cut have no window rows before the start; earlier layers have them all."""
    case = BY_NAME["short_keep"]
    cache = PackedRows(SPEC)
    Request.of(build(case), case, cache).feed(30, 18)
    held = {layer: sorted(rows) for (field, layer), rows in cache.rows.items() if field == "window"}
    assert held[SPEC.cut_layer + 1] == [45, 46, 47]
    assert held[SPEC.cut_layer - 1][-16:] == list(range(32, 48))
    assert sorted(cache.rows["compressed_r1", SPEC.cut_layer]) == list(range(48))


def test_window_starts_are_refused_where_truncation_is_off() -> None:
    cache = DenseCache(state_fields(SPEC), 1)
    with pytest.raises(ValueError, match="truncation is off"):
        build(BY_NAME["micro"]).forward(batch(Chunk([5, 6, 7], 0, 3, window_start=2)), cache)


def test_logits_of_dropped_rows_are_refused() -> None:
    cache = DenseCache(state_fields(SPEC), 1)
    chunk = Chunk([5, 6, 7], 0, 2, window_start=2)
    with pytest.raises(ValueError, match="below their request's window start"):
        build(BY_NAME["compact"]).forward(batch(chunk), cache)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"engram_layer_ids": [0, 6]}, "Engram follows it"),
        ({"dspark_target_layer_ids": [4, 7]}, "later layers look before it"),
    ],
)
def test_a_layout_that_cannot_be_truncated_is_refused(
    changes: dict[str, list[int]], problem: str
) -> None:
    spec = Case("x", {**OTHER_LAYERS, **changes}).spec
    with pytest.raises(ValueError, match=problem):
        Transformer(spec, random_weights(spec, 1), ModelOptions(truncation="mask"))


def test_options_name_what_they_allow() -> None:
    with pytest.raises(ValueError, match=r"activations is 'fp4'.*'exact', 'fp8'"):
        ModelOptions(activations="fp4")  # type: ignore[arg-type]


def test_an_image_id_without_embeddings_stays_a_token_beside_a_chunk_with_them() -> None:
    """A generated image id is an image position that has no picture."""
    model, image = build(BY_NAME["micro"]), SPEC.image_token_id
    plain = Chunk([5, image, 7], 0, 3, logits="all")
    pictured = Chunk([5, image, 7], 0, 3, logits="all", embeddings=torch.randn(3, SPEC.hidden_size))
    fields = state_fields(SPEC)
    with torch.no_grad():
        alone = model.forward(batch(plain), DenseCache(fields, 1))
        together = model.forward(batch(plain, pictured), DenseCache(fields, 2))
    assert torch.equal(together[:3], alone)
    assert not torch.equal(together[3:], alone)


def test_gradients_pass_through_the_cache() -> None:
    """The second chunk's logits depend on the first chunk's embeddings through cached rows only."""
    model, image = build(BY_NAME["micro"]), SPEC.image_token_id
    tokens, cache = [image] * 40, DenseCache(state_fields(SPEC), 1)
    embeddings = torch.randn(40, SPEC.hidden_size, requires_grad=True)
    for start, count in ((0, 33), (33, 7)):
        part = embeddings[start : start + count]
        logits = model.forward(batch(Chunk(tokens, start, count, embeddings=part)), cache)
    (gradient,) = torch.autograd.grad(logits.square().sum(), embeddings)
    assert gradient.isfinite().all()
    assert (gradient.abs().sum(1) > 0).all()


def test_a_gradient_step_lowers_a_loss() -> None:
    """Rounding passes gradients straight through, so they point roughly downhill."""
    model, image = build(BY_NAME["micro"]), SPEC.image_token_id
    embeddings = torch.randn(12, SPEC.hidden_size, requires_grad=True)

    def loss(values: Tensor) -> Tensor:
        cache = DenseCache(state_fields(SPEC), 1)
        logits = model.forward(batch(Chunk([image] * 12, 0, 12, embeddings=values)), cache)
        return -torch.log_softmax(logits[0], 0)[17]

    before = loss(embeddings)
    (gradient,) = torch.autograd.grad(before, embeddings)
    with torch.no_grad():
        after = loss(embeddings - 0.5 * gradient / gradient.norm())
    assert float(after) < float(before.detach())


def test_routed_experts_may_be_anywhere() -> None:
    """An exchange takes the place of local experts: it sees every row once and may split them."""
    seen: list[int] = []

    class Halves:
        """Rows that go to two places; each computes its part of the batch."""

        def __init__(
            self,
            weights: WeightSource,
            prefix: str,
            count: int,
            spec: ModelSpec,
            options: ModelOptions,
        ) -> None:
            self._local = LocalExperts(weights, prefix, count, spec, options)

        def __call__(self, x_TD: Tensor, routed: Routed, count: int) -> Tensor:
            seen.append(count)
            half = 16
            first = self._local(x_TD[:half], Routed(*(part[:half] for part in routed)), half)
            rest = Routed(*(part[half:] for part in routed))
            return torch.cat([first, self._local(x_TD[half:], rest, count - half)])

    weights = random_weights(SPEC, 1)
    chunk = batch(Chunk(BY_NAME["micro"].prompt, 0, 30))
    with torch.no_grad():
        local = build(BY_NAME["micro"]).forward(chunk, DenseCache(state_fields(SPEC), 1))
        model = Transformer(SPEC, weights, make_experts=Halves)
        split = model.forward(chunk, DenseCache(state_fields(SPEC), 1))
    assert torch.equal(local, split)
    assert seen == [30] * SPEC.num_hidden_layers
