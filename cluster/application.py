"""One application on Serve, declaratively: what runs, what shall run, and whether it does.

Everything goes through the dashboard's REST (`PUT /api/serve/applications/`), so the same
application submitted twice is left alone and stays when its job has ended. Other applications
are written back as they were. Knows nothing of what the deployments do.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import ray
from ray.dashboard.modules.serve.sdk import ServeSubmissionClient
from ray.util.state import list_actors

from cluster.errors import StartupError
from cluster.ray_services import ApplicationKeys
from cluster.serve_details import (
    Json,
    declared,
    drain_s,
    progress,
    proxy_options,
    state_of,
    why_failed,
)

POLL_S = 0.5
STOP_S = 30.0  # what ending may take beyond the drain
MOST_ACTORS = 10_000
IMPORT_PATH = "cluster.launch:build"


@dataclass(frozen=True)
class Wanted:
    """What a launch asks of Serve."""

    name: str
    args: Json  # a change restarts every deployment
    sizes: Mapping[str, int]  # replicas by deployment; a change only adds or drops replicas
    surge: bool  # is there room for a whole second application while it replaces the first?
    runtime_env: Json
    proxy_port: int  # of Serve's own proxy, if Serve is not running yet; 0: none
    proxy_host: str

    def schema(self) -> Json:
        return {
            "name": self.name,
            "route_prefix": f"/{self.name}",
            "import_path": IMPORT_PATH,
            "runtime_env": self.runtime_env,
            "external_scaler_enabled": True,
            "args": self.args,
            "deployments": [
                {
                    "name": name,
                    "num_replicas": size,
                    "max_surge_percent": 100 if self.surge else 0,
                }
                for name, size in self.sizes.items()
            ],
        }

    def proxy(self) -> Json:
        return {
            "proxy_location": "HeadOnly" if self.proxy_port else "Disabled",
            "http_options": {"host": self.proxy_host, "port": self.proxy_port or 8000},
        }


def connect() -> str:
    """Joins the Ray cluster that RAY_ADDRESS names, else one on this host; returns the URL of its
    dashboard. StartupError if there is none."""
    if not ray.is_initialized():
        try:
            ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise StartupError(
                f"no Ray cluster can be reached ({error}); start one with `ray start --head`, or "
                "let `tandem up --local` do it"
            ) from error
    given = os.environ.get("RAY_API_SERVER_ADDRESS")
    url = given or ray._private.worker.global_worker.node.address_info["webui_url"]
    if not url:
        raise StartupError(
            "this Ray cluster has no dashboard, and Serve applications are deployed through it; "
            "start the head with --include-dashboard=true"
        )
    return url if "://" in url else f"http://{url}"


def disconnect() -> None:
    """Leaves the Ray cluster; it goes on without us."""
    ray.shutdown()


class Applications:
    """The applications of one cluster's Serve."""

    def __init__(self, dashboard: str) -> None:
        self.dashboard = dashboard
        with _dashboard_says():
            self._client = ServeSubmissionClient(dashboard)

    def details(self) -> Json:
        with _dashboard_says():
            details: Json = self._client.get_serve_details()
        return details

    def find(self, name: str) -> Json | None:
        found: Json | None = self.details()["applications"].get(name)
        return found

    def package(self, folder: str) -> str:
        """The folder's content as a package in the cluster, the same one that a job would make."""
        logging.getLogger("ray.dashboard.modules.dashboard_sdk").setLevel(logging.WARNING)
        runtime_env = {"working_dir": folder}
        with _dashboard_says():
            self._client._upload_working_dir_if_needed(runtime_env)
        return runtime_env["working_dir"]

    def put(self, wanted: Wanted) -> Callable[[], None]:
        """Asks Serve for it; returns how to ask for what ran before."""
        details = self.details()
        before = declared(details)
        others = [schema for schema in before if schema["name"] != wanted.name]
        running = details.get("controller_info", {}).get("actor_id") is not None
        proxy = proxy_options(details) if running else wanted.proxy()
        self._deploy({**proxy, "applications": [*others, wanted.schema()]})
        return lambda: self._deploy({**proxy, "applications": before})

    def wait_until_healthy(
        self, name: str, *, limit_s: float, say: Callable[[str], None], check: Callable[[], None]
    ) -> None:
        """Says each change; StartupError with a failed replica's own words, or at the limit.

        `check` is called between looks and may raise: it knows why nothing could be placed.
        """
        began, said = time.monotonic(), ""
        while True:
            application = self.find(name)
            state, line = state_of(application), progress(application)
            if line != said:
                said = line
                say(line)
            if state == "healthy":
                return
            if state == "failed":
                raise StartupError(why_failed(application))
            if time.monotonic() - began > limit_s:
                raise StartupError(f"not healthy after {limit_s:.0f} s: {line}")
            check()
            time.sleep(POLL_S)

    def remove(self, name: str, *, limit_s: float) -> None:
        """Ends the application and waits for its drain; Serve too, if nothing else runs on it."""
        details = self.details()
        if name in details["applications"]:
            others = [schema for schema in declared(details) if schema["name"] != name]
            self._deploy({**proxy_options(details), "applications": others})
            deadline = time.monotonic() + limit_s
            while self.find(name) is not None:
                if time.monotonic() > deadline:
                    raise StartupError(f"{name} still runs after {limit_s:.0f} s of shutting down")
                time.sleep(POLL_S)
        if not self.details()["applications"]:
            with _dashboard_says():
                self._client.delete_applications()

    def _deploy(self, config: Json) -> None:
        with _dashboard_says():
            self._client.deploy_applications(config)


@contextmanager
def _dashboard_says() -> Iterator[None]:
    """Ray's client raises RuntimeError for an answer that is no success, OSError for none."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        raise StartupError(f"the Ray dashboard refused: {error}") from error


def take_down(name: str, *, say: Callable[[str], None]) -> None:
    """Drains and ends the application, with its keys; StartupError names what is left of it."""
    applications = Applications(connect())
    running = applications.find(name)
    keys = ApplicationKeys(name)
    if running is None and not keys.left():
        say(f"{name} does not run")
        return
    say(f"draining {name}")
    applications.remove(name, limit_s=drain_s(running) + STOP_S)
    keys.delete_all()
    deadline = time.monotonic() + STOP_S
    while left := _actors_of(name, applications.dashboard) + keys.left():
        if time.monotonic() > deadline:
            raise StartupError(f"{name} has ended, but these are left: {', '.join(left)}")
        time.sleep(POLL_S)
    say(f"{name} has ended: no actor and no key is left")


def _actors_of(name: str, dashboard: str) -> list[str]:
    alive = [("state", "!=", "DEAD")]
    return [
        f"{actor.name} (pid {actor.pid})"
        for actor in list_actors(address=dashboard, filters=alive, limit=MOST_ACTORS)
        if actor.ray_namespace == name or actor.class_name.startswith(f"ServeReplica:{name}:")
    ]
