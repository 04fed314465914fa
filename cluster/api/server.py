"""uvicorn as a guest: signals are the process's, the listening socket is the caller's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

from cluster.api.http_connection import http_connection


class Server(uvicorn.Server):
    """`await serve(sockets=[...])` runs it; `should_exit = True` closes the listener first, then
    lets requests finish for at most `drain_s`."""

    def __init__(
        self,
        app: FastAPI,
        *,
        drain_s: float,
        keep_alive_s: float = 75.0,
        head_timeout_s: float = 30.0,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=http_connection(head_timeout_s),
                lifespan="off",
                log_config=None,
                access_log=False,
                timeout_keep_alive=max(1, round(keep_alive_s)),
                timeout_graceful_shutdown=max(1, round(drain_s)),
            )
        )

    def drain_within(self, drain_s: float) -> None:
        """From the next exit on."""
        self.config.timeout_graceful_shutdown = max(1, round(drain_s))

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
