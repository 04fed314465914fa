"""What the oracle says about a case; the oracle is a float64 model that was written separately."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from model.weights import write_checkpoint
from tests.model.cases import BY_NAME, Case
from tests.model.oracle import oracle

STEPS = 4  # greedy tokens after the prompt


@dataclass(frozen=True)
class Expectation:
    logits: Any  # [kept rows of the prompt, V] float64
    pieces: dict[str, bytes]  # packed state after the prompt, by piece
    draft: Any  # tokens, confidence, logits of the draft after the first greedy token
    tokens: list[int]  # greedy
    margin: float  # of the closest choice made


@lru_cache(maxsize=16)
def expected(name: str) -> Expectation:
    """Skips the test where the oracle is not there."""
    model, state, logits = prefilled(BY_NAME[name])
    pieces = state.handoff().pieces()
    draft = model.draft(int(logits[-1].argmax()), state)
    tokens = model.generate(logits, state, STEPS)
    return Expectation(logits, pieces, draft, tokens, min(model.margins.values()))


def prefilled(case: Case) -> tuple[Any, Any, Any]:
    """The oracle's model, and its state and logits after the prompt."""
    oracles = oracle("v41_oracle")
    model = oracle_model(case)
    state = oracles.State(model.config)
    images = [at in case.images for at in range(case.length)] if case.embedded else None
    logits = oracles.prefill(
        model,
        case.prompt,
        state,
        keep=case.keep,
        image_mask=images,
        embeddings=case.embeddings,
    )
    return model, state, logits


def oracle_model(case: Case) -> Any:
    checkpoints, oracles = oracle("v41_checkpoint"), oracle("v41_oracle")
    config = checkpoints.Config.from_dict(case.raw)
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(folder, case.spec, case.seed, vision=False)
        weights = checkpoints.load_checkpoint(folder, config)
    truncation = "compact" if case.options.truncation == "off" else case.options.truncation
    return oracles.Model(
        config,
        weights,
        activations=case.options.activations,
        wo_a=case.options.wo_a,
        truncation=truncation,
        cut_window=case.options.cut_window,
    )


def largest_gap(ours: Any, theirs: Any) -> float:
    return float(np.abs(np.asarray(ours) - np.asarray(theirs)).max())
