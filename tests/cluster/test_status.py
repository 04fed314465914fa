"""What `tandem status` shows of what was collected, and what the command says without Ray."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cluster import cli
from cluster.messages import Load, PairPath
from cluster.status import render

LOAD = Load(running=2, waiting=1, free_blocks=500, total_blocks=512).model_dump()


def rank(name: str, *, load: dict[str, Any] | None = LOAD, draining: bool = False) -> Any:
    return {
        "name": name,
        "pid": 4711,
        "node": "n",
        "load": load,
        "draining": draining,
        "follows": False,
    }


def status(
    *ranks: Any, router: Any = None, message: str = "", pairs: Sequence[Any] = ()
) -> dict[str, Any]:
    return {
        "application": {
            "name": "tandem",
            "status": "RUNNING",
            "message": message,
            "http": "http://127.0.0.1:8100/v1",
        },
        "deployments": [
            {"name": "Decode", "status": "HEALTHY", "running": 1, "target": 2, "message": ""}
        ],
        "groups": [{"name": "decode-a", "state": "RUNNING", "pid": 42, "ranks": ranks}],
        "pairs": pairs,
        "router": router,
    }


def test_every_rank_has_its_line() -> None:
    shown = render(status(rank("decode-a/0"), rank("decode-a/1", load=None)))
    assert "tandem  RUNNING  http://127.0.0.1:8100/v1" in shown
    assert "Decode   HEALTHY    1/2" in shown
    assert "decode-a  RUNNING  head pid 42" in shown
    first, second = [line for line in shown.splitlines() if "decode-a/" in line]
    assert first.endswith("pid 4711     2 running, 1 waiting, 500/512 blocks free")
    assert second.endswith("not heard of by the router")


def test_what_leaves_and_what_fails_is_said() -> None:
    shown = render(status(rank("decode-a/0", draining=True), message="Traceback\nit broke"))
    assert "blocks free, draining" in shown
    follower = {**rank("prefill-a/1"), "follows": True}
    assert "/1          pid 4711     computes prompts of the rank" in render(status(follower))
    assert "it broke" in shown
    assert "router: none is published" in shown


@pytest.mark.parametrize(
    ("answers", "error", "said"), [(True, None, "answers"), (False, "refused", "refused")]
)
def test_the_router_answers_or_says_why_not(answers: bool, error: str | None, said: str) -> None:
    router = {"incarnation": "1a", "address": "h:1", "answers": answers, "error": error}
    assert render(status(router=router)).splitlines()[-1].startswith("router 1a at h:1")
    assert said in render(status(router=router))


def test_every_pair_of_ranks_has_its_path_its_speed_and_the_reason_for_a_detour() -> None:
    quick = PairPath(
        decode="decode-a/0",
        path="nvlink/cuda_ipc",
        direct=True,
        latency_s=4.7e-5,
        gb_per_s=40.0,
        expected_gb_per_s=100.0,
    )
    other = PairPath(decode="decode-b/0", path="nixl/UCX", direct=False, why="another host")
    pairs = [{"prefill": "prefill-a/0", **pair.model_dump()} for pair in (quick, other)]
    shown = [line for line in render(status(pairs=pairs)).splitlines() if "prefill-a/0 to" in line]
    assert shown == [
        "  prefill-a/0 to decode-a/0: nvlink/cuda_ipc, 40.0 GB/s, 47 us (slow: 100 GB/s expected)",
        "  prefill-a/0 to decode-b/0: nixl/UCX; not direct: another host",
    ]


def test_nothing_runs() -> None:
    nothing: dict[str, Any] = {"application": None, "deployments": [], "groups": []}
    assert "tandem up" in render(nothing)


def test_help_needs_neither_ray_nor_torch(tmp_path: Path) -> None:
    for name in ("ray", "torch"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported')\n")
    told = subprocess.run(
        [sys.executable, "-m", "cluster.cli", "--help"],
        cwd=Path(cli.__file__).parents[1],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert told.returncode == 0, told.stderr
    for command in ("up", "down", "status", "demo", "inspect"):
        assert command in told.stdout
