"""A rank's place in a group that computes together, and where the group meets. Values only."""

from __future__ import annotations

import socket
from dataclasses import dataclass, replace

from cluster.messages import Address


@dataclass(frozen=True)
class Seat:
    """The first rank listens at `address`, on a socket that was opened for it; the others come."""

    index: int
    size: int
    address: Address
    listener: int = -1  # the socket's number, in the first rank's process only

    def with_listener(self, listener: socket.socket) -> Seat:
        """Takes the socket over."""
        return replace(self, listener=listener.detach())


def listen(host: str) -> socket.socket:
    """A listening socket on any free port, for the first rank to be met at."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind((host, 0))
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener
