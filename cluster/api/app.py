"""The HTTP application: health, readiness, models, metrics, completions.

A plain FastAPI app over a small seam (`Engine`, `Tokenizer`); it knows nothing of Ray or ports.
"""

from __future__ import annotations

import time
from collections import Counter

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from cluster.api.api_keys import ApiKeys
from cluster.api.completions import Completions, Engine
from cluster.api.error_response import AsciiResponse
from cluster.api.front import Front
from cluster.api.openai import UnknownModel, error_body, model_list
from cluster.api.openapi import COMPLETIONS, READY, document
from cluster.api.text import Tokenizer
from cluster.config import ClusterConfig
from cluster.errors import ClusterError, Unavailable


def create_app(engine: Engine, tokenizer: Tokenizer, config: ClusterConfig) -> FastAPI:
    """All routes of one server. `app.state.completions.running` counts the answers being made;
    `app.state.reconfigure(config)` takes over the settings that may change while it serves.

    Raises StartupError if the file of API keys cannot be used.
    """
    app = FastAPI(title="Tandem", docs_url=None, redoc_url=None)
    completions = Completions(engine, tokenizer, config)
    app.state.completions = completions
    models = model_list(config.model.served_name, int(time.time()), completions.max_length)

    @app.get("/health")
    async def health() -> Response:
        """Alive: this process turns. Whether anyone can be served is /ready."""
        return JSONResponse({"status": "alive"})

    @app.get("/ready", responses=READY)
    async def ready() -> Response:
        """200 if a live prefill and a live decode rank were heard of within t_detect_s."""
        seen: Counter[str] = Counter(
            member.endpoint.role
            for member in engine.members()
            if not (member.draining or member.follows)
        )
        needed = ("decode",) if config.router.colocated else ("prefill", "decode")
        lacking = [role for role in needed if not seen[role]]
        if lacking:
            raise Unavailable(
                f"no live {' and no live '.join(lacking)} rank within {config.wire.t_detect_s} s",
                retry_after_s=config.router.retry_after_s,
            )
        return JSONResponse({"status": "ready", "ranks": dict(seen)})

    @app.get("/metrics")
    async def metrics() -> Response:
        """Counts and times, in Prometheus' text format."""
        return Response(completions.metrics.text(), media_type=completions.metrics.content_type)

    @app.get("/v1/models")
    async def list_models() -> Response:
        return JSONResponse(models)

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        if name != config.model.served_name:
            raise UnknownModel(f"model {name[:64]!r} is not served here")
        return JSONResponse(models["data"][0])

    @app.post("/v1/completions", **COMPLETIONS)
    async def complete(http: HttpRequest) -> Response:
        """Continue a prompt, or several."""
        return await completions.answer(http)

    def reconfigure(wanted: ClusterConfig) -> None:
        nonlocal config
        config = wanted
        completions.reconfigure(wanted.http)

    app.state.reconfigure = reconfigure
    app.openapi = lambda: document(app)  # type: ignore[method-assign]
    app.add_exception_handler(HTTPException, _no_such_route)
    app.add_middleware(
        Front, keys=ApiKeys.load(config.http.api_keys_file), metrics=completions.metrics
    )
    return app


async def _no_such_route(http: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = "MethodNotAllowed" if error.status_code == 405 else "NoSuchRoute"
    body = error_body(ClusterError(f"{http.method} {http.url.path}: {error.detail}"))
    body["error"] |= {"type": "invalid_request_error", "code": code}
    return AsciiResponse(body, status_code=error.status_code, headers=error.headers)
