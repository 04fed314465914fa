"""An error as an HTTP response, in OpenAI's shape, with the headers that go with its status."""

from __future__ import annotations

import json
import math

from starlette.responses import JSONResponse, Response

from cluster.api.openai import error_body
from cluster.errors import ClusterError


def error_response(error: ClusterError) -> Response:
    """Of the error's own status; 429 and 503 say when to come again."""
    headers = {}
    if error.status in (429, 503):
        headers["retry-after"] = str(math.ceil(error.retry_after_s or 1.0))
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return AsciiResponse(error_body(error), status_code=error.status, headers=headers)


class AsciiResponse(JSONResponse):
    """In ASCII: it may quote what a client sent, and that may be no valid Unicode."""

    def render(self, content: object) -> bytes:
        return json.dumps(content).encode()
