"""The list of traps: what each plants, and the case that must show it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

Plant = Callable[[pytest.MonkeyPatch], None]
TRAPS: dict[str, tuple[str, Plant]] = {}


def trap(case: str) -> Callable[[Plant], Plant]:
    """Register a trap under its function's name, to be run on a case of cases.py."""

    def register(plant: Plant) -> Plant:
        assert plant.__name__ not in TRAPS
        TRAPS[plant.__name__] = (case, plant)
        return plant

    return register
