"""How fast the model runs on one CPU thread: `python -m model.bench [model folder]`.

With TANDEM_ORACLE set to the folder of the reference implementation, the same prompts run there in
turn with ours, and the table says how many times as fast ours is. Set OMP_NUM_THREADS=1 and
OPENBLAS_NUM_THREADS=1 for both. Logits are made for the last row only, in the reference for all.
"""

from __future__ import annotations

import gc
import importlib
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from model.batch import Chunk, ForwardBatch, build_batch
from model.cache import Cache
from model.dense_cache import DenseCache
from model.spec import ModelSpec
from model.state import state_fields
from model.transformer import Transformer
from model.weights import random_weights, write_checkpoint

REPEATS = 7
LONGEST = 2040  # tokens of a prompt; the reference takes 8 s for it


@dataclass(frozen=True)
class Measured:
    """Milliseconds of CPU time: the best and the median of some runs."""

    best: float
    median: float

    @classmethod
    def of(cls, times_s: Sequence[float]) -> Measured:
        ordered = sorted(times_s)
        return cls(ordered[0] * 1e3, ordered[len(ordered) // 2] * 1e3)


@dataclass(frozen=True)
class Line:
    """One line of the table; `tokens` is what a run processes."""

    name: str
    tokens: int
    ours: Callable[[], object]
    theirs: Callable[[], object] | None = None
    repeats: int = REPEATS


def main(folder: str = "deploy/models/tiny") -> None:
    torch.set_num_threads(1)
    spec = ModelSpec.load(folder)
    model = Transformer(spec, random_weights(spec, 1))
    reference = _Reference(spec) if os.environ.get("TANDEM_ORACLE") else None
    gc.freeze()  # as a server does after loading
    with torch.inference_mode():
        for line in lines(model, reference):
            measure(line)


def lines(model: Transformer, reference: _Reference | None) -> list[Line]:
    spec, prompt = model.spec, _prompt(model.spec, LONGEST)
    fields = state_fields(spec)

    def forward(*batches: ForwardBatch, cache: Cache) -> Callable[[], object]:
        return lambda: [model.forward(batch, cache) for batch in batches]

    def chunk(start: int, count: int, requests: int = 1) -> ForwardBatch:
        chunks = [Chunk(prompt, start, count)] * requests
        return build_batch(
            chunks, image_token_id=spec.image_token_id, ngram=spec.engram_max_ngram_size
        )

    def prefilled(requests: int) -> DenseCache:
        cache = DenseCache(fields, requests)
        model.forward(chunk(0, 640, requests), cache)
        return cache

    one, eight = prefilled(1), prefilled(8)
    empty = DenseCache(fields, 1)
    by_128 = [chunk(start, 128) for start in range(0, 512, 128)]
    theirs = reference.prefill if reference else lambda tokens: None
    decode = reference.decode(prompt[:512]) if reference else None
    return [
        Line("prefill 128", 128, forward(chunk(0, 128), cache=one), theirs(prompt[:128])),
        Line("prefill 512", 512, forward(chunk(0, 512), cache=one), theirs(prompt[:512])),
        *(
            Line(
                f"prefill {count}",
                count,
                forward(chunk(0, count), cache=empty),
                theirs(prompt[:count]),
                repeats=3,
            )
            for count in (1024, LONGEST)
        ),
        Line("prefill 4 x 128", 512, forward(*by_128, cache=one), theirs(prompt[:512])),
        Line("decode, 1 row", 1, forward(chunk(512, 1), cache=one), decode),
        Line("decode, 8 rows", 8, forward(chunk(512, 1, 8), cache=eight)),
        Line("verify, 8 x 6 rows", 48, forward(chunk(512, 6, 8), cache=eight)),
        Line("draft, 1 block", 5, lambda: model.draft([5], [512], one)),
    ]


def measure(line: Line) -> None:
    """Ours and theirs in turn, so that both meet the same noise."""
    ours, theirs = [], []
    line.ours()
    for _ in range(line.repeats):
        ours.append(_seconds(line.ours))
        if line.theirs:
            theirs.append(_seconds(line.theirs))
    found = Measured.of(ours)
    text = f"{line.name:20} {found.best:8.1f} ms best {found.median:8.1f} median"
    text += f" {found.median / line.tokens:8.3f} ms a token"
    if theirs:
        other = Measured.of(theirs)
        text += f"   reference {other.median:8.1f} ms, {other.median / found.median:5.1f} x"
    print(text, flush=True)


class _Reference:
    """The oracle on the same weights."""

    def __init__(self, spec: ModelSpec) -> None:
        sys.path.append(os.environ["TANDEM_ORACLE"])
        checkpoint: Any = importlib.import_module("v41_checkpoint")
        self._oracle: Any = importlib.import_module("v41_oracle")
        self._config = checkpoint.Config.from_dict(dict(spec.raw))
        with tempfile.TemporaryDirectory() as folder:
            write_checkpoint(Path(folder), spec, 1, vision=False)
            weights = checkpoint.load_checkpoint(folder, self._config)
        self._model = self._oracle.Model(self._config, weights)
        self._model.forward(_prompt(spec, 8), self._oracle.State(self._config))

    def prefill(self, tokens: Sequence[int]) -> Callable[[], object]:
        return lambda: self._model.forward(tokens, self._oracle.State(self._config))

    def decode(self, tokens: Sequence[int]) -> Callable[[], object]:
        state = self._oracle.State(self._config)
        self._model.forward(tokens, state)

        def step() -> None:
            self._model.forward(tokens[:1], state)
            state.rollback(len(tokens))

        return step


def _prompt(spec: ModelSpec, length: int) -> list[int]:
    choose = random.Random(0)
    return [choose.randrange(3, spec.image_token_id) for _ in range(length)]


def _seconds(run: Callable[[], object]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


if __name__ == "__main__":
    main(*sys.argv[1:])
