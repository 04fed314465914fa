"""A cluster of any configuration, launched on the Ray that this process means, and its end.

From outside, as an operator has it: launch, HTTP, status, take down, and a look at the processes
that it leaves. Knows nothing of what is asked of it.
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from cluster.application import connect, take_down
from cluster.config import ClusterConfig
from cluster.launch import Say, launch
from cluster.processes import Family, alive, born, wait_gone
from cluster.status import collect

READY_S = 60.0  # from healthy to the last rank's first report to the router
GONE_S = 60.0  # from Ray's word that all actors are dead to the end of their processes
LOOK_S = 0.1
Json = dict[str, Any]


class WholeCluster:
    """`with WholeCluster(config, say) as cluster:`; afterwards `left` are processes that live on.

    Launched and ready, with every rank known to the router; taken down whatever happens.
    """

    def __init__(self, config: ClusterConfig, say: Say) -> None:
        self.config = config
        self.up_s = 0.0  # from the launch until the router knew every rank
        self.down_s = 0.0  # until no actor and no key was left
        self.gone_s = 0.0  # from then until no process was: a driver takes its time with contexts
        self.left: list[int] = []
        self.family: Family = {}  # heads of groups, and ranks
        self._say = say

    def __enter__(self) -> WholeCluster:
        began = time.monotonic()
        launch(self.config, say=self._say)
        try:
            self._wait_ready()
            self.up_s = time.monotonic() - began
            self.family = self._processes()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self._end()

    @property
    def url(self) -> str:
        return f"http://{self.config.http.host}:{self.config.http.port}"

    def ranks(self) -> dict[str, int]:
        """How many there shall be, by role."""
        pools = {"prefill": self.config.prefill, "decode": self.config.decode}
        return {role: pool.groups * pool.ranks for role, pool in pools.items() if pool.groups}

    def status(self) -> Json:
        """What `tandem status --json` prints."""
        return collect(self.config.name, connect())

    def handed_over(self) -> dict[str, float]:
        """Bytes of state, by path, as the server's own metrics have them."""
        text = httpx.get(f"{self.url}/metrics", timeout=10.0).text
        return {
            sample.labels["path"]: sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == "tandem_handoff_bytes_total" and sample.value
        }

    def _wait_ready(self) -> None:
        wanted, deadline = self.ranks(), time.monotonic() + READY_S
        while (told := self._ready()) != wanted:
            if time.monotonic() > deadline:
                raise TimeoutError(f"not all ranks are known to the router: {told} of {wanted}")
            time.sleep(LOOK_S)

    def _ready(self) -> Json:
        try:
            answer = httpx.get(f"{self.url}/ready", timeout=10.0)
        except httpx.TransportError:
            return {}
        return dict(answer.json()["ranks"]) if answer.status_code == 200 else {}

    def _processes(self) -> Family:
        groups = self.status()["groups"]
        pids = [one["pid"] for group in groups for one in (group, *group["ranks"])]
        return {pid: birth for pid in pids if pid and (birth := born(pid))}

    def _end(self) -> None:
        began = time.monotonic()
        take_down(self.config.name, say=self._say)
        ended = time.monotonic()
        wait_gone(self.family, GONE_S)
        self.down_s, self.gone_s = ended - began, time.monotonic() - ended
        self.left = alive(self.family)
