"""Does something first whenever an awaitable is about to wait, and nothing when it is not.

So what many steps without a wait have made can be sent together, at the moment at which there is
nothing more to add. Knows nothing of what is awaited.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from types import coroutine
from typing import Any, TypeVar

T = TypeVar("T")


@coroutine
def before_waiting(
    work: Awaitable[T], act: Callable[[], Awaitable[None]]
) -> Generator[Any, Any, T]:
    """What `work` returns. `act` is awaited between its first step and its first wait.

    An error of `act`, and whatever ends the wait from outside, is raised inside `work`.
    """
    steps = work.__await__()
    try:
        waits_for = steps.send(None)
        try:
            yield from act().__await__()
        except BaseException as error:
            waits_for = steps.throw(error)
        while True:
            try:
                answer = yield waits_for
            except BaseException as error:  # a cancellation, above all
                waits_for = steps.throw(error)
            else:
                waits_for = steps.send(answer)
    except StopIteration as returned:
        result: T = returned.value
        return result
