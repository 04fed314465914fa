"""Runs a module that the control plane must not import, in a process of its own, and reads it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from cluster.errors import StartupError

ROOT = Path(__file__).resolve().parents[2]


def probe(
    module: str, *words: str, limit_s: float, variables: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The JSON object that `python -m module` prints last. StartupError with its last words.

    Whatever it has started ends with it, also when it takes too long.
    """
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        [sys.executable, "-m", module, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": path} | dict(variables or {}),
        start_new_session=True,
    )
    try:
        told, complaint = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        raise StartupError(f"{module} has not ended within {limit_s:g} s") from None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    if process.returncode != 0:
        said = [line for line in complaint.splitlines() if line.strip()]
        raise StartupError(said[-1] if said else f"{module} ended with {process.returncode}")
    found: dict[str, Any] = json.loads(told.splitlines()[-1])
    return found
