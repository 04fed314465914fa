"""What is trained is what is served: rounding, storage, optimizer, and the network itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from examples.mini.batch import PackedBatch
from examples.mini.corpus import FOLDER
from examples.mini.export import restore
from examples.mini.network import Network, Settings
from examples.mini.optimizer import Muon, orthogonal
from examples.mini.parameters import Parameters
from examples.mini.quantise import rounded
from examples.mini.saved import load, save
from model.batch import Chunk, build_batch
from model.catalogue import Kind
from model.dense_cache import DenseCache
from model.load import load_model, token_map
from model.prompt import run_prompt
from model.spec import ModelSpec
from model.state import state_fields
from model.stored import decode, encode
from model.tokenizer import Tokenizer
from model.transformer import Transformer

LENGTH = 256  # more than the rows that an index picks: selection counts


@pytest.fixture(scope="module")
def served() -> Transformer:
    return load_model(FOLDER, weights="checkpoint")


@pytest.fixture(scope="module")
def shipped() -> Parameters:
    return restore(FOLDER)


def _batch(ids: torch.Tensor) -> PackedBatch:
    zeros = torch.zeros_like(ids)
    return PackedBatch(ids, zeros, zeros, torch.ones(ids.shape))


@torch.no_grad()
def test_the_training_network_computes_what_is_served(
    served: Transformer, shipped: Parameters
) -> None:
    text = "def area(width, height):\n    return width * height\n" * 12
    ids = torch.tensor([Tokenizer.load(FOLDER).encode(text)[:LENGTH]])
    cache = DenseCache(state_fields(served.spec), 1)
    expected = run_prompt(served, cache, ids[0].tolist())
    network = Network(served.spec, token_map(FOLDER, served.spec), torch.device("cpu"))
    w = shipped.prepared(shipped.stacks, torch.float32, quantised=True)
    found = network(w, _batch(ids), Settings()).logits_TV
    difference = (found - expected).abs().amax(1)
    assert difference[:32].max() < 1e-3
    # sums in another order now and then round a cached value to its other neighbour
    assert difference.median() < 1e-2
    assert (found.argmax(1) == expected.argmax(1)).float().mean() > 0.99
    dense = network(w, _batch(ids), Settings(sparse=False)).logits_TV
    first = served.spec.index_topk
    assert (dense[:first] - expected[:first]).abs().amax(1).median() < 1e-2


@torch.no_grad()
def test_packed_documents_do_not_see_each_other(shipped: Parameters) -> None:
    spec = ModelSpec.load(FOLDER)
    network = Network(spec, token_map(FOLDER, spec), torch.device("cpu"))
    w = shipped.prepared(shipped.stacks, torch.float32, quantised=True)
    ids = torch.randint(3, 2000, (1, 128), generator=torch.Generator().manual_seed(0))
    starts = torch.zeros_like(ids)
    starts[:, 64:] = 64
    other = ids.clone()
    other[:, :64] = ids[:, :64].flip(1)
    first, second = (
        network(w, PackedBatch(one, starts, starts, torch.ones(ids.shape)), Settings()).logits_TV
        for one in (ids, other)
    )
    assert torch.equal(first[64:], second[64:])
    assert not torch.equal(first[:64], second[:64])


def test_losses_reach_every_trained_weight() -> None:
    spec = ModelSpec.load(FOLDER)
    parameters = Parameters.drawn(spec, 1)
    keys = [key for key in parameters.stacks if key.startswith(("layers", "embed", "head", "norm"))]
    for key in keys:
        parameters.values[key].requires_grad_(True)
    network = Network(spec, token_map(FOLDER, spec), torch.device("cpu"))
    ids = torch.randint(3, 2000, (1, 128), generator=torch.Generator().manual_seed(0))
    batch = _batch(ids)
    w = parameters.prepared(keys, torch.float32, quantised=True)
    outcome = network(w, batch, Settings(sparse=False), batch.drawn(16))
    loss = outcome.logits_TV.logsumexp(-1).mean() + torch.stack(outcome.index_losses).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    left_out = {key for key in keys if parameters.values[key].grad is None}
    assert left_out == {"layers.*.ffn.gate.bias", "layers.*.ffn.gate.bias_vl"}


@pytest.mark.parametrize("kind", ["fp8", "fp4", "fp8_rows", "bf16", "f32"])
def test_training_rounds_a_weight_as_the_checkpoint_does(kind: Kind) -> None:
    weight = torch.randn(2, 64, 96, generator=torch.Generator().manual_seed(0))
    weight[0, :32, :32] *= 1e-3
    expected = torch.stack([decode(encode(one, kind), kind) for one in weight])
    values = weight.clone().requires_grad_(True)
    found = rounded(values, kind)
    assert torch.equal(found.detach(), expected)
    found.sum().backward()  # type: ignore[no-untyped-call]
    assert values.grad is not None
    assert torch.equal(values.grad, torch.ones_like(weight))


def test_saved_parameters_keep_their_first_bits(tmp_path: Path) -> None:
    spec = ModelSpec.load(FOLDER)
    drawn = Parameters.drawn(spec, 2)
    save(drawn, tmp_path, 0.25)
    again, place = load(spec, tmp_path)
    assert place == 0.25
    for key, value in drawn.values.items():
        assert torch.allclose(again.values[key], value, rtol=2**-15, atol=0)


def test_muon_moves_all_directions_alike() -> None:
    stack = torch.randn(3, 32, 64, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonal(stack))
    assert float(values.min()) > 0.5
    assert float(values.max()) < 1.3
    weight = stack.clone().requires_grad_(True)
    (weight * stack).sum().backward()  # type: ignore[no-untyped-call]
    before = weight.detach().clone()
    Muon({"w": weight}, rate=0.1, decay=0.0).step(1.0)
    assert float(((weight.detach() - before) * stack).sum()) < 0


@torch.no_grad()
def test_the_shipped_model_answers(served: Transformer) -> None:
    tokenizer = Tokenizer.load(FOLDER)
    special = tokenizer.special_ids
    names = ("<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>", "</think>")
    asked, answers, end = (special[name] for name in names)
    question = tokenizer.encode("What is the capital of Japan?")
    ids = [tokenizer.bos_token_id, asked, *question, answers, end]
    prompt = len(ids)
    cache = DenseCache(state_fields(served.spec), 1)
    start = 0
    while ids[-1] != tokenizer.eos_token_id and len(ids) < prompt + 20:
        chunk = Chunk(ids, start, len(ids) - start)
        spec = served.spec
        batch = build_batch(
            [chunk], image_token_id=spec.image_token_id, ngram=spec.engram_max_ngram_size
        )
        start = len(ids)
        ids.append(int(served.forward(batch, cache)[-1].argmax()))
    assert tokenizer.decode(ids[prompt:-1]) == "The capital of Japan is Tokyo."
