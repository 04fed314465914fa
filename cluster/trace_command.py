"""`tandem trace`: one request to a server, and a file that ui.perfetto.dev opens.

tandem trace "def add(a, b):" --max-tokens 32 --out trace.json
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from cluster.errors import BadRequest, ProtocolError
from cluster.trace_events import trace_events

TRACE = "send one request and write what happened to it, for ui.perfetto.dev"


def add_trace(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    trace = commands.add_parser("trace", help=TRACE, description=TRACE)
    trace.add_argument("prompt", nargs="?", help="text; or use --request")
    trace.add_argument(
        "--request",
        type=Path,
        metavar="FILE",
        help="JSON body of /v1/completions instead, as a client sends it",
    )
    trace.add_argument("--max-tokens", type=int, default=32, help="(default: 32)")
    trace.add_argument("--url", default=os.environ.get("TANDEM_URL", "http://127.0.0.1:8100"))
    trace.add_argument(
        "--out",
        type=Path,
        default=Path("tandem-trace.json"),
        help="a .json file to write (default: %(default)s)",
    )
    trace.set_defaults(run=run_trace)


def run_trace(options: argparse.Namespace) -> int:
    """Raises the error that the request met; nothing is written then."""
    from cluster.http_client import SyncHttpClient  # not earlier: `tandem --help` needs no httpx

    body = _body(options)
    with SyncHttpClient(options.url, os.environ.get("TANDEM_API_KEY")) as client:
        answer = client.complete(body.pop("prompt"), **body)
    if answer.timeline is None:
        raise ProtocolError(f"{options.url} tells no timeline; is it a Tandem server?")
    told = trace_events(answer.timeline, answer.completion_id)
    options.out.write_text(json.dumps(told, indent=1), encoding="utf-8")
    print(f"{answer.prompt_tokens} prompt tokens, {answer.completion_tokens} tokens")
    print(f"wrote {options.out}: open it at https://ui.perfetto.dev")
    return 0


def _body(options: argparse.Namespace) -> dict[str, Any]:
    if (options.prompt is None) == (options.request is None):
        raise BadRequest("either a prompt or --request, not both")
    if options.request is None:
        body: dict[str, Any] = {"prompt": options.prompt, "max_tokens": options.max_tokens}
    else:
        try:
            body = dict(json.loads(options.request.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise BadRequest(f"{options.request} is no JSON object: {error}") from error
        if "prompt" not in body:
            raise BadRequest(f"{options.request} has no prompt; only /v1/completions is traced")
        body.pop("stream", None)
        body.pop("stream_options", None)
    return body | {"timeline": True}
