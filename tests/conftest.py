"""Settings of the whole suite."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings

# Machines are shared: time is no property. The same examples each time: a red run can be run again.
settings.register_profile("tandem", deadline=None, derandomize=True)
settings.load_profile("tandem")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Row invariance first: where it does not hold, every test of equal tokens is in vain.

    What needs a GPU is skipped where there is none.
    """
    items.sort(key=lambda item: "row_invariance" not in item.nodeid)
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
