"""From the parts of a step to the batch of a forward: ids, images, window starts, logits wanted.

Knows no model and no memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from engine.images import Encode, ImageRows
from engine.request import Running
from engine.step_loop import Work
from model.batch import Chunk, ForwardBatch, build_batch
from model.spec import ModelSpec


class StepBatches:
    """Used in the engine's thread only."""

    def __init__(self, spec: ModelSpec, *, keep: int = 0, encode: Encode | None = None) -> None:
        """`keep`: rows at a prompt's end that a truncated prefill takes through all layers; 0: it
        takes all. `encode` computes what images show; None: no request brings any."""
        self._spec, self._keep = spec, keep
        self._image_rows = ImageRows(encode)

    def of(self, work: Sequence[Work]) -> ForwardBatch:
        """Rows of all parts in their order."""
        return build_batch(
            [self._chunk(one) for one in work],
            image_token_id=self._spec.image_token_id,
            ngram=self._spec.engram_max_ngram_size,
        )

    def _chunk(self, one: Work) -> Chunk:
        shown = self._image_rows.of(one.running, one.grant)
        return Chunk(
            one.running.token_ids,
            one.grant.start,
            one.grant.count,
            window_start(one.running, self._keep),
            logits=_wanted(one),
            embeddings=shown.embeddings,
            embedded=shown.positions,
        )


def window_start(running: Running, keep: int) -> int:
    """Layers after the cut see no window rows below this position.

    Counted from the prompt alone: a prompt with output behind it is cut at the same row.
    """
    return max(0, running.request.prompt_length - keep) if keep else 0


def logit_rows(one: Work) -> int:
    """How many rows of logits a part wants.

    A prompt whose log-probabilities are wanted has the logits of all its rows made, others one
    row's.
    """
    return {"all": one.grant.count, "last": 1, "none": 0}[_wanted(one)]


def _wanted(one: Work) -> Literal["all", "last", "none"]:
    if one.scored:
        return "all"
    return "last" if one.grant.samples else "none"
