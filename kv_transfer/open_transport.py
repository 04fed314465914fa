"""Transports by the name that the configuration gives them."""

from __future__ import annotations

from kv_transfer.local_transport import LocalTransport
from kv_transfer.transport import Transport


def open_transport(kind: str, name: str, *, write_bytes: int = 1 << 20) -> Transport:
    """The transport of one rank: "nixl", or "local" within one process.

    A rank that keeps its `name` when it starts again replaces its earlier life at its peers.
    Over NIXL, writes go in pieces of at most `write_bytes`. Raises StartupError if it cannot
    start, ValueError for an unknown kind.
    """
    match kind:
        case "local":
            return LocalTransport(name)
        case "nixl":
            from kv_transfer.nixl_transport import (
                NixlTransport,
            )  # here: importing it takes a second

            return NixlTransport(name, write_bytes=write_bytes)
        case _:
            raise ValueError(f"no transport is called {kind!r}; there are nixl and local")
