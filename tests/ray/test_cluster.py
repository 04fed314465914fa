"""One Ray head, one application, from the first submit to the last process, in this order.

Everything is done as an operator does it: by commands, HTTP and signals, from outside.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster import local_ray

pytestmark = pytest.mark.ray

ROOT = Path(__file__).parents[2]
CODE = (
    "cluster",
    "prefill_worker",
    "decode_worker",
    "engine",
    "kv_transfer",
    "model",
    "kernels",
    "deploy",
    "examples",
    "tests/ray",
    "pyproject.toml",
)
DEPLOYMENTS = ("Ingress", "Router", "Prefill", "Decode")
PROMPT = "def add(a, b):"
TOKENS = 12


@dataclass(frozen=True)
class Site:
    """A copy of the code, as it was when the tests began, and the Ray it is launched on."""

    folder: Path
    head: local_ray.LocalRay
    port: int

    @property
    def http(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """A python command in the copy, on that Ray."""
        return subprocess.run(
            [sys.executable, *words],
            cwd=self.folder,
            env=os.environ | self.head.settings(),
            capture_output=True,
            text=True,
            timeout=90,
        )

    def example(self, name: str) -> subprocess.CompletedProcess[str]:
        """A file of examples/, told where HTTP is by the environment as a user would."""
        shell = name.endswith(".sh")
        return subprocess.run(
            ["bash" if shell else sys.executable, f"examples/{name}"],
            cwd=self.folder,
            env=os.environ | self.head.settings() | {"TANDEM_URL": self.http},
            capture_output=True,
            text=True,
            timeout=90,
        )

    def launch(self, *overrides: str) -> subprocess.CompletedProcess[str]:
        words = [word for one in (f"http.port={self.port}", *overrides) for word in ("--set", one)]
        config = "deploy/configs/local.toml"
        return self.run("cluster/launch.py", "--config", config, *words)

    def submit(self) -> subprocess.CompletedProcess[str]:
        """As the README says it."""
        ray = Path(sys.executable).parent / "ray"
        return subprocess.run(
            f"{ray} job submit --working-dir . -- python cluster/launch.py "
            f"--config deploy/configs/local.toml --set http.port={self.port}",
            shell=True,
            cwd=self.folder,
            env=os.environ | self.head.settings(),
            capture_output=True,
            text=True,
            timeout=90,
        )

    def actors(self) -> dict[str, int]:
        """Pids of every living actor, by name."""
        url = f"{self.head.dashboard}/api/v0/actors"
        told = httpx.get(url, params={"limit": 1000}).json()["data"]["result"]["result"]
        return {actor["name"]: actor["pid"] for actor in told if actor["state"] == "ALIVE"}

    def ranks(self) -> dict[str, int]:
        """Pids of every rank and of the head of its group."""
        return {
            name: pid
            for name, pid in self.actors().items()
            if name.startswith(("prefill-", "decode-")) or "#Prefill#" in name or "#Decode#" in name
        }

    def complete(self) -> list[int]:
        """Token ids of the same greedy answer each time."""
        body = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "return_token_ids": True}
        answer = httpx.post(f"{self.http}/v1/completions", json=body, timeout=60.0)
        assert answer.status_code == 200, answer.text
        token_ids: list[int] = answer.json()["choices"][0]["token_ids"]
        return token_ids


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    for name in CODE:
        source, target = ROOT / name, folder / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)
    with pytest.MonkeyPatch.context() as patch, local_ray.free_ports(1) as (port,):
        patch.setenv("RAY_AUTH_MODE", "disabled")
        head = local_ray.start(cpus=4)
    try:
        yield Site(folder, head, port)
    finally:
        head.stop()


def until(condition: Callable[[], Any], within_s: float) -> Any:
    deadline = time.monotonic() + within_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {within_s} s"
        time.sleep(0.1)
    return found


def test_one_job_launches_the_cluster_and_ends(site: Site) -> None:
    job = site.submit()
    assert job.returncode == 0, job.stdout + job.stderr
    assert "succeeded" in job.stdout + job.stderr
    url = f"{site.head.dashboard}/api/serve/applications/"
    application = httpx.get(url).json()["applications"]["tandem"]
    assert application["status"] == "RUNNING"
    assert {
        name: one["status"] for name, one in application["deployments"].items()
    } == dict.fromkeys(DEPLOYMENTS, "HEALTHY")
    until(lambda: httpx.get(f"{site.http}/ready").status_code == 200, 10)


def test_a_real_prompt_streams_through_both_ranks(site: Site) -> None:
    body = {"prompt": PROMPT, "max_tokens": TOKENS, "stream": True, "timeline": True, "seed": 1}
    with httpx.stream("POST", f"{site.http}/v1/completions", json=body, timeout=60.0) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    events = {event["event"]: event for event in json.loads(lines[-1])["timeline"]["events"]}
    assert events["routed"]["prefill"].startswith("prefill-")
    assert events["routed"]["decode"].startswith("decode-")
    assert events["handed_over"]["bytes"] > 0


def test_a_handle_in_another_process_streams_the_same_tokens(site: Site) -> None:
    told = site.run("examples/client_handle.py", "--prompt", PROMPT, "--max-tokens", str(TOKENS))
    assert told.returncode == 0, told.stderr
    token_ids = [int(word) for word in told.stdout.splitlines()[0].split()]
    assert token_ids == site.complete()
    assert "handed_over" in told.stdout


@pytest.mark.parametrize("example", ["openai_client.py", "ray_program.py", "curl.sh"])
def test_every_example_prints_the_same_answer(site: Site, example: str) -> None:
    body = {"prompt": "def add(a, b):", "max_tokens": 16, "temperature": 0}
    answer = httpx.post(f"{site.http}/v1/completions", json=body, timeout=60.0).json()
    text: str = answer["choices"][0]["text"]
    told = site.example(example)
    assert told.returncode == 0, told.stderr
    if example == "curl.sh":
        assert json.loads(told.stdout.splitlines()[0])["choices"][0]["text"] == text
        assert "data: [DONE]" in told.stdout
    else:
        assert told.stdout.startswith(text)


def test_status_knows_every_process_and_its_load(site: Site) -> None:
    told = site.run("-m", "cluster.cli", "status", "--json")
    assert told.returncode == 0, told.stderr
    status = json.loads(told.stdout)
    assert status["application"]["status"] == "RUNNING"
    assert {one["name"]: one["running"] for one in status["deployments"]} == dict.fromkeys(
        DEPLOYMENTS, 1
    )
    assert status["router"]["answers"]
    ranks = [rank for group in status["groups"] for rank in group["ranks"]]
    assert {rank["name"]: rank["pid"] for rank in ranks}.items() <= site.ranks().items()
    assert all(rank["load"]["total_blocks"] for rank in ranks)


def test_the_same_submit_again_changes_no_process(site: Site) -> None:
    before = site.ranks()
    assert len(before) == 4
    job = site.submit()
    assert job.returncode == 0, job.stdout + job.stderr
    assert site.ranks() == before


def test_a_launch_that_cannot_be_placed_says_what_lacks_and_touches_nothing(site: Site) -> None:
    before, began = site.actors(), time.monotonic()
    refused = site.launch("decode.gpus=1")
    assert refused.returncode != 0
    assert time.monotonic() - began < 30
    assert "rank 0 of Decode group 0 cannot be placed: its bundle needs" in refused.stderr
    assert "GPU 0 free of 0" in refused.stderr
    assert site.actors() == before


def test_a_rank_that_cannot_start_says_why_and_the_old_ones_go_on(site: Site) -> None:
    before = site.ranks()
    cursed = "rank=tests.ray.cursed:CursedRank"
    failed = site.launch(f"prefill.{cursed}", f"decode.{cursed}")
    assert failed.returncode != 0
    assert "RuntimeError: the weights are cursed" in failed.stderr
    assert "Traceback" not in failed.stderr
    assert len(site.complete()) == TOKENS
    until(lambda: site.ranks() == before, 30)


def test_a_dead_rank_is_replaced_with_its_group_and_requests_go_on(site: Site) -> None:
    expected, before = site.complete(), site.ranks()
    decode = next(name for name in before if name.startswith("decode-"))
    os.kill(before[decode], signal.SIGKILL)
    assert site.complete() == expected  # held until there is a decode rank again
    after = site.ranks()
    assert decode not in after
    assert len(after) == 4


def test_down_leaves_nothing(site: Site) -> None:
    pids = site.actors().values()
    down = site.run("-m", "cluster.cli", "down")
    assert down.returncode == 0, down.stdout + down.stderr
    assert not site.actors()
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 10)
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", site.port)) != 0
    assert f"@tandem-http-{site.port}" not in Path("/proc/net/unix").read_text()
    assert not [one.name for one in Path("/dev/shm").iterdir() if "ucx" in one.name]
    again = site.run("-m", "cluster.cli", "down")
    assert "does not run" in again.stdout  # so no key is left either
