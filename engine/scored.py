"""Rows of a prompt whose own log-probabilities are wanted, and what came of them besides.

Knows not how they are computed.
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.errors import ClusterError
from cluster.messages import PromptLogprobs
from engine.choice import Choice


@dataclass(frozen=True)
class Scored:
    """Row p - 1 scores the prompt's token p, also when the next chunk begins with that token."""

    prompt: PromptLogprobs
    next: Choice | ClusterError | None  # the token after the last row, if one was asked for
