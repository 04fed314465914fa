"""What a decode step costs host and device: launched, by graph, and begun ahead.

    python -m tests.bench_decode_steps deploy/models/mini

Engine and step loop as in a rank; nothing of requests' transport. `host` is the time of a step in
which the loop's thread did not wait for the device.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.decode_shapes import DecodeShapes
from engine.step_loop import News
from model.packed.forward import PackedTransformer
from model.packed.load import load_packed
from tests.engine.loops import Ears
from tests.engine.packed_engine import Rig, a_request

LENGTH = 64  # of a prompt
SKIPPED = 8  # steps after the prompts', which may compile something
BLOCK_TOKENS = 128


@dataclass(frozen=True)
class Mode:
    name: str
    graphs: bool
    ahead: bool


MODES = (Mode("launched", False, False), Mode("graph", True, False), Mode("ahead", True, True))


@dataclass(frozen=True)
class Line:
    requests: int
    mode: str
    step_ms: float
    host_ms: float

    def __str__(self) -> str:
        rate = self.requests / self.step_ms * 1e3
        return (
            f"{self.requests:>8}  {self.mode:<9} {self.step_ms:>8.3f} {self.host_ms:>8.3f} "
            f"{rate:>10.0f}"
        )


class Tally(Ears):
    """Counts, in the engine's thread, and wakes nobody before the end: who looks takes its time."""

    def __init__(self, requests: int) -> None:
        super().__init__()
        self._skipped, self._left = requests * SKIPPED, requests
        self.begin: Callable[[], None] = lambda: None  # called when the skipped ones are over
        self.over = threading.Event()

    def __call__(self, news: Sequence[News]) -> None:
        tokens = sum(one.choice is not None for one in news)
        if 0 < self._skipped <= tokens:
            self.begin()
        self._skipped -= tokens
        self._left -= sum(one.end is not None for one in news)
        if not self._left:
            self.over.set()


def measure(model: PackedTransformer, requests: int, mode: Mode, tokens: int) -> Line:
    tally = Tally(requests)
    rig = Rig(
        model,
        ahead=mode.ahead,
        graphs=mode.graphs,
        block_tokens=BLOCK_TOKENS,
        num_blocks=4 * requests,
        shapes=DecodeShapes(max_rows=requests, max_blocks=4),  # one width: no graph is made later
        max_rows=requests,
        chunk_tokens=LENGTH * requests,  # all begin to answer together
        ears=tally,
    )
    rig.steps.prepare(4)
    executor, loop = rig.executor, rig.loop
    marks: list[tuple[float, int, float]] = []

    def mark() -> None:
        host_s = executor.steps_s - executor.waited_s
        marks.append((time.perf_counter(), loop.steps, host_s))

    tally.begin = mark
    for draw in range(requests):
        loop.add(rig.running(a_request(LENGTH, draw, max_tokens=tokens)))
    with rig.turning():
        assert tally.over.wait(300)  # kernels are compiled when they are first met
        mark()
    (began_at, first, before_s), (ended_at, last, after_s) = marks
    steps = last - first
    return Line(
        requests, mode.name, (ended_at - began_at) / steps * 1e3, (after_s - before_s) / steps * 1e3
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--tokens", type=int, default=128)
    given = parser.parse_args()
    torch.set_num_threads(1)
    model = load_packed(
        given.model, weights="checkpoint", device=torch.device("cuda"), dtype=torch.bfloat16
    )
    print(f"{torch.cuda.get_device_name()}, {given.model}, torch {torch.__version__}")
    print(f"{'requests':>8}  {'mode':<9} {'step ms':>8} {'host ms':>8} {'tokens/s':>10}")
    for requests in given.requests:
        for mode in MODES:
            print(measure(model, requests, mode, given.tokens), flush=True)


if __name__ == "__main__":
    main()
