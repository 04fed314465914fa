"""The Triton kernels of training equal their reference, in the interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_kernels_and_their_gradients_equal_the_reference() -> None:
    """In a process of its own: Triton decides when it is imported whether to interpret."""
    told = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("compare_kernels.py"))],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert told.returncode == 0, told.stderr
    assert told.stdout.count("equal") == 3
