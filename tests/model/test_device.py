"""The forward runs where its weights are: on a GPU that is only pretended here.

Fake tensors have a device and a shape but no values: an op that mixes devices raises as it would
on a real one, and so does the host when it asks for a value, which on a GPU would be a wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from model.batch import Chunk, ForwardBatch, build_batch
from model.dense_cache import DenseCache
from model.options import ModelOptions
from model.state import state_fields
from model.transformer import Transformer
from model.weights import Weights, random_weights
from tests.model.cases import NARROW, Case

GPU = torch.device("lazy", 0)  # one that any build of torch lets one pretend
FEW_LAYERS = {
    "num_hidden_layers": 5,
    "compress_ratios": [0, 2, 1, 1, 1, 0],
    "kv_source_layer_ids": [1, 2],
    "index_source_layer_ids": [1, 2, 4],
    "candidate_source_layer_id": 2,
    "engram_layer_ids": [1],
    "engram_num_embeddings": [3144],
    "num_nextn_predict_layers": 1,
    "dspark_target_layer_ids": [3, 4],
    "dspark_block_size": 3,
    "hc_sinkhorn_iters": 2,
}
EVERYTHING = Case(
    "everything",
    {**NARROW, **FEW_LAYERS},
    ModelOptions(activations="fp8", wo_a="fp8", truncation="compact"),
    keep=21,
    images=(7, 40),
    embedded=True,
)


@dataclass(frozen=True)
class Elsewhere:
    """Weights on the pretended GPU; gradients are wanted of all."""

    weights: Weights

    def __getitem__(self, name: str) -> Tensor:
        return self.weights[name].to(GPU).requires_grad_()

    def table_rows(self, name: str, rows: Tensor) -> Tensor:
        assert rows.is_cpu
        return self.weights.table_rows(name, rows).to(GPU).requires_grad_()


@contextmanager
def pretending() -> Iterator[None]:
    """The host may wait once a layer: for how many rows the busiest expert has."""
    real = Tensor.numpy

    def numpy(tensor: Tensor) -> object:
        with unset_fake_temporarily():
            return real(tensor)

    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        patch.object(Tensor, "numpy", numpy),
        patch("kernels.ops.expert_mlp.most", lambda counts_E: 100),
    ):
        yield


def batch(case: Case, start: int, count: int) -> ForwardBatch:
    embeddings = case.embeddings
    assert embeddings is not None
    given = torch.from_numpy(embeddings[start : start + count]).float()
    chunks = [
        Chunk(case.prompt, start, count, case.window_start, embeddings=given),
        Chunk(case.prompt, start, count - 3, case.window_start),
    ]
    return build_batch(chunks, image_token_id=case.spec.image_token_id, ngram=4)


def test_all_of_a_forward_is_on_the_device_of_the_weights() -> None:
    case = EVERYTHING
    weights = Elsewhere(random_weights(case.spec, 1))
    prompts, next_rows = batch(case, 0, 35), batch(case, 35, 5)
    with pretending():
        model = Transformer(case.spec, weights, case.options)
        cache = DenseCache(state_fields(case.spec), 2, positions=64)
        model.forward(prompts, cache)
        logits = model.forward(next_rows, cache)
        drafts = model.draft([5, 6], [40, 37], cache)
        torch.autograd.backward(logits.sum() + drafts.logits.sum())
    assert logits.device == drafts.tokens.device == GPU
    assert all(rows.device == GPU for rows in cache.rows().values())
