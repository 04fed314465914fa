"""uvicorn as a guest: signals are the process's, the listening socket is the caller's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI


class Server(uvicorn.Server):
    """`await serve(sockets=[...])` runs it; `should_exit = True` closes the listener first, then
    lets requests finish for at most `drain_s`."""

    def __init__(self, app: FastAPI, *, drain_s: float, keep_alive_s: float = 75.0) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                lifespan="off",
                log_config=None,
                access_log=False,
                timeout_keep_alive=max(1, round(keep_alive_s)),
                timeout_graceful_shutdown=max(1, round(drain_s)),
            )
        )

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
