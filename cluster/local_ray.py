"""A Ray head of our own on this machine, for those who have none; and its end, to the last process.

In a folder of its own, remembered in one small file so that a later command finds it. Ray's own
sockets listen on every interface, so unless told otherwise the head asks for a token that only
this user can read. Never `ray stop`, which ends every cluster on the host.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from cluster.errors import StartupError
from cluster.processes import Family, alive, born, family_of, send, wait_gone

START_LIMIT_S = 120.0
ORDERLY_STOP_S = 1.0  # for ranks to end; Ray itself takes longer than ten, and tidies up nothing
STOP_LIMIT_S = 15.0
NODE_ADDRESS = "127.0.0.2"  # 127.0.0.1 Ray replaces by the machine's outer address
OWN_PORTS = range(20_000, 32_000)  # the kernel deals out higher ones, by the dozen, to Ray itself
TOKEN = "auth-token"
OBJECT_STORE_BYTES = 100 << 20  # nothing of ours goes through the object store


@dataclass(frozen=True)
class LocalRay:
    """A running head; `born` tells its process from a later one of the same number."""

    pid: int
    born: str
    folder: str
    address: str  # of the control store, for RAY_ADDRESS
    dashboard: str  # URL
    auth_mode: str  # "token" or "disabled"

    def enter_environment(self) -> None:
        """From now on this process and its children mean this cluster; see prefer()."""
        os.environ |= self.settings()

    def settings(self) -> dict[str, str]:
        """Variables by which a program means this cluster."""
        settings = {"RAY_ADDRESS": self.address, "RAY_API_SERVER_ADDRESS": self.dashboard}
        return settings | _ray_settings(self.auth_mode, self.folder)

    def stop(self) -> None:
        """Ends its processes, by number, and removes its folder. Returns when all are gone."""
        family = self.family()
        send({self.pid: self.born}, signal.SIGTERM)  # --block ends its children in order
        if not wait_gone(family, ORDERLY_STOP_S):
            family |= self.family()  # those that a head in mid-start has started since
            send(family, signal.SIGKILL)
            if not wait_gone(family, STOP_LIMIT_S):
                left = ", ".join(map(str, alive(family)))
                raise StartupError(f"processes of the local Ray do not end: {left}")
        with suppress(ChildProcessError):
            os.waitpid(self.pid, os.WNOHANG)
        shutil.rmtree(self.folder, ignore_errors=True)
        if _noted() == self:
            _note().unlink(missing_ok=True)

    def family(self) -> Family:
        """Every process of it now, those of the ranks included."""
        return family_of(self.pid)


def remember(head: LocalRay) -> None:
    """So that a later command finds it."""
    _note().parent.mkdir(parents=True, exist_ok=True)
    _note().write_text(json.dumps(asdict(head)), encoding="utf-8")


def running() -> LocalRay | None:
    """The head that an earlier command started, if it still lives."""
    found = _noted()
    return found if found and born(found.pid) == found.born else None


def prefer() -> None:
    """Unless RAY_ADDRESS names a cluster, this process means the head of `tandem up --local`, if
    there is one. To be called before ray is imported, which reads its settings only then."""
    if "RAY_ADDRESS" not in os.environ and (head := running()):
        head.enter_environment()


def start(*, cpus: int) -> LocalRay:
    """Starts a head and waits until its dashboard answers. StartupError with Ray's own words."""
    folder = tempfile.mkdtemp(prefix="tandem-ray-")  # short: sockets lie deep inside
    auth_mode = os.environ.get("RAY_AUTH_MODE", "token")
    if auth_mode == "token":
        (Path(folder) / TOKEN).write_text(secrets.token_hex(32))  # the folder is ours alone
    with free_ports(4) as (port, dashboard, client, agent):
        ports = {
            "--port": port,
            "--dashboard-port": dashboard,
            "--dashboard-agent-listen-port": agent,
            "--ray-client-server-port": client,
            "--min-worker-port": 0,
            "--max-worker-port": 0,
        }
    options = {
        "--node-ip-address": NODE_ADDRESS,
        "--dashboard-host": "127.0.0.1",
        "--include-dashboard": "true",
        "--include-log-monitor": "false",
        "--num-cpus": cpus,
        "--object-store-memory": OBJECT_STORE_BYTES,
        "--temp-dir": folder,
    } | ports
    words = [f"{name}={value}" for name, value in options.items()]
    flags = ["--head", "--block", "--no-monitor", "--disable-usage-stats"]
    log = Path(folder) / "ray-start.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "ray.scripts.scripts", "start", *flags, *words],
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=folder,  # Serve's workers import from the head's folder before the package
            env=_environment(_ray_settings(auth_mode, folder)),
            start_new_session=True,
        )
    head = LocalRay(
        pid=process.pid,
        born=born(process.pid) or "",
        folder=folder,
        address=f"{NODE_ADDRESS}:{port}",
        dashboard=f"http://127.0.0.1:{dashboard}",
        auth_mode=auth_mode,
    )
    try:
        _wait_until_up(process, log, dashboard)
    except BaseException:
        head.stop()
        raise
    return head


def _ray_settings(auth_mode: str, folder: str) -> dict[str, str]:
    """Said explicitly: left unset, they depend on what this machine did before."""
    settings = {
        "RAY_AUTH_MODE": auth_mode,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",  # 15 unless told: the ranks would run behind everything else
    }
    if auth_mode == "token":
        settings["RAY_AUTH_TOKEN_PATH"] = str(Path(folder) / TOKEN)
    return settings


def _environment(settings: dict[str, str]) -> dict[str, str]:
    """Of the head. This python comes first on the path: a job's `python` shall have ray.

    It may write bytecode: uploaded code is unpacked in the head's folder, and every process that
    starts would compile all of it (0.8 s of a rank's start). And it starts no workers before they
    are asked for: whatever is asked for here comes with code, and cannot use them.
    """
    others = ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "PYTHONDONTWRITEBYTECODE")
    kept = {name: value for name, value in os.environ.items() if name not in others}
    path = os.pathsep.join([str(Path(sys.executable).parent), kept.get("PATH", "")])
    return kept | settings | {"PATH": path, "RAY_prestart_worker_first_driver": "0"}


def _wait_until_up(process: subprocess.Popen[bytes], log: Path, dashboard: int) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while b"Ray runtime started" not in log.read_bytes() or not _listens(dashboard):
        if process.poll() is not None or time.monotonic() > deadline:
            said = log.read_text(errors="replace").strip().splitlines()[-8:]
            raise StartupError("the local Ray did not start; it said:\n  " + "\n  ".join(said))
        time.sleep(0.1)


def _note() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "tandem" / "local-ray.json"


def _noted() -> LocalRay | None:
    try:
        return LocalRay(**json.loads(_note().read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


@contextmanager
def free_ports(count: int) -> Iterator[tuple[int, ...]]:
    """Ports that are free now; held until the block ends, so that all differ."""
    with ExitStack() as held:
        ports: list[int] = []
        for port in random.sample(OWN_PORTS, len(OWN_PORTS)):
            one = held.enter_context(socket.socket())
            with suppress(OSError):
                one.bind(("127.0.0.1", port))
                ports.append(port)
            if len(ports) == count:
                break
        yield tuple(ports)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
