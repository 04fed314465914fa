"""Marks for the tests of sockets and requests: no warning, and nothing left behind."""

from __future__ import annotations

import pytest

STRICT = [
    pytest.mark.filterwarnings("error"),
    pytest.mark.usefixtures("nothing_is_left_behind"),
]
