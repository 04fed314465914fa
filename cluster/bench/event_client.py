"""Posts JSON and yields the events of the answer, at the least cost to whoever measures.

A socket, HTTP/1.1, chunked bodies: a full client library would take longer over a token than the
server does. Knows nothing of what the events say.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from typing import Any
from urllib.parse import urlsplit

from cluster.errors import BadRequest, ClusterError, NoRoom, Unavailable, WorkerLost

_ERRORS: dict[int, type[ClusterError]] = {429: NoRoom, 503: Unavailable}


async def post_events(
    url: str, body: Mapping[str, Any], api_key: str | None = None
) -> AsyncGenerator[bytes, None]:
    """The data of each server-sent event, [DONE] included. Leaving closes the connection.

    Raises the ClusterError that goes with a status other than 200, Unavailable if nobody answers
    at `url`, WorkerLost if the answer breaks off.
    """
    parts = urlsplit(url)
    secure = parts.scheme == "https"
    try:
        reader, writer = await asyncio.open_connection(
            parts.hostname, parts.port or (443 if secure else 80), ssl=secure or None
        )
    except OSError as error:
        raise Unavailable(f"nobody answers at {url}: {error}") from error
    try:
        writer.write(_head(parts.path, parts.netloc, body, api_key))
        status, headers = await _read_head(reader)
        chunked = headers.get("transfer-encoding", "").lower() == "chunked"
        if status != 200:
            raise await _error(reader, status, headers)
        pending = b""
        while True:
            piece = await (_read_chunk(reader) if chunked else reader.read(65536))
            if not piece:
                return
            *events, pending = (pending + piece).split(b"\n\n")
            for event in events:
                if event.startswith(b"data: "):
                    yield event[6:]
    except (OSError, asyncio.IncompleteReadError) as error:
        raise WorkerLost(f"{url}: the answer broke off: {error}") from error
    finally:
        writer.close()


def _head(path: str, host: str, body: Mapping[str, Any], api_key: str | None) -> bytes:
    content = json.dumps(body).encode()
    lines = [
        f"POST {path} HTTP/1.1",
        f"host: {host}",
        "content-type: application/json",
        f"content-length: {len(content)}",
        "connection: close",
    ]
    if api_key:
        lines.append(f"authorization: Bearer {api_key}")
    return "\r\n".join([*lines, "", ""]).encode() + content


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    pairs = (line.partition(":") for line in lines[1:] if line)
    return int(lines[0].split()[1]), {name.lower(): value.strip() for name, _, value in pairs}


async def _read_chunk(reader: asyncio.StreamReader) -> bytes:
    """b"" at the end of the body."""
    size = int((await reader.readuntil(b"\r\n")).split(b";")[0], 16)
    return (await reader.readexactly(size + 2))[:-2]


async def _error(
    reader: asyncio.StreamReader, status: int, headers: Mapping[str, str]
) -> ClusterError:
    text = (await reader.read(1 << 20)).decode(errors="replace")
    try:
        text = json.loads(text)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        text = text[:200]
    kind = _ERRORS.get(status, BadRequest if status < 500 else WorkerLost)
    return kind(f"HTTP {status}: {text}")
