"""Functions of elements and rows that a GPU had better compute in one pass each.

torch.compile fuses them where `fuse` was switched on; otherwise they run as they are written.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

_switch = {"on": False}


def switch_on() -> None:
    """For this process, from here on."""
    _switch["on"] = True


def fuse(function: Callable[P, R]) -> Callable[P, R]:
    compiled: list[Callable[P, R]] = []

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not _switch["on"]:
            return function(*args, **kwargs)
        if not compiled:
            compiled.append(torch.compile(function, dynamic=False))
        return compiled[0](*args, **kwargs)

    return call
