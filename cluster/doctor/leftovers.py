"""What earlier runs have left: guards without a server, folders of dead heads, keys of the gone."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

from cluster.doctor.abstract_sockets import guarded_ports
from cluster.doctor.finding import Finding
from cluster.doctor.probe import probe
from cluster.errors import StartupError

HEAD_FOLDERS = ("tandem-ray-*", "ray/session_20*")
SHOWN = 5


def check_guards() -> Finding:
    """Of HTTP ports. The kernel drops a guard with its process, so a stale one is held by one."""
    return judge_guards({port: _listens(port) for port in guarded_ports()})


def judge_guards(guarded: Mapping[int, bool]) -> Finding:
    """By port: does anybody listen there?"""
    silent = [str(port) for port, listens in guarded.items() if not listens]
    if silent:
        return Finding(
            "guards",
            "warn",
            f"held, but nobody listens on port {', '.join(silent)}",
            "a cluster may be stopping just now; if this stays, `ss -xlp | grep tandem-http` names "
            "the process",
        )
    held = ", ".join(map(str, guarded)) or "none"
    return Finding("guards", "ok", f"of HTTP ports in use: {held}")


def check_head_folders() -> Finding:
    temporary = Path(tempfile.gettempdir())
    folders = [path for pattern in HEAD_FOLDERS for path in temporary.glob(pattern)]
    return judge_head_folders(folders, set(_words_of_processes()))


def judge_head_folders(folders: Iterable[Path], words: Collection[str]) -> Finding:
    """`words`: of the command lines of all living processes; a living head's name its folder."""
    dead = [path for path in folders if not any(str(path) in word for word in words)]
    if not dead:
        return Finding("Ray folders", "ok", "none of a dead head")
    shown = ", ".join(str(path) for path in sorted(dead)[:SHOWN])
    more = f" and {len(dead) - SHOWN} more" if len(dead) > SHOWN else ""
    return Finding(
        "Ray folders",
        "warn",
        f"of dead heads, {len(dead)}: {shown}{more}",
        "remove them: nothing runs from them any more",
    )


def check_keys(limit_s: float, *, ray_runs: bool) -> Finding:
    """In the Ray cluster that commands mean here, if there is one."""
    if not ray_runs:
        return Finding("Ray keys", "ok", "no Ray cluster is known here, so none are kept")
    try:
        found = probe("cluster.doctor.keys", limit_s=limit_s)
    except StartupError as error:
        return Finding("Ray keys", "warn", f"Ray cannot be asked: {error}", "look at `ray status`")
    return judge_keys(found["keys"], found["applications"])


def judge_keys(keys: Iterable[str], applications: Collection[str]) -> Finding:
    """Keys are `application/name`."""
    gone = sorted({key.partition("/")[0] for key in keys} - set(applications))
    if gone:
        ends = "; ".join(f"tandem down --name {name}" for name in gone)
        return Finding(
            "Ray keys", "warn", f"of applications that are gone: {', '.join(gone)}", ends
        )
    return Finding("Ray keys", "ok", f"of {len(set(applications))} running applications only")


def _listens(port: int) -> bool:
    with socket.socket() as asking:
        asking.settimeout(1.0)
        return asking.connect_ex(("127.0.0.1", port)) == 0


def _words_of_processes() -> Iterator[str]:
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                line = Path(entry.path, "cmdline").read_bytes()
            except OSError:
                continue  # it has ended meanwhile, or is not ours to read
            yield from line.decode(errors="replace").split("\0")
