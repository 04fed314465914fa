"""The body of a request as it comes in: bounded in length and in time.

Knows nothing of what is in it.
"""

from __future__ import annotations

import asyncio

from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest

from cluster.errors import BadRequest, RequestCancelled

JSON = "application/json"


class ClientGone(RequestCancelled):
    """Nobody is there any more to be told anything."""


class NotJson(BadRequest):
    status = 415


class BodyTooLarge(BadRequest):
    status = 413


class BodyTooSlow(BadRequest):
    status = 408


async def read_body(http: HttpRequest, max_bytes: int, within_s: float) -> bytes:
    """The whole body. NotJson if it says that it is something else, BodyTooLarge as soon as it is
    longer or says that it will be, BodyTooSlow if it does not come."""
    media_type = http.headers.get("content-type", JSON).partition(";")[0].strip().lower()
    if media_type != JSON:
        raise NotJson(f"Content-Type: must be {JSON}, not {media_type[:64]!r}")
    too_large = BodyTooLarge(f"the body is longer than {max_bytes} bytes")
    declared = http.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared[:20]) > max_bytes:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(within_s):
            async for piece in http.stream():
                body += piece
                if len(body) > max_bytes:
                    raise too_large
    except TimeoutError:
        raise BodyTooSlow(f"the body did not come within {within_s:g} s") from None
    except ClientDisconnect:
        raise ClientGone("the client went away") from None
    return bytes(body)
