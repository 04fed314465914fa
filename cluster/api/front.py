"""What every HTTP request passes: its id, its key, the count of it, and the last net for bugs.

Plain ASGI around the application, because it must see the end of streams too.
"""

from __future__ import annotations

import logging
import re
import secrets

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.api.api_keys import ApiKeys
from cluster.api.error_response import error_response
from cluster.errors import BadRequest, ClusterError
from cluster.metrics import Metrics, outcome_of

logger = logging.getLogger(__name__)

REQUEST_ID = "x-request-id"
OPEN_PATHS = ("/health", "/ready")  # load balancers have no key
_VALID_ID = re.compile(r"[\x21-\x7e]{1,128}")


class Front:
    def __init__(self, app: ASGIApp, *, keys: ApiKeys, metrics: Metrics) -> None:
        self._app = app
        self._keys = keys
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = headers.get(REQUEST_ID, "")
        valid = _VALID_ID.fullmatch(request_id) is not None
        state = scope["state"] = {**scope.get("state", {}), "outcome": None, "request_id": None}
        if valid:
            state["request_id"] = request_id
        answering = _Answering(send, request_id if valid else f"req-{secrets.token_hex(12)}")
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        try:
            if request_id and not valid:
                raise BadRequest("X-Request-Id: must be 1 to 128 printable ASCII characters")
            if path not in OPEN_PATHS:
                self._keys.check(headers.get("authorization", ""))
            await self._app(scope, receive, answering.send)
        except ClusterError as error:
            assert not answering.status, "a stream tells its own errors"
            await error_response(error)(scope, receive, answering.send)
        except Exception:
            logger.exception("%s %s broke", scope["method"], path)
            if not answering.status:
                broken = error_response(ClusterError("internal error; see the log"))
                await broken(scope, receive, answering.send)
            state["outcome"] = "error"
        finally:
            self._metrics.ended(path, state["outcome"] or outcome_of(answering.status or 499))


class _Answering:
    """Puts the request's id on the response, and remembers its status; 0: none was sent."""

    def __init__(self, send: Send, request_id: str) -> None:
        self.status = 0
        self._send = send
        self._request_id = request_id

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            MutableHeaders(raw=message.setdefault("headers", [])).append(
                REQUEST_ID, self._request_id
            )
        await self._send(message)


def set_outcome(scope: Scope, outcome: str) -> None:
    """For what the status cannot say: a stream broke off after its 200."""
    scope["state"]["outcome"] = outcome
