"""Rows of a layer are told of while later layers still run, and only when they are final."""

from __future__ import annotations

import pytest
from torch import Tensor

from engine.engine import Engine
from engine.executor import Executor
from engine.runner import DenseRunner
from kv_transfer.blocks import BlockPool
from kv_transfer.layout import Layout
from kv_transfer.slab import Slab
from model.batch import ForwardBatch
from model.cache import Cache
from model.state import state_fields
from model.transformer import Transformer
from prefill_worker.scheduler import schedule
from tests.tiny import load_tiny, make_prompt, make_request

LENGTH, CHUNK = 45, 20


class Watched:
    """The tiny model; notes what stands in the blocks whenever it says that rows are final."""

    def __init__(self, slab: Slab) -> None:
        self._model: Transformer = load_tiny()
        self.spec, self.vision = self._model.spec, self._model.vision
        self._slab = slab
        self.at_final: list[tuple[int, bytes]] = []  # layer, and all blocks as they were then

    def forward(self, batch: ForwardBatch, cache: Cache) -> Tensor:
        say = cache.rows_are_final

        def noted(layer: int) -> None:
            self.at_final.append((layer, self._slab.blocks.numpy().tobytes()))
            say(layer)

        cache.rows_are_final = noted  # type: ignore[method-assign]
        return self._model.forward(batch, cache)


@pytest.mark.parametrize("by_layer", [True, False])
async def test_rows_of_every_source_layer_are_told_of_once_they_are_final(by_layer: bool) -> None:
    layout = Layout(state_fields(load_tiny().spec), 16)
    slab, pool = Slab(layout, 8, 2), BlockPool(8, 2, 16)
    model = Watched(slab)
    engine = Engine(
        schedule=lambda requests: schedule(requests, chunk_tokens=CHUNK),
        execute=Executor(DenseRunner(model, slab)),
        eos_token_id=model.spec.eos_token_id,
        name="prefill-0/0",
    )
    request = make_request(make_prompt(LENGTH), max_tokens=1)
    layers = list(model.spec.kv_source_layer_ids)
    with pool.lease(LENGTH) as lease:
        async with engine, engine.run(request, lease, once=True, by_layer=by_layer) as run:
            await run.until(lambda: run.end is not None)
            assert run.done == LENGTH
            told = {layer: run._ahead.get(layer) for layer in layers}
            assert told == dict.fromkeys(layers, (LENGTH, None) if by_layer else None)
            assert all(run.rows_of(layer) == (LENGTH, None) for layer in layers)
        assert [layer for layer, _ in model.at_final] == layers * 3  # chunks
        for layer, blocks in model.at_final[-len(layers) :]:  # the last chunk's: nothing follows
            for place in layout.places.values():
                if place.in_blocks and place.layer == layer:
                    part = slice(place.offset, place.offset + place.rows * place.row_bytes)
                    then = memoryview(blocks)
                    for block in lease.block_ids:
                        record = then[block * layout.block_bytes :][: layout.block_bytes]
                        now = slab.blocks[block].numpy().tobytes()
                        assert bytes(record[part]) == now[part], (place.field.name, layer)
