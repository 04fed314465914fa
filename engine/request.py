"""A request inside an engine: its ids, how far it is, and how it can leave. No torch, no I/O."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cluster.errors import BadRequest, ClusterError, PromptTooLong
from cluster.messages import FinishReason, Request
from kv_transfer.blocks import Lease

# ------------------------------------------------------------------ how a request leaves


@dataclass(frozen=True)
class Finished:
    """The answer is complete."""

    reason: FinishReason


@dataclass(frozen=True)
class Prefilled:
    """One token was sampled, as asked; the state is complete for a continuation elsewhere."""


@dataclass(frozen=True)
class Removed:
    """Its owner asked for it back."""


@dataclass(frozen=True)
class Broken:
    """The engine failed on it."""

    error: ClusterError


@dataclass(frozen=True)
class Preempted:
    """Its memory was taken for an older one; whoever wants the rest has to prefill again."""


End = Finished | Prefilled | Removed | Broken | Preempted
"""Each run has exactly one; after it the engine touches neither the request nor its lease."""

Settle = Callable[[Sequence["Running"]], None]
"""Returns when no step that was begun will still read or write these requests' memory."""


def settled(running: Sequence[Running]) -> None:
    """The Settle of an engine whose steps have ended when they have been told of."""


# ------------------------------------------------------------------ what the engine keeps

OnRows = Callable[[int, int, Any], None]
"""(layer, positions, event): while a step still runs, the layer's per-token rows of so many
positions are in the blocks; on a device as soon as that event has happened, else None."""


@dataclass(eq=False)
class Running:
    """One request in an engine; only the engine's thread reads and writes it.

    The state of positions 0 .. `done` - 1 is in the lease's blocks. `token_ids` are prompt and
    output: a prompt, a resumed answer and a decoding request differ only in how many ids are not
    done yet.
    """

    request: Request
    lease: Lease
    token_ids: list[int]
    done: int = 0
    once: bool = False  # leave after one token: the answer goes on elsewhere
    started: bool = False
    alone: bool = False  # was in a batch that failed: runs by itself until it has a token
    turn: int = 0  # number of its last grant
    stop_ids: frozenset[int] = field(default_factory=frozenset)
    on_rows: OnRows | None = None  # called in the engine's thread

    @property
    def output_length(self) -> int:
        return len(self.token_ids) - self.request.prompt_length

    @property
    def grows(self) -> bool:
        """It may need more memory than its lease has."""
        return not self.once and self.lease.length < self.request.longest

    def append(self, token: int) -> End | None:
        """Take the next token of the answer; how the request leaves with it, if it does."""
        self.token_ids.append(token)
        if token in self.stop_ids:
            return Finished("stop")
        if self.output_length >= self.request.sampling.max_tokens:
            return Finished("length")
        return Prefilled() if self.once else None

    def restart_alone(self) -> None:
        """A failed forward may have left half-written rings: only the token ids are certain."""
        self.done = 0
        self.alone = True


def stop_ids(request: Request, eos_token_id: int) -> frozenset[int]:
    if request.sampling.ignore_stop:
        return frozenset()
    return frozenset((eos_token_id, *request.sampling.stop_token_ids))


# ------------------------------------------------------------------ what an engine accepts


@dataclass(frozen=True)
class Limits:
    vocab_size: int
    max_length: int  # longest prompt + max_tokens
    capacity: int  # positions that all blocks of the rank hold together
    truncated: bool = False  # a prompt's early rows have no logits


def check(request: Request, limits: Limits, *, held: int) -> None:
    """Refuse here what would harm an engine; `held` positions are what it must keep at once.

    Raises BadRequest, or PromptTooLong with both numbers.
    """
    name = request.request_id
    if len(request.prompt) % 4 or len(request.output) % 4:
        raise BadRequest(f"{name}: token ids are int32: four bytes each")
    if not request.prompt_length:
        raise BadRequest(f"{name}: the prompt is empty; give at least one token id")
    if request.output_length >= request.sampling.max_tokens:
        raise BadRequest(
            f"{name}: {request.output_length} tokens are out already, of max_tokens "
            f"{request.sampling.max_tokens}"
        )
    if limits.truncated and request.scored:
        raise BadRequest(
            f"{name}: log-probabilities of the prompt need all its rows, and prefill is truncated "
            "here (model.truncation)"
        )
    known = np.frombuffer(request.prompt + request.output, dtype=np.int32)
    outside = known[(known < 0) | (known >= limits.vocab_size)]
    _check_ids(name, "token id", outside.tolist(), limits.vocab_size)  # names the first
    for option, ids in request.sampling.named_ids():
        _check_ids(name, f"{option}: token id", ids, limits.vocab_size)
    if request.longest > limits.max_length:
        raise PromptTooLong(
            f"{name}: {request.prompt_length} prompt tokens and max_tokens "
            f"{request.sampling.max_tokens} are {request.longest} positions; at most "
            f"{limits.max_length} are served"
        )
    if held > limits.capacity:
        raise PromptTooLong(
            f"{name}: {held} positions can never fit: all blocks of this rank hold "
            f"{limits.capacity}"
        )


def _check_ids(name: str, what: str, ids: Sequence[int], vocab_size: int) -> None:
    for token in ids:
        if not 0 <= token < vocab_size:
            raise BadRequest(f"{name}: {what} {token} is outside the vocabulary of {vocab_size}")
