"""What tests of step loops have in common: requests, a model of ten lines, ears for the news."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from cluster.messages import Request, Sampling, pack_ids
from engine.choice import Choice
from engine.request import Running, stop_ids
from engine.step_loop import News, Outcome, Work
from kv_transfer.blocks import BlockPool

EOS = 1
POISON = 13  # a prompt id that the fake model fails on


def running(
    *ids: int, max_tokens: int = 4, once: bool = False, ignore_stop: bool = True
) -> Running:
    request = Request(
        request_id=f"r{ids[0]}",
        prompt=pack_ids(ids),
        sampling=Sampling(max_tokens=max_tokens, ignore_stop=ignore_stop),
    )
    lease = BlockPool(num_blocks=1024, num_slots=1, block_tokens=16).lease(request.longest)
    return Running(request, lease, list(ids), once=once, stop_ids=stop_ids(request, EOS))


class FakeModel:
    """The next id is the sum of all ids so far; it counts what it is given."""

    def __init__(self) -> None:
        self.steps: list[list[tuple[int, int]]] = []

    def __call__(self, work: Sequence[Work]) -> list[Outcome]:
        self.steps.append([(one.grant.start, one.grant.count) for one in work])
        if any(POISON in one.running.token_ids for one in work):
            raise RuntimeError("poisoned")
        return [Choice(sum(one.running.token_ids)) if one.grant.samples else None for one in work]


class Ears:
    """Collects news; `until` waits for them without a clock."""

    def __init__(self) -> None:
        self.news: list[News] = []
        self._changed = threading.Condition()

    def __call__(self, news: Sequence[News]) -> None:
        with self._changed:
            self.news += news
            self._changed.notify_all()

    def until(self, reached: Callable[[], bool], within_s: float = 10.0) -> None:
        with self._changed:
            assert self._changed.wait_for(reached, timeout=within_s)

    def tokens(self, one: Running) -> list[int]:
        return [n.choice.token for n in self.news if n.running is one and n.choice is not None]

    def ended(self, *several: Running) -> bool:
        return all(any(n.running is one and n.end for n in self.news) for one in several)

    def end(self, one: Running) -> object:
        (end,) = [n.end for n in self.news if n.running is one and n.end is not None]
        return end
