"""A copy of the code and a Ray head of its own, operated from outside: commands, HTTP, signals."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster import local_ray
from tests.ray.streaming import Streaming, request_body

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
CONFIG = "deploy/configs/local.toml"
DEPLOYMENTS = ("Ingress", "Router", "Prefill", "Decode")
JOB_ACTOR = "_ray_internal_job_actor_"
NEW_REQUEST_WAIT_S = 1.0  # shorter than any group takes to be replaced
PYTHON = sys.executable
TOKENS = 12
LOOK_S = 0.2  # between two looks; each costs Serve's controller 20 ms
Told = subprocess.CompletedProcess[str]


@dataclass(frozen=True)
class Site:
    """The application `name`, as it is launched from `folder` on that Ray."""

    folder: Path
    head: local_ray.LocalRay
    port: int
    name: str = "tandem"

    @property
    def http(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def beside(self, name: str) -> Site:
        """Another application on the same Ray, on a port of its own."""
        with local_ray.free_ports(1) as (port,):
            return replace(self, name=name, port=port)

    # ------------------------------------------------------------ commands

    def start(self, *words: str, program: str = PYTHON) -> subprocess.Popen[str]:
        """A command in the copy, on that Ray, not waited for; python unless it is said."""
        return subprocess.Popen(
            [program, *words],
            cwd=self.folder,
            env=os.environ | self.head.settings() | {"TANDEM_URL": self.http},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *words: str, program: str = PYTHON) -> Told:
        return ended(self.start(*words, program=program))

    def start_tandem(self, *words: str) -> subprocess.Popen[str]:
        named = () if self.name == "tandem" else ("--name", self.name)
        return self.start("-m", "cluster.cli", *words, *named)

    def tandem(self, *words: str) -> Told:
        return ended(self.start_tandem(*words))

    def start_example(self, name: str) -> subprocess.Popen[str]:
        """A file of examples/, told where HTTP is by the environment as a user would."""
        return self.start(f"examples/{name}", program="bash" if name.endswith(".sh") else PYTHON)

    def launching(self, *overrides: str) -> list[str]:
        """The command that launches the application, for `start` and `run`."""
        mine = (
            f"name={self.name}",
            f"http.port={self.port}",
            f"generation.new_request_wait_s={NEW_REQUEST_WAIT_S}",
            *overrides,
        )
        words = [word for one in mine for word in ("--set", one)]
        return ["cluster/launch.py", "--config", CONFIG, *words]

    def launch(self, *overrides: str) -> Told:
        return self.run(*self.launching(*overrides))

    def start_submit(self, *overrides: str) -> subprocess.Popen[str]:
        """As the README says it."""
        words = ["job", "submit", "--working-dir", ".", "--", "python"]
        ray = Path(sys.executable).parent / "ray"
        return self.start(*words, *self.launching(*overrides), program=str(ray))

    def submit(self, *overrides: str) -> Told:
        return ended(self.start_submit(*overrides))

    def scale(self, deployment: str, size: int) -> None:
        """At once, by the dashboard server's own API, and not waited for."""
        url = (
            f"{self.head.dashboard}/api/v1/applications/{self.name}/deployments/{deployment}/scale"
        )
        httpx.post(url, json={"target_num_replicas": size}).raise_for_status()

    # ------------------------------------------------------------ what runs

    def serve(self, path: str = "applications/") -> dict[str, Any]:
        told: dict[str, Any] = httpx.get(f"{self.head.dashboard}/api/serve/{path}").json()
        return told

    def application(self) -> dict[str, Any]:
        found: dict[str, Any] = self.serve()["applications"][self.name]
        return found

    def sizes(self) -> dict[str, int]:
        deployments = self.application()["deployments"]
        return {name: one["target_num_replicas"] for name, one in deployments.items()}

    def actors(self) -> dict[str, int]:
        """Pids of every living actor on this Ray, by name; without those that run jobs, which are
        gone a moment after their job."""
        url = f"{self.head.dashboard}/api/v0/actors"
        told = httpx.get(url, params={"limit": 1000}).json()["data"]["result"]["result"]
        return {
            actor["name"]: actor["pid"]
            for actor in told
            if actor["state"] == "ALIVE" and not actor["name"].startswith(JOB_ACTOR)
        }

    def places(self) -> set[str]:
        """Names of every placement group that is held or waited for."""
        url = f"{self.head.dashboard}/api/v0/placement_groups"
        told = httpx.get(url, params={"limit": 1000}).json()["data"]["result"]["result"]
        return {group["name"] for group in told if group["state"] != "REMOVED"}

    def ranks(self, role: str = "") -> dict[str, int]:
        """Pids of every rank and of the head of its group."""
        return {
            name: pid
            for name, pid in self.actors().items()
            if name.startswith(("prefill-", "decode-")) or "#Prefill#" in name or "#Decode#" in name
            if role in name.lower()
        }

    def ranks_of(self) -> dict[str, int]:
        """Pids of the living ranks of this application."""
        tags = [
            replica["replica_id"]
            for one in self.serve()["applications"]
            .get(self.name, {})
            .get("deployments", {})
            .values()
            for replica in one["replicas"]
        ]
        return {
            name: pid
            for name, pid in self.actors().items()
            if "/" in name and any(f"-{tag}/" in name for tag in tags)
        }

    def is_healthy(self) -> bool:
        application = self.serve()["applications"].get(self.name, {"status": "", "deployments": {}})
        deployments = application["deployments"].values()
        return application["status"] == "RUNNING" and all(
            one["status"] == "HEALTHY"
            and [replica["state"] for replica in one["replicas"]]
            == ["RUNNING"] * one["target_num_replicas"]
            for one in deployments
        )

    def settle(self) -> None:
        """Until it is healthy, and ready for requests."""
        until(self.is_healthy, 60)
        until(lambda: self.answers() and self.ready().status_code == 200, 30)

    def answers(self) -> bool:
        """Whether its port does, with anything."""
        try:
            return bool(self.ready().status_code)
        except httpx.TransportError:
            return False

    def ready(self) -> httpx.Response:
        return httpx.get(f"{self.http}/ready", timeout=5.0)

    # ------------------------------------------------------------ requests

    def ask(self, tokens: int = TOKENS) -> httpx.Response:
        return httpx.post(f"{self.http}/v1/completions", json=request_body(tokens), timeout=90.0)

    def complete(self, tokens: int = TOKENS) -> list[int]:
        """Token ids of the same greedy answer each time."""
        answer = self.ask(tokens)
        assert answer.status_code == 200, answer.text
        token_ids: list[int] = answer.json()["choices"][0]["token_ids"]
        return token_ids

    @contextmanager
    def streaming(self, tokens: int, streams: int = 1) -> Iterator[list[Streaming]]:
        """Streams of that answer that have begun; joined, whatever happens."""
        begun = [Streaming(f"{self.http}/v1/completions", tokens) for _ in range(streams)]
        try:
            for one in begun:
                assert one.first.wait(30.0), one.told
            yield begun
        finally:
            for one in begun:
                one.thread.join(90.0)


@contextmanager
def site_in(folder: Path, *, cpus: int = 4) -> Iterator[Site]:
    """The code as it is now, and a head; its processes have ended when the block has."""
    for name in CODE:
        source, target = ROOT / name, folder / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)
    with pytest.MonkeyPatch.context() as patch, local_ray.free_ports(1) as (port,):
        patch.setenv("RAY_AUTH_MODE", "disabled")
        head = local_ray.start(cpus=cpus)
    try:
        yield Site(folder, head, port)
    finally:
        head.stop()


def ended(process: subprocess.Popen[str]) -> Told:
    """Once it has ended by itself."""
    with process:
        out, err = process.communicate(timeout=250)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def until(condition: Callable[[], Any], within_s: float) -> Any:
    deadline = time.monotonic() + within_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {within_s} s"
        time.sleep(LOOK_S)
    return found
