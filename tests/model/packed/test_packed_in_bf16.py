"""The packed forward in bf16, on weights as they are stored, held to float32 layer after layer.

Each layer is given what the reference gave the one before: a rounding that falls on the other side
then costs one row of one layer, and not all that follows. Then a graph replays a step.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kv_transfer.blocks import BlockPool, Lease
from kv_transfer.device_slab import DeviceSlab
from kv_transfer.layout import Layout
from kv_transfer.slab import Slab
from kv_transfer.state_memory import open_memory
from kv_transfer.state_view import view_of
from model.batch import Chunk, ForwardBatch, build_batch
from model.options import ModelOptions
from model.packed.block import Residual
from model.packed.experts import PackedLocalExperts
from model.packed.forward import PackedTransformer
from model.packed.place_rows import chunk_rows, fill, host_buffer
from model.packed.rows import Shape, rows_in
from model.packed.weights import from_weights
from model.spec import ModelSpec
from model.state import state_fields
from model.weights import random_weights
from tests.model.packed.plain_weights import PlainExperts, PlainWeights

CPU, GPU = torch.device("cpu"), torch.device("cuda")
MODELS = Path(__file__).resolve().parents[3] / "deploy" / "models"
BLOCK_TOKENS, BLOCKS, SLOTS = 64, 24, 4
LENGTHS = (301, 150)

# Of a layer's result, in the median and of nine rows in ten: some ten roundings to bf16 (2 ** -9 of
# a value each), and KV rows or FP8 inputs, whose steps are up to 2 ** -3 of a value, that fall into
# another step. A row whose choice of experts or of rows differs is off by more.
TYPICAL = {"exact": 0.01, "fp8": 0.03}
MOST = {"exact": 0.05, "fp8": 0.1}


@lru_cache(maxsize=4)
def models(
    name: str, activations: str, device: torch.device
) -> tuple[PackedTransformer, PackedTransformer]:
    """On plain weights in float32 on the CPU, and on stored ones in bf16 on the device."""
    spec = ModelSpec.load(MODELS / name)
    options = ModelOptions(activations=activations)  # type: ignore[arg-type]
    weights = random_weights(spec, 3)
    plain = PlainWeights(weights, torch.float32)
    packed = from_weights(weights, device, torch.bfloat16)
    # any map will do, and the tokenizer's needs its library
    ids = torch.arange(spec.vocab_size) % spec.engram_compressed_vocab_size
    return (
        PackedTransformer(spec, plain, options, ids, make_experts=PlainExperts),
        PackedTransformer(spec, packed, options, ids, make_experts=PackedLocalExperts),
    )


def memory(spec: ModelSpec, device: torch.device) -> Slab | DeviceSlab:
    return open_memory(Layout(state_fields(spec), BLOCK_TOKENS, 5), BLOCKS, SLOTS, device)


def leases() -> list[Lease]:
    pool = BlockPool(BLOCKS, SLOTS, BLOCK_TOKENS)
    return [pool.lease(length + 16) for length in LENGTHS]


def batch_of(spec: ModelSpec, *spans: tuple[int, int]) -> ForwardBatch:
    """Rows start to stop of each request."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(3, 2000, (max(LENGTHS) + 16,), generator=generator).tolist()
    chunks = [
        Chunk(ids[number:], start, stop - start, logits="all")
        for number, (start, stop) in enumerate(spans)
    ]
    return build_batch(chunks, image_token_id=spec.image_token_id, ngram=spec.engram_max_ngram_size)


def row_errors(found: Tensor, expected: Tensor) -> Tensor:
    exact = expected.double().flatten(1)
    lengths = torch.linalg.vector_norm(found.cpu().double().flatten(1) - exact, dim=1)
    relative: Tensor = lengths / torch.linalg.vector_norm(exact, dim=1)
    return relative


def test_each_layer_is_its_reference_on_a_cpu() -> None:
    check_layers("tiny", "fp8", CPU)


