"""No byte of a request's memory is written once its end was told or its lease was taken.

The device here is as late as can be: what is begun runs only when somebody waits for it, in order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
from torch import Tensor

from decode_worker.scheduler import schedule
from engine.decode_buffer import Row
from engine.executor import Executor
from engine.request import Finished, Running
from engine.step_loop import News, Outcome, StepLoop, Work
from kv_transfer.blocks import BlockPool
from tests.engine.loops import Ears
from tests.tiny import make_request

V, BLOCK = 64, 4
STOP = 7


@dataclass
class LateDevice:
    """Queued work runs when it is waited for; `memory` says of each block who wrote it last."""

    num_blocks: int
    queue: list[Callable[[], None]] = field(default_factory=list)
    done: int = 0
    gone: set[Running] = field(default_factory=set)
    trespasses: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.memory: list[str] = [""] * self.num_blocks
        self.tokens: list[int] = []  # of the step that ran last

    def put(self, work: Callable[[], None]) -> int:
        self.queue.append(work)
        return len(self.queue)

    def run_to(self, number: int) -> None:
        while self.done < number:
            self.done += 1
            self.queue[self.done - 1]()

    def write(self, running: Running, block: int) -> None:
        name = running.request.request_id
        if running in self.gone or running.lease.state == "released":
            self.trespasses.append(name)
        self.memory[block] = name


@dataclass
class LateFlight:
    rows: Sequence[Row]
    device: LateDevice
    number: int
    found: list[int]

    @property
    def logits_RV(self) -> Tensor:
        self.device.run_to(self.number)
        return torch.nn.functional.one_hot(torch.tensor(self.found), V).float()

    def tokens(self) -> Sequence[int]:
        self.device.run_to(self.number)
        return self.found


class LateDecoder:
    """The next token is a function of the one before and the position."""

    may_run_ahead = True

    def __init__(self, device: LateDevice) -> None:
        self.device = device
        self.launched: list[list[str]] = []

    def launch(self, rows: Sequence[Row]) -> LateFlight:
        tables = [row.running.lease.block_ids for row in rows]
        found: list[int] = []

        def run() -> None:
            before = self.device.tokens
            for row, table in zip(rows, tables, strict=True):
                token = row.token if row.source < 0 else before[row.source]
                self.device.write(row.running, table[row.position // BLOCK])
                found.append(after(token, row.position))
            self.device.tokens = list(found)

        self.launched.append([row.running.request.request_id for row in rows])
        return LateFlight(rows, self.device, self.device.put(run), found)


class LateRunner:
    """Prompts: their last chunk gives the first token."""

    def __init__(self, late: LateDevice) -> None:
        self.late, self.device = late, torch.device("cpu")

    def __call__(self, work: Sequence[Work]) -> Tensor:
        tables = [one.running.lease.block_ids for one in work]

        def run() -> None:
            for one, table in zip(work, tables, strict=True):
                for position in range(one.grant.start, one.grant.start + one.grant.count):
                    self.late.write(one.running, table[position // BLOCK])

        number = self.late.put(run)
        wanted = [
            after(one.running.token_ids[-1], len(one.running.token_ids) - 1)
            for one in work
            if one.grant.samples
        ]
        if wanted:  # for tokens somebody waits
            self.late.run_to(number)
        return torch.nn.functional.one_hot(torch.tensor(wanted, dtype=torch.int64), V).float()

    def abandon(self) -> None:
        raise AssertionError("every step has its forward")


def after(token: int, position: int) -> int:
    return (token * 5 + position * 3 + 1) % V


def straight(running: Running) -> list[int]:
    """What its answer is, to the end that it would have alone."""
    ids = list(running.request.token_ids)
    while len(ids) < running.request.longest:
        ids.append(after(ids[-1], len(ids) - 1))
        if ids[-1] in running.stop_ids:
            break
    return ids[running.request.prompt_length :]


class Late:
    """A loop over the late device; `script` acts before a step, by its number."""

    def __init__(self, num_blocks: int = 64) -> None:
        self.device = LateDevice(num_blocks)
        self.pool = BlockPool(num_blocks, 16, BLOCK)
        self.decoder = LateDecoder(self.device)
        self.executor = Executor(LateRunner(self.device), decoder=self.decoder)
        self.ears = Ears()
        self.script: dict[int, Callable[[], None]] = {}
        self.number = 0
        self.loop = StepLoop(
            schedule=partial(schedule, chunk_tokens=8, beside_tokens=8, max_rows=8),
            execute=self._execute,
            deliver=self._deliver,
            settle=self.executor.settle,
            name="late",
        )

    def running(
        self, prompt: int, max_tokens: int, *, length: int = 0, stops: bool = False
    ) -> Running:
        request = make_request(
            range(8, 8 + prompt),
            f"r{prompt}",
            max_tokens=max_tokens,
        )
        lease = self.pool.lease(length or request.longest)
        ends = frozenset((STOP,)) if stops else frozenset[int]()
        return Running(request, lease, list(request.token_ids), stop_ids=ends)

    def play(self, *running: Running) -> None:
        for one in running:
            self.loop.add(one)
        self.loop.start()
        self.ears.until(lambda: self.ears.ended(*running))
        assert self.loop.stop(10)
        self.device.run_to(len(self.device.queue))  # whatever was left to run comes now

    def _execute(self, work: Sequence[Work]) -> Sequence[Outcome]:
        if (act := self.script.pop(self.number, None)) is not None:
            act()
        self.number += 1
        return self.executor(work)

    def _deliver(self, news: Sequence[News]) -> None:
        """From here on the lease may be anybody's."""
        self.device.gone.update(one.running for one in news if one.end is not None)
        self.ears(news)


