"""Decode steps on a GPU: a graph leaves the bits of a launched step, and steps ahead no other."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from engine.decode_shapes import DecodeShapes
from model.packed.forward import PackedTransformer
from model.packed.load import load_packed
from tests.engine.packed_engine import Rig, a_request

pytestmark = pytest.mark.gpu

MODEL = Path(__file__).parents[2] / "deploy" / "models" / "mini"
SHAPES = DecodeShapes(max_rows=8, max_blocks=8)
EVERY_SHAPE = [SHAPES.of(rows, blocks) for rows in SHAPES.rows for blocks in SHAPES.blocks]
BLOCK_TOKENS = 32
DRAWN = {"temperature": 1.0, "seed": 5, "top_p": 0.9}


@cache
def mini() -> PackedTransformer:
    found: PackedTransformer = load_packed(
        MODEL,
        weights="checkpoint",
        device=torch.device("cuda"),
        dtype=torch.bfloat16,
    )
    return found


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    torch.set_num_threads(1)
    yield
    torch.cuda.empty_cache()


def rig(*, ahead: bool, graphs: bool) -> Rig:
    """Steps of equal rows have equal shapes, by graph or not."""
    made = Rig(
        mini(),
        ahead=ahead,
        graphs=graphs,
        block_tokens=BLOCK_TOKENS,
        num_blocks=512,
        shapes=SHAPES,
        max_rows=SHAPES.max_rows,
        chunk_tokens=64,
    )
    with torch.inference_mode():
        made.steps.player.prepare(EVERY_SHAPE)
    return made


REQUESTS = tuple(
    a_request(length, length, max_tokens=40, **(DRAWN if length % 2 else {}))
    for length in (3, 8, 17, 33, 40, 90)
)


def test_answers_by_graph_ahead_and_launched_are_the_same() -> None:
    """And all state to the byte, whatever was written for nothing in between."""
    plain, graph, ahead = (
        rig(ahead=ahead, graphs=graphs)
        for ahead, graphs in ((False, False), (False, True), (True, True))
    )
    expected = plain.play(*REQUESTS)
    assert plain.steps.player.replayed == 0
    for other in (graph, ahead):
        assert other.play(*REQUESTS) == expected
        assert other.steps.player.replayed > 30
        assert other.steps.player.launched == 0
    assert graph.executor.rows_ahead == (0, 0)
    assert ahead.executor.rows_ahead[0] > 150


def test_a_replayed_step_leaves_the_bits_of_a_launched_one() -> None:
    plain, graph = rig(ahead=False, graphs=False), rig(ahead=False, graphs=True)
    for one in (plain, graph):
        one.play(*REQUESTS[:3])
    torch.cuda.synchronize()
    assert bool((plain.slab.slots[:-2] > 0).any())
    assert torch.equal(plain.slab.blocks, graph.slab.blocks)
    assert torch.equal(plain.slab.slots, graph.slab.slots)


def test_a_graph_is_captured_while_another_thread_uses_the_device() -> None:
    """Transfers go on meanwhile: they allocate, copy and synchronise."""
    stop, moved = threading.Event(), 0

    def move() -> None:
        nonlocal moved
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        while not stop.is_set():
            with torch.cuda.stream(stream):
                there = torch.arange(1 << 16, dtype=torch.int64).to("cuda")
                moved += int(there.sum().cpu()) > 0
            stream.synchronize()

    mover = threading.Thread(target=move)
    mover.start()
    try:
        one = rig(ahead=True, graphs=True)
    finally:
        stop.set()
        mover.join()
    assert moved
    assert one.steps.player.captured == len(EVERY_SHAPE)
    answers = one.play(*REQUESTS)
    assert [len(answer) for answer in answers] == [40] * len(REQUESTS)
    assert one.steps.player.launched == 0
