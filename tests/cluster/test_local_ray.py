"""Ending processes by number: all of a family, and nobody else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cluster import local_ray
from cluster.local_ray import LocalRay
from cluster.processes import alive, born

# Stays when asked to end, like a Ray whose actors still run, and so does its child.
STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if len(sys.argv) == 1:
    subprocess.Popen([sys.executable, __file__, "child"])
print("up", flush=True)
time.sleep(600)
"""


def head(folder: Path, script: str) -> tuple[LocalRay, subprocess.Popen[str]]:
    folder.mkdir()
    (folder / "head.py").write_text(script)
    process = subprocess.Popen(
        [sys.executable, folder / "head.py"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for _ in range(1 + script.count("Popen")):
        process.stdout.readline()
    birth = born(process.pid)
    assert birth is not None
    ray = LocalRay(process.pid, birth, str(folder), "127.0.0.2:1", "http://127.0.0.1:1", "token")
    return ray, process


def test_stop_ends_the_whole_family_even_a_stubborn_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_ray, "ORDERLY_STOP_S", 0.1)
    ray, process = head(tmp_path / "ray", STUBBORN)
    family = ray.family()
    assert len(family) == 2
    ray.stop()
    assert alive(family) == []
    process.wait()
    assert not (tmp_path / "ray").exists()


def test_a_number_that_is_used_again_is_another_process() -> None:
    mine = {os.getpid(): "1"}  # born with the machine
    assert alive(mine) == []


def test_an_earlier_head_is_found_while_it_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert local_ray.running() is None
    ray, process = head(tmp_path / "ray", "import time\nprint(flush=True)\ntime.sleep(600)\n")
    local_ray.remember(ray)
    assert local_ray.running() == ray
    ray.stop()
    process.wait()
    assert local_ray.running() is None
    assert ray.settings()["RAY_AUTH_TOKEN_PATH"].startswith(str(tmp_path))
