"""The independent float64 reference, where a checkout has its folder beside it.

Its modules have no types here, and none of the product's code may come to need it.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import pytest

BESIDE = Path(__file__).resolve().parents[3] / "shared" / "reference"
FOLDER = Path(os.environ.get("TANDEM_ORACLE", BESIDE))


def oracle(module: str) -> Any:
    """Import `v41_checkpoint` or `v41_oracle`, or skip the test."""
    if not (FOLDER / f"{module}.py").exists():
        pytest.skip("the reference folder is not beside this checkout")
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    return importlib.import_module(module)
