"""The HTTP deployment: one app, reached through Serve's proxy and on a port of its own.

The own port is the fast way (the proxy costs 5 ms a request). The replica owns the requests that
it serves: it is their caller. Knows nothing of dialects.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

from fastapi import FastAPI
from ray import serve
from starlette.types import Receive, Scope, Send

from cluster.api.app import create_app
from cluster.api.server import Server
from cluster.api.text import load_tokenizer
from cluster.config import ClusterConfig, parse_config
from cluster.generation import Caller
from cluster.http_port import fingerprint, open_http_port
from cluster.live_settings import Json, take_over
from cluster.log import log_as
from cluster.metric_samples import Sample, server_samples
from cluster.ray_metrics import export
from cluster.ray_services import ApplicationKeys


@serve.ingress()
class Ingress:
    """`others` are the application's other deployments; binding them here makes Serve run them."""

    def __init__(self, others: Sequence[Any]) -> None:
        self._config: ClusterConfig | None = None

    async def reconfigure(self, tree: Json) -> None:
        """Serve's way to hand over settings: once before anything else, and at every change."""
        wanted = parse_config(tree)
        if self._config is None:
            self._config = wanted
            log_as(wanted.log)
            await self._start(wanted)
            return
        self._config = take_over(self._config, wanted)
        log_as(self._config.log)
        self._caller.reconfigure(self._config)
        self._app.state.reconfigure(self._config)
        self._server.drain_within(self._config.life.drain_timeout_s)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """For Serve's proxy; asked for before there are settings."""
        outer = FastAPI(openapi_url=None)
        outer.mount("", self._pass_on)
        return outer

    def check_health(self) -> None:
        if self._serving.done():
            raise RuntimeError("the HTTP server has ended")

    async def __del__(self) -> None:
        """Closes the listener first, then lets the requests inside finish."""
        if not hasattr(self, "_serving"):
            return
        self._server.should_exit = True
        self._telling.cancel()
        await asyncio.gather(self._serving, self._telling, return_exceptions=True)
        await self._caller.close()
        await self._port.close()

    async def _start(self, config: ClusterConfig) -> None:
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
            head_timeout_s=config.http.head_timeout_s,
        )
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._port.listener]))
        self._telling = asyncio.create_task(export(self._samples))

    def _samples(self) -> Iterator[Sample]:
        return server_samples(self._app.state.completions.metrics.families())

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)
