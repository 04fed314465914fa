"""One application on Serve, declaratively: what runs, what shall run, and whether it does.

Everything goes through the dashboard's REST (`PUT /api/serve/applications/`), so the same
application submitted twice is left alone and stays when its job has ended. Other applications
are written back as they were. Knows nothing of what the deployments do.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import ray
from ray._private.authentication.http_token_authentication import get_auth_headers_if_auth_enabled
from ray._private.runtime_env.packaging import _dir_travel
from ray._private.services import canonicalize_bootstrap_address
from ray.dashboard.modules.serve.sdk import ServeSubmissionClient
from ray.util.state import list_actors

from cluster.errors import StartupError
from cluster.ray_address import check_admitted, check_reachable
from cluster.ray_services import ApplicationKeys
from cluster.serve_details import (
    Json,
    declared,
    drain_s,
    not_running,
    progress,
    proxy_options,
    state_of,
    why_failed,
)
from cluster.wanted import Wanted

POLL_S = 0.5
LOST_S = 3.0  # an application that Serve does not know so long after it was asked for: ask again
STOP_S = 30.0  # what ending may take beyond the drain
MOST_ACTORS = 10_000


class NotRunning(StartupError):
    """No application of that name runs."""


def connect() -> str:
    """Joins the Ray cluster that RAY_ADDRESS names, else one on this host; returns the URL of its
    dashboard. StartupError if there is none."""
    if not ray.is_initialized():
        on_sigterm = signal.getsignal(signal.SIGTERM)
        try:
            _check_address()
            ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise StartupError(
                f"no Ray cluster can be reached ({error}); start one with `ray start --head`, or "
                "let `tandem up --local` do it"
            ) from error
        if on_sigterm is not signal.SIG_DFL:  # Ray has put its own in the command's place
            signal.signal(signal.SIGTERM, on_sigterm)
    given = os.environ.get("RAY_API_SERVER_ADDRESS")
    url = given or ray._private.worker.global_worker.node.address_info["webui_url"]
    if not url:
        raise StartupError(
            "this Ray cluster has no dashboard, and Serve applications are deployed through it; "
            "start the head with --include-dashboard=true"
        )
    return url if "://" in url else f"http://{url}"


def _check_address() -> None:
    """Of the cluster that ray.init is about to join: ConnectionError if it will find none."""
    address = os.environ.get("RAY_ADDRESS", "auto")
    if address in ("", "auto"):
        address = canonicalize_bootstrap_address("auto")
    check_reachable(address)
    check_admitted(address, get_auth_headers_if_auth_enabled({}))


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
        try:
            with _dashboard_says():
                self._client._upload_working_dir_if_needed(runtime_env)
        except StartupError as error:
            if "413" not in str(error):  # HTTP's word for a body that is too large
                raise
            raise StartupError(too_large(folder)) from error
        return runtime_env["working_dir"]

    @contextmanager
    def trial(self, wanted: Wanted) -> Iterator[None]:
        """Asks Serve for it. If the block does not end well, asks for what ran before."""
        before = [one for one in declared(self.details()) if one["name"] == wanted.name]
        self.put(wanted)
        try:
            yield
        except BaseException:
            self._put(wanted.name, before, wanted.proxy())
            raise

    def put(self, wanted: Wanted) -> None:
        """Asks Serve for it, and for all others as they are."""
        self._put(wanted.name, [wanted.schema()], wanted.proxy())

    def scale(self, name: str, deployment: str, size: int) -> None:
        """Asks Serve for so many replicas; those that are too many drain."""
        path = f"/api/v1/applications/{name}/deployments/{deployment}/scale"
        with _dashboard_says():
            answer = self._client._do_request("POST", path, json_data={"target_num_replicas": size})
            if answer.status_code != 200:
                raise RuntimeError(f"{answer.status_code} {answer.text}")

    def wait_until_healthy(
        self,
        name: str,
        *,
        limit_s: float,
        say: Callable[[str], None],
        check: Callable[[], None],
        lost: Callable[[], None],
    ) -> None:
        """Says each change; StartupError with a failed replica's own words, or at the limit.

        Both may raise: `check` is called between looks and knows why nothing could be placed;
        `lost` when Serve has heard of no such application for a while.
        """
        began = seen = time.monotonic()
        said = ""
        while True:
            application, now = self.find(name), time.monotonic()
            if application is not None and application["status"] != "DELETING":
                seen = now
            elif now - seen > LOST_S:
                lost()
                seen = now
            state, line = state_of(application), progress(application)
            if line != said:
                said = line
                say(line)
            if state == "healthy":
                return
            if state == "failed":
                raise StartupError(why_failed(application))
            if now - began > limit_s:
                raise StartupError(f"not healthy after {limit_s:.0f} s: {line}")
            check()
            time.sleep(POLL_S)

    def remove(self, name: str, *, limit_s: float) -> None:
        """Ends the application and waits for its drain; Serve too, if nothing else runs on it."""
        if self.find(name) is not None:
            self._put(name, [], {})
            deadline = time.monotonic() + limit_s
            while self.find(name) is not None:
                if time.monotonic() > deadline:
                    raise StartupError(f"{name} still runs after {limit_s:.0f} s of shutting down")
                time.sleep(POLL_S)
        if not self.details()["applications"]:
            with _dashboard_says():
                self._client.delete_applications()

    def _put(self, name: str, schemas: list[Json], proxy: Json) -> None:
        """The whole of what Serve shall run: these for `name`, and the others as they are."""
        details = self.details()
        others = [one for one in declared(details) if one["name"] != name]
        if details.get("controller_info", {}).get("actor_id") is not None:
            proxy = proxy_options(details)
        with _dashboard_says():
            self._client.deploy_applications({**proxy, "applications": [*others, *schemas]})


def too_large(folder: str) -> str:
    """What to do about a folder of which Ray takes no package, and what in it is to blame."""
    sizes: Counter[str] = Counter()

    def count(path: Path) -> None:
        if path.is_file():
            sizes[path.relative_to(folder).parts[0]] += path.stat().st_size

    _dir_travel(Path(folder), [_left_out_by_ray], count, include_gitignore=True)
    named = ", ".join(f"{name} ({size / 1e6:.0f} MB)" for name, size in sizes.most_common(3))
    return (
        f"{folder} is too large to be uploaded as code: Ray takes 100 MiB. List what the cluster "
        f"does not run in .rayignore or .gitignore; the largest in it: {named}"
    )


def _left_out_by_ray(path: Path) -> bool:
    return path.name in (".git", ".venv", "venv", "__pycache__")


@contextmanager
def _dashboard_says() -> Iterator[None]:
    """Ray's client raises RuntimeError for an answer that is no success, OSError for none."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        raise StartupError(f"the Ray dashboard refused: {error}") from error


def take_down(name: str, *, say: Callable[[str], None]) -> None:
    """Drains and ends the application, with its keys. NotRunning, or StartupError that names what
    is left of it."""
    applications = Applications(connect())
    running = applications.find(name)
    keys = ApplicationKeys(name)
    if running is None and not keys.left():
        raise NotRunning(not_running(name, applications.details()))
    keys.end_launch()  # one that still waits shall not ask for it again
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
