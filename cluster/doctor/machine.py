"""Is this machine fit for ranks: ports, shared memory, limits, clocks? Each judged from values."""

from __future__ import annotations

import os
import resource
import socket
import time
from collections.abc import Callable
from typing import NamedTuple

from cluster.doctor.abstract_sockets import abstract_sockets, guard_name
from cluster.doctor.finding import Finding, Level

RAY_PORTS = {6379: "Ray's control store", 8265: "Ray's dashboard", 10001: "Ray's client server"}
SHM = "/dev/shm"
SHM_LEAST, SHM_GOOD = 128 << 20, 1 << 30  # bytes free: below, UCX and Ray's store cannot start
FILES_LEAST, FILES_GOOD = 1024, 8192  # a client is a socket, a pair of ranks several
CLOCK_LOOK_S = 0.2
CLOCK_APART_S = 0.05  # over one look; more means that somebody steps the wall clock
OLDEST_TIME = 1_735_689_600.0  # 2025-01-01: older than this code, so the clock was never set


def check_http_port(host: str, port: int) -> Finding:
    """Free, or held by a Tandem cluster of this machine; both without disturbing anybody."""
    name = "HTTP port"
    if _free(host, port):
        return Finding(name, "ok", f"{host}:{port} is free")
    if guard_name(port) in abstract_sockets():
        return Finding(name, "ok", f"{host}:{port} is served by a Tandem cluster of this machine")
    return Finding(
        name,
        "fail",
        f"{host}:{port} is taken by another program",
        f"ss -ltnp 'sport = :{port}' names it; or choose another with --set http.port=...",
    )


def check_ray_ports(ray_runs: bool) -> Finding:
    """Of a head with Ray's defaults; `tandem up --local` chooses its own."""
    name = "Ray ports"
    taken = [f"{port} ({what})" for port, what in RAY_PORTS.items() if not _free("0.0.0.0", port)]
    if not taken:
        return Finding(name, "ok", f"{', '.join(map(str, RAY_PORTS))} are free")
    if ray_runs:
        return Finding(name, "ok", f"taken, and Ray runs here: {', '.join(taken)}")
    return Finding(
        name,
        "warn",
        f"taken, though no Ray of ours is known: {', '.join(taken)}",
        "`ray status` tells whether a Ray runs; a second head needs ports of its own",
    )


class Space(NamedTuple):
    """Of a file system, in bytes."""

    total: int
    free: int


def check_shm(path: str = SHM) -> Finding:
    found = os.statvfs(path)
    return judge_shm(Space(found.f_frsize * found.f_blocks, found.f_frsize * found.f_bavail))


def judge_shm(space: Space) -> Finding:
    what = f"{space.free / 1e9:.1f} GB free of {space.total / 1e9:.1f} GB"
    if space.free >= SHM_GOOD:
        return Finding("/dev/shm", "ok", what)
    return Finding(
        "/dev/shm",
        "warn" if space.free >= SHM_LEAST else "fail",
        what,
        "docker run --shm-size=8g, or in Kubernetes an emptyDir of medium Memory on /dev/shm",
    )


def check_limits() -> Finding:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return judge_limits(files, locked, rdma=os.path.isdir("/sys/class/infiniband"))


def judge_limits(files: int, locked: int, *, rdma: bool) -> Finding:
    """Open files, and lockable memory in bytes; resource.RLIM_INFINITY is no limit.

    Memory is locked when an RDMA device registers it, and by nothing else of ours.
    """
    endless = resource.RLIM_INFINITY
    shown = "unlimited" if locked == endless else f"{locked / 1e6:.0f} MB"
    what = f"{'unlimited' if files == endless else files} open files, {shown} lockable"
    if files != endless and files < FILES_GOOD:
        level: Level = "warn" if files >= FILES_LEAST else "fail"
        return Finding("limits", level, what, f"ulimit -n {FILES_GOOD} or more")
    if rdma and locked != endless:
        advice = "ulimit -l unlimited: an RDMA device locks all memory that ranks register"
        return Finding("limits", "fail", what, advice)
    return Finding("limits", "ok", what)


def check_clocks() -> Finding:
    return judge_clocks(time.monotonic, time.time, time.sleep)


def judge_clocks(
    monotonic: Callable[[], float], wall: Callable[[], float], sleep: Callable[[float], None]
) -> Finding:
    """Both clocks over a short look. Incarnations sort by birth, so time must not be stepped."""
    before, wall_before = monotonic(), wall()
    sleep(CLOCK_LOOK_S)
    passed, wall_passed = monotonic() - before, wall() - wall_before
    if passed <= 0:
        return Finding("clocks", "fail", "the monotonic clock stands still", "restart the machine")
    if wall_before < OLDEST_TIME:
        return Finding("clocks", "fail", "the wall clock was never set", "start NTP (chrony)")
    apart = wall_passed - passed
    if abs(apart) > CLOCK_APART_S:
        what = f"the wall clock went {apart:+.3f} s astray in {passed:.2f} s"
        return Finding("clocks", "fail", what, "let NTP slew the clock instead of stepping it")
    return Finding("clocks", "ok", f"apart by {abs(apart) * 1e3:.2f} ms in {passed:.2f} s")


def _free(host: str, port: int) -> bool:
    """Whether a listener could be opened now; it is closed at once and got no connection."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
