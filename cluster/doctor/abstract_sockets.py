"""Abstract unix sockets of this machine: our HTTP ports are guarded by one each (http_port.py)."""

from __future__ import annotations

from pathlib import Path

GUARD = "tandem-http-"


def abstract_sockets(table: Path = Path("/proc/net/unix")) -> set[str]:
    """Their names, without the @ that stands for the leading zero byte."""
    try:
        lines = table.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return set()
    names = (line.rsplit(" ", 1)[-1] for line in lines)
    return {name[1:] for name in names if name.startswith("@")}


def guard_name(port: int) -> str:
    return f"{GUARD}{port}"


def guarded_ports() -> list[int]:
    """HTTP ports that a Tandem cluster of this machine says it has."""
    ends = (name.removeprefix(GUARD) for name in abstract_sockets() if name.startswith(GUARD))
    return sorted(int(end) for end in ends if end.isdigit())
