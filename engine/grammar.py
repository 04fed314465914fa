"""The grammar of one request, as far as its output has followed it: what may come next.

It has no state of its own: whatever rank it is made on, it takes the whole output first. Masks
are made in threads, while the step's forward runs; whoever needs one waits a bounded time, so a
grammar that is slow costs its neighbours that once, and then its request is over. Knows nothing
of how grammars are compiled.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from cluster.errors import BadRequest
from cluster.request import Grammar
from engine.thread_clock import ThreadClock

# V = ids that have a spelling, rounded up to whole bytes

PATIENCE_S = 1.0  # of a processor: a mask takes 40 ms at most if the grammar is not hostile
MOST_S = 20.0  # of any time, on a machine that does other things
THREADS = 4


class Follows(Protocol):
    """cluster.grammars.Following is one."""

    def feed(self, token_ids: Sequence[int]) -> None: ...

    def mask(self) -> tuple[bytearray, bool]: ...


class Compiled(Protocol):
    def follow(self) -> Follows: ...


class Compiler(Protocol):
    """cluster.grammars.Grammars is one; from any thread, and quick for what it has seen."""

    def compile(self, grammar: Grammar) -> Compiled: ...


@dataclass(frozen=True)
class Allowed:
    """`ids_V` bool: no id that ends the answer is in it. `end`: the text may end here."""

    ids_V: Tensor
    end: bool


class Pending(NamedTuple):
    """A mask that is being made, or waits to be."""

    constraint: Constraint
    threads: ThreadPoolExecutor
    future: Future[Allowed]
    deadline: float  # whatever the machine does
    begin_by: float  # else its threads are stuck


class MaskThreads:
    """Where masks are made. Threads that do not answer are left behind, not waited for.

    A mask may take `patience_s` of a processor, so that a busy machine is no reproach to a
    grammar; and `most_s` in all.
    """

    def __init__(self, patience_s: float = PATIENCE_S, most_s: float = MOST_S) -> None:
        self._patience_s = patience_s
        self._most_s = most_s
        self._threads = self._some()

    def submit(self, constraint: Constraint, deadline: float | None = None) -> Pending:
        now = time.monotonic()
        future = self._threads.submit(constraint.next_ids)
        by = now + self._most_s if deadline is None else deadline
        return Pending(constraint, self._threads, future, by, now + self._patience_s)

    def wait(self, pending: Pending) -> Allowed:
        """BadRequest if it takes too long, or of its own.

        One that only waited for a thread, behind those that do not answer, has all its time yet.
        """
        while True:
            left_s = self._left_s(pending)
            try:
                return pending.future.result(left_s)
            except TimeoutError:
                if self._left_s(pending) > 0.0:
                    continue
            never_begun = pending.future.cancel()
            if pending.threads is self._threads:
                self._threads.shutdown(wait=False)
                self._threads = self._some()
            if not never_begun or time.monotonic() >= pending.deadline:
                raise BadRequest("grammar: too complex: it takes too long to find what may come")
            pending = self.submit(pending.constraint, pending.deadline)

    def _left_s(self, pending: Pending) -> float:
        """How long to wait for it before looking again; 0: no longer."""
        now, clock = time.monotonic(), pending.constraint.clock
        if clock is None or not pending.future.running():
            own_s = pending.begin_by - now
        else:
            own_s = self._patience_s - clock.passed_s()
        return max(0.0, min(own_s, pending.deadline - now))

    @staticmethod
    def _some() -> ThreadPoolExecutor:
        return ThreadPoolExecutor(THREADS, thread_name_prefix="mask")


class Constraint:
    """`token_ids` are prompt and output of one request; the list may go on growing."""

    def __init__(
        self,
        grammar: Grammar,
        compiler: Compiler,
        threads: MaskThreads,
        token_ids: Sequence[int],
        prompt_length: int,
    ) -> None:
        self._grammar = grammar
        self._compiler = compiler
        self._threads = threads
        self._token_ids = token_ids
        self._following: Follows | None = None
        self._fed = prompt_length
        self._begun_at = -1
        self._next: Pending
        self.clock: ThreadClock | None = None  # of the mask that is being made

    def begin(self) -> None:
        """Have the next mask made; again is harmless."""
        if self._begun_at != len(self._token_ids):
            self._begun_at = len(self._token_ids)
            self.clock = None
            self._next = self._threads.submit(self)

    def allowed(self) -> Allowed:
        """For the token after the last one. BadRequest ends the request, and only it."""
        self.begin()
        return self._threads.wait(self._next)

    def next_ids(self) -> Allowed:
        """In a thread of MaskThreads; the list does not grow meanwhile."""
        self.clock = ThreadClock()
        try:
            mask, end = self._follow()
        except BadRequest:
            raise
        except BaseException as error:  # a panic of the library is no Exception: it would end all
            raise BadRequest(f"grammar: following it broke: {error!r}") from error
        bytes_ = torch.frombuffer(mask, dtype=torch.uint8)
        bits = bytes_[:, None] >> torch.arange(8, dtype=torch.uint8) & 1
        return Allowed(bits.flatten().bool(), end)

    def _follow(self) -> tuple[bytearray, bool]:
        if self._following is None:
            self._following = self._compiler.compile(self._grammar).follow()
        self._following.feed(self._token_ids[self._fed :])
        self._fed = len(self._token_ids)
        return self._following.mask()
