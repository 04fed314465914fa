"""The benchmark of a whole cluster, rehearsed without a GPU: every part of it holds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.full, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]


def test_every_part_holds_on_a_cpu_and_nothing_is_left(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    words = ["--cpu", "--long", "300", "--output", "8", "--shape", "1+2x2", "--json", str(out)]
    told = subprocess.run(
        [sys.executable, "-m", "tests.bench_cluster_gpu", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=850,
    )
    assert told.returncode == 0, told.stdout + told.stderr
    found = json.loads(out.read_text(encoding="utf-8"))
    assert [part["part"] for part in found] == [
        "colocated",
        "direct",
        "domain",
        "packed",
        "the end",
    ]
    assert "4 of 4 the same tokens" in found[2]["rows"]["against colocated"]
