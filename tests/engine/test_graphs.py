"""When a graph is made, which one plays a step, and what happens when none can be made."""

from __future__ import annotations

import logging

import pytest

from engine.decode_shapes import DecodeShapes
from engine.graphs import Graph, Graphs, Launches
from model.packed.rows import Shape


def shape(rows: int, blocks: int) -> Shape:
    return Shape(rows, rows, blocks, in_place=True)


class Device:
    """Notes what is captured, replayed and launched; has memory for `most` graphs."""

    def __init__(self, most: int = 100) -> None:
        self.most = most
        self.captured: list[Shape] = []
        self.replayed: list[Shape] = []
        self.launched: list[Shape] = []

    def step(self, one: Shape) -> None:
        self.launched.append(one)

    def capture(self, one: Shape) -> Graph:
        if len(self.captured) == self.most:
            raise RuntimeError("out of memory")
        self.captured.append(one)
        return Graph(lambda: self.replayed.append(one), 10)


def test_prepared_shapes_are_replayed() -> None:
    device = Device()
    graphs = Graphs(device.step, device.capture, "test")
    graphs.prepare(DecodeShapes(4, 8).common(4))
    assert graphs.captured == len(device.captured) == 6
    assert graphs.nbytes == 60
    assert graphs.choose(shape(2, 4)) == shape(2, 4)
    graphs.play(shape(2, 4))
    assert device.replayed == [shape(2, 4)]
    assert (graphs.replayed, graphs.launched) == (1, 0)


def test_a_larger_graph_stands_in_until_a_shape_has_been_wanted_often() -> None:
    device = Device()
    graphs = Graphs(device.step, device.capture, "test", patience=16)
    graphs.prepare([shape(8, 64), shape(2, 64)])
    chosen = [graphs.choose(shape(2, 8)) for _ in range(40)]
    changed = chosen.index(shape(2, 8))
    assert changed == 15
    assert set(chosen[:changed]) == {shape(2, 64)}  # the one with the fewest rows
    assert set(chosen[changed:]) == {shape(2, 8)}
    assert device.captured.count(shape(2, 8)) == 1
    assert not device.launched


def test_a_shape_that_no_graph_holds_gets_its_own_at_once() -> None:
    device = Device()
    graphs = Graphs(device.step, device.capture, "test")
    graphs.prepare([shape(2, 8)])
    assert graphs.choose(shape(4, 4)) == shape(4, 4)
    graphs.play(shape(4, 4))
    assert device.replayed == [shape(4, 4)]


def test_when_no_more_can_be_made_it_is_said_once_and_the_rest_is_launched(
    caplog: pytest.LogCaptureFixture,
) -> None:
    device = Device(most=1)
    graphs = Graphs(device.step, device.capture, "decode-0/0")
    with caplog.at_level(logging.WARNING):
        graphs.prepare([shape(2, 8), shape(4, 8), shape(8, 8)])
    (said,) = caplog.messages
    assert "decode-0/0: no graph of" in said
    assert "out of memory" in said
    for wanted, played in ((1, 2), (2, 2), (8, 8)):
        for _ in range(20):
            chosen = graphs.choose(shape(wanted, 8))
            assert chosen == shape(played, 8)
        graphs.play(chosen)
    assert device.replayed == [shape(2, 8)] * 2
    assert device.launched == [shape(8, 8)]
    assert len(caplog.messages) == 1


def test_a_device_without_graphs_is_asked_for_every_step() -> None:
    device = Device()
    launches = Launches(device.step)
    launches.prepare([shape(8, 8)])
    launches.play(launches.choose(shape(3, 5)))
    assert device.launched == [shape(3, 5)]
    assert (launches.captured, launches.replayed, launches.launched) == (0, 0, 1)