@pytest.mark.parametrize("step", range(2, 9))
def test_a_removed_requests_memory_is_not_written_after_it_was_told(step: int) -> None:
    late = Late()
    goes, stays = late.running(5, 20), late.running(6, 20)
    late.script[step] = lambda: late.loop.remove(goes)
    late.play(goes, stays)
    assert late.device.trespasses == []
    assert late.ears.tokens(stays) == straight(stays)
    told = late.ears.tokens(goes)
    assert told == straight(goes)[: len(told)]
    assert late.executor.rows_ahead[0] > 10


def test_an_end_that_nobody_foresaw_waits_for_the_step_in_flight() -> None:
    late = Late()
    several = [late.running(prompt, 40, stops=True) for prompt in (3, 4, 5, 6)]
    late.play(*several)
    assert late.device.trespasses == []
    stopped = [one for one in several if STOP in straight(one)]
    assert stopped, "of these answers none ends by a stop id: choose others"
    for one in several:
        assert late.ears.tokens(one) == straight(one)
        assert late.ears.end(one) == Finished("stop" if one in stopped else "length")
    assert late.executor.rows_ahead[1] == len(stopped)  # one row for nothing each


@pytest.mark.parametrize("step", range(1, 6))
def test_a_chunk_is_over_before_anything_of_it_is_told(
    step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one without a token: its rows may be sent off at once, or its request may leave."""
    late = Late()

    class LateMilestone:
        def __init__(self, device: torch.device) -> None:
            self._number = len(late.device.queue)

        def wait(self) -> None:
            late.device.run_to(self._number)

    monkeypatch.setattr("engine.executor.Milestone", LateMilestone)
    prompt = late.running(41, 5)
    late.script[step] = lambda: late.loop.remove(prompt)
    late.play(prompt)
    assert late.device.trespasses == []
    assert late.ears.tokens(prompt) == straight(prompt)[: len(late.ears.tokens(prompt))]


def test_blocks_that_are_taken_are_settled_first() -> None:
    late = Late(num_blocks=8)
    old, young = late.running(5, 20, length=6), late.running(6, 20, length=7)
    late.play(old, young)
    assert late.device.trespasses == []
    assert late.ears.tokens(old) == straight(old)
    assert young.lease.state == "released"


def test_a_loop_that_stops_has_settled_all() -> None:
    late = Late()
    one = late.running(5, 50)
    stop = Stopper(late.loop)
    late.script[4] = stop
    late.play(one)
    assert late.device.trespasses == []


def test_without_the_fence_the_device_would_write_into_others_memory() -> None:
    """The same ends with a settle that does nothing: the tests above can fail."""
    late = Late()
    late.loop._settle = lambda running: None
    several = [late.running(prompt, 40, stops=True) for prompt in (3, 4, 5, 6)]
    late.play(*several)
    stopped = {one.request.request_id for one in several if STOP in straight(one)}
    assert set(late.device.trespasses) == stopped


class Stopper:
    """Tells the loop to stop after the step in progress."""

    def __init__(self, loop: StepLoop) -> None:
        self._loop = loop

    def __call__(self) -> None:
        with self._loop._wake:
            self._loop._stopping = True
