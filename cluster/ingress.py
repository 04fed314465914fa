"""The HTTP deployment: one app, reached through Serve's proxy and on a port of its own.

The own port is the fast way (the proxy costs 5 ms a request). The replica owns the requests that
it serves: it is their caller. Knows nothing of dialects.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from ray import serve

from cluster.api.app import create_app
from cluster.api.server import Server
from cluster.api.text import load_tokenizer
from cluster.config import ClusterConfig
from cluster.generation import Caller
from cluster.http_port import fingerprint, open_http_port
from cluster.ray_services import ApplicationKeys


@serve.ingress()
class Ingress:
    """`others` are the application's other deployments; binding them here makes Serve run them."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: ClusterConfig, others: Sequence[Any]
    ) -> None:
        keys = ApplicationKeys(config.name)
        secret = await asyncio.to_thread(keys.secret)
        tokenizer = await asyncio.to_thread(load_tokenizer, config.model.path)
        self._port = await open_http_port(config.http.host, config.http.port, fingerprint(secret))
        self._caller = Caller(config, secret, keys.find_router)
        self._caller.members()  # begins to watch them, so that /ready is true at once
        self._app = create_app(self._caller, tokenizer, config)
        self._server = Server(
            self._app,
            drain_s=config.life.drain_timeout_s,
            keep_alive_s=config.http.keep_alive_s,
        )
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._port.listener]))

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self._app

    def check_health(self) -> None:
        if self._serving.done():
            raise RuntimeError("the HTTP server has ended")

    async def __del__(self) -> None:
        """Closes the listener first, then lets the requests inside finish."""
        if not hasattr(self, "_serving"):
            return
        self._server.should_exit = True
        await asyncio.gather(self._serving, return_exceptions=True)
        await self._caller.close()
        await self._port.close()