@pytest.mark.gpu
@pytest.mark.parametrize("activations", ["exact", "fp8"])
@pytest.mark.parametrize("name", ["tiny", "mini"])
def test_each_layer_is_its_reference_by_kernels(name: str, activations: str) -> None:
    check_layers(name, activations, GPU)


@torch.inference_mode()
def check_layers(name: str, activations: str, device: torch.device) -> None:
    exact, fast = models(name, activations, device)
    spec, held = exact.spec, leases()
    batch = batch_of(spec, *((0, length) for length in LENGTHS))
    steps = []
    for model, where in ((exact, CPU), (fast, device)):
        chunks = chunk_rows(batch, held, spec, exact.options, where)
        state = view_of(memory(spec, where))
        steps.append(model._step(chunks.rows, chunks.shape, state, chunks.extras, None))
    streams = exact._embed(steps[0].rows, None)
    residual = Residual.of(streams, spec.hc_mult)
    ids = [
        model._compressed_ids(step.rows.ngrams_TN)
        for model, step in zip((exact, fast), steps, strict=True)
    ]
    for number in range(spec.num_hidden_layers):
        given = residual.streams_TnD.bfloat16()
        residual = residual._replace(streams_TnD=given.float())
        other = Residual(given.to(device), residual.pre_Tn.to(device))
        if number in exact._engrams:
            mixed = [
                model._engrams[number](one.streams_TnD, id_TN, step.rows, step.images_T)
                for model, one, id_TN, step in zip(
                    (exact, fast), (residual, other), ids, steps, strict=True
                )
            ]
            assert float(row_errors(mixed[1], mixed[0]).max()) < TYPICAL[activations]
            residual = residual._replace(streams_TnD=mixed[0].bfloat16().float())
            other = other._replace(streams_TnD=residual.streams_TnD.to(device).bfloat16())
        residual = exact._layers[number](residual, steps[0])
        errors = row_errors(fast._layers[number](other, steps[1]).streams_TnD, residual.streams_TnD)
        assert float(errors.median()) < TYPICAL[activations]
        assert float(errors.quantile(0.9)) < MOST[activations]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["tiny", "mini"])
def test_a_replayed_step_has_the_bits_of_an_eager_one(name: str) -> None:
    _, model = models(name, "fp8", GPU)
    spec, held = model.spec, leases()
    slab = memory(spec, GPU)
    assert isinstance(slab, DeviceSlab)
    state = view_of(slab)
    batch = batch_of(spec, *((0, length) for length in LENGTHS))
    chunks = chunk_rows(batch, held, spec, model.options, GPU)
    model.forward(chunks.rows, chunks.shape, state, chunks.extras)
    shape = Shape(4, 3, 6, in_place=True)
    static = torch.zeros_like(fill_of(batch_of(spec, (1, 2), (1, 2)), held, shape), device=GPU)
    rows = rows_in(static, shape, spec.engram_max_ngram_size)

    def place(after: int) -> None:
        spans = [(length + after, length + after + 1) for length in LENGTHS]
        static.copy_(fill_of(batch_of(spec, *spans), held, shape))

    place(0)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):  # compiles; a step again leaves the same state
            model.forward(rows, shape, state)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = model.forward(rows, shape, state)
    for after in range(1, 4):
        place(after)
        before = [slab.blocks.clone(), slab.slots.clone()]
        graph.replay()
        replayed, left = logits.clone(), [slab.blocks.clone(), slab.slots.clone()]
        slab.blocks.copy_(before[0])
        slab.slots.copy_(before[1])
        assert torch.equal(model.forward(rows, shape, state)[:2], replayed[:2])
        assert torch.equal(slab.blocks, left[0])
        assert torch.equal(slab.slots, left[1])
        assert not torch.equal(before[1], left[1])
        assert bool(torch.isfinite(replayed).all())


def fill_of(batch: ForwardBatch, held: list[Lease], shape: Shape) -> Tensor:
    return fill(host_buffer(shape, batch.ngrams_Tn.shape[1], GPU), batch, held, shape)
