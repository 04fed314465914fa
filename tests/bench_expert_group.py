"""What a group costs: steps of a few rows, by the whole model and by ranks that share its experts.

    python -m tests.bench_expert_group

Ranks are threads that hand rows to each other, so it is the price of sorting rows and of waiting
for each other, not of a network. Processor time of all ranks together, over the number of ranks.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import torch

from engine.expert_exchange import local_exchanges
from engine.expert_group import ExpertGroup
from model.batch import Chunk, build_batch
from model.dense_cache import DenseCache
from model.state import state_fields
from model.transformer import Transformer
from tests.groups import tiny_part, tiny_spec, tiny_weights
from tests.tiny import make_prompt

STEPS, PROMPT = 20, 8
ROWS = (1, 8)  # of each rank
GROUPS = ((1, 0), (2, 0), (2, 2), (4, 0))  # ranks, redundant experts


def steps(model: Transformer, experts: ExpertGroup | None, rows: int) -> None:
    """A short prompt for each row, then one position after another."""
    spec = model.spec
    cache = DenseCache(state_fields(spec), rows)
    ids = [make_prompt(PROMPT + STEPS, seed=row) for row in range(rows)]
    for step in range(STEPS):
        start, count = (PROMPT + step - 1, 1) if step else (0, PROMPT)
        batch = build_batch(
            [Chunk(one, start, count) for one in ids],
            image_token_id=spec.image_token_id,
            ngram=spec.engram_max_ngram_size,
        )
        with nullcontext() if experts is None else experts.step(), torch.inference_mode():
            model.forward(batch, cache)


def milliseconds(size: int, extra: int, rows: int) -> float:
    """Processor time of one rank's step; size 0 is the whole model alone."""
    parts: list[tuple[Transformer, ExpertGroup | None]]
    if size:
        made = [tiny_part(one, extra=extra) for one in local_exchanges(size)]
        parts = [(model, experts) for experts, model in made]
    else:
        parts = [(Transformer(tiny_spec(), tiny_weights()), None)]

    def run(part: tuple[Transformer, ExpertGroup | None]) -> None:
        torch.set_num_threads(1)
        steps(*part, rows)

    began = time.process_time()
    with ThreadPoolExecutor(len(parts)) as pool:
        list(pool.map(run, parts))
    return 1e3 * (time.process_time() - began) / STEPS / len(parts)


def main() -> None:
    print("| rows a rank | whole model | " + " | ".join(_name(*one) for one in GROUPS) + " |")
    print("|---|---|" + "---|" * len(GROUPS))
    for rows in ROWS:
        alone = milliseconds(0, 0, rows)
        shared = [milliseconds(*one, rows) for one in GROUPS]
        cells = [f"{one:.0f} ({one / alone:.2f}x)" for one in shared]
        print(f"| {rows} | {alone:.0f} | " + " | ".join(cells) + " |")


def _name(size: int, extra: int) -> str:
    return f"ep {size}" + (f", {extra} redundant" if extra else "")


if __name__ == "__main__":
    main()
