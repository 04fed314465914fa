"""A timeline as trace events: the rules of the format, and spans against moments written here."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from cluster.errors import BadRequest, ProtocolError
from cluster.trace_command import add_trace
from cluster.trace_events import TRACKS, Track, trace_events

MOVED = {"bytes": 1000, "pushes": 2, "push_s": 0.001, "tail_s": 0.002, "path": "nixl/UCX"}


def event(name: str, at_ms: float, **detail: Any) -> dict[str, Any]:
    return {"event": name, "at_s": at_ms / 1e3, **detail}


def told(*events: dict[str, Any], tokens_ms: tuple[float, ...] = ()) -> dict[str, Any]:
    times = [at_ms / 1e3 for at_ms in tokens_ms]
    return {"events": list(events), "token_times_s": times, "ttft_s": 0.02, "tpot_s": None}


PLAIN = told(
    event("routed", 1, attempt=1, prefill="prefill-0/0", decode="decode-0/0"),
    event("started", 5, queued_s=0.003),
    event("reserved", 6, decode="decode-0/0", reservation="d:1"),
    event("taken_over", 21, decode="decode-0/0"),
    event("handed_over", 22, **MOVED),
    event("finished", 41, outcome="length"),
    tokens_ms=(20, 30, 30, 40),
)

TWICE = told(
    event("held", 1, why="no decode rank"),
    event("routed", 2, attempt=1, prefill="prefill-0/0", decode="decode-0/0"),
    event("started", 4, queued_s=0.001),
    event("reserved", 5, decode="decode-0/0", reservation="d:1"),
    event("place_lost", 7, decode="decode-0/0", error="gone"),
    event("reserved", 8, decode="decode-1/0", reservation="e:1"),
    event("taken_over", 12, decode="decode-1/0"),
    event("lost", 20, attempt=1, error="decode-1/0 is lost"),
    event("routed", 21, attempt=2, prefill="prefill-1/0", decode="decode-2/0"),
    event("started", 22, queued_s=0.0),
    event("reserved", 23, decode="decode-2/0", reservation="f:1"),
    event("taken_over", 33, decode="decode-2/0"),
    event("finished", 50, outcome="stop"),
    tokens_ms=(10, 15, 32, 45),
)

COLOCATED = told(
    event("routed", 1, attempt=1, prefill=None, decode="decode-0/0"),
    event("started", 3, queued_s=0.001),
    event("finished", 30, outcome="stop"),
    tokens_ms=(10, 20),
)

REFUSED = told(event("held", 1, why="nobody is there"), event("finished", 9, outcome="failed"))


def spans(timeline: dict[str, Any], track: Track) -> list[tuple[str, float, float]]:
    """Name, start and end in ms of a track's spans."""
    number = TRACKS.index(track) + 1
    return [
        (one["name"], one["ts"] / 1e3, round((one["ts"] + one["dur"]) / 1e3, 6))
        for one in trace_events(timeline, "r")["traceEvents"]
        if one["ph"] == "X" and one["tid"] == number
    ]


@pytest.mark.parametrize("timeline", [PLAIN, TWICE, COLOCATED, REFUSED, told()])
def test_the_format_is_kept(timeline: dict[str, Any]) -> None:
    """Of each event exactly the fields that its phase needs, of the right types."""
    trace = json.loads(json.dumps(trace_events(timeline, "a request"), allow_nan=False))
    assert set(trace) == {"displayTimeUnit", "traceEvents"}
    assert trace["displayTimeUnit"] == "ms"
    number = (int, float)
    common: dict[str, Any] = {"ph": str, "name": str, "pid": int, "tid": int}
    common |= {"ts": number, "args": dict}
    more: dict[str, dict[str, Any]] = {
        "X": {"cat": str, "dur": number},
        "i": {"cat": str, "s": str},
        "M": {},
    }
    for one in trace["traceEvents"]:
        wanted = common | more[one["ph"]]
        assert one.keys() == wanted.keys()
        assert all(isinstance(one[key], kind) for key, kind in wanted.items())
        assert one["ts"] >= 0
        assert one.get("dur", 0) >= 0
        assert one.get("s", "t") in ("t", "p", "g")
    named = {one["tid"] for one in trace["traceEvents"] if one["name"] == "thread_name"}
    assert named == {1, 2, 3, 4}


@pytest.mark.parametrize("timeline", [PLAIN, TWICE, COLOCATED])
def test_spans_of_a_track_nest_or_follow_each_other(timeline: dict[str, Any]) -> None:
    for track in TRACKS:
        open_until: list[float] = []
        for _, begins, ends in spans(timeline, track):
            while open_until and open_until[-1] <= begins:
                open_until.pop()
            assert not open_until or ends <= open_until[-1]
            open_until.append(ends)


def test_one_request_in_four_tracks() -> None:
    assert spans(PLAIN, "caller") == [("r", 0, 41)]
    assert spans(PLAIN, "prefill") == [("queued", 2, 5), ("prefill", 5, 20)]
    assert spans(PLAIN, "transfer") == [("handoff", 6, 22), ("tail", 20, 22)]
    assert spans(PLAIN, "decode") == [("decode", 21, 41)]
    decode = next(
        one for one in trace_events(PLAIN, "r")["traceEvents"] if one.get("cat") == "decode"
    )
    assert decode["args"] == {"rank": "decode-0/0", "tokens": 3}
    handoff = next(
        one for one in trace_events(PLAIN, "r")["traceEvents"] if one["name"] == "handoff"
    )
    assert handoff["args"] == MOVED | {"decode": "decode-0/0", "reservation": "d:1"}


def test_tokens_that_came_together_are_one_instant() -> None:
    marks = [one for one in trace_events(PLAIN, "r")["traceEvents"] if one["ph"] == "i"]
    tokens = [(one["name"], one["ts"] / 1e3) for one in marks if one["name"].startswith("token")]
    assert tokens == [("token 0", 20), ("token 1 to 2", 30), ("token 3", 40)]
    assert [one["name"] for one in marks if not one["name"].startswith("token")] == [
        "routed",
        "started",
        "reserved",
        "taken_over",
        "handed_over",
        "finished",
    ]


def test_a_lost_place_and_a_lost_attempt_end_their_spans() -> None:
    assert spans(TWICE, "prefill") == [
        ("queued", 3, 4),
        ("prefill", 4, 10),
        ("prefill", 22, 32),
    ]
    assert spans(TWICE, "transfer") == [
        ("place lost", 5, 7),
        ("handoff, not told", 8, 20),
        ("handoff, not told", 23, 50),
    ]
    assert spans(TWICE, "decode") == [("decode", 12, 20), ("decode", 33, 50)]


def test_colocated_there_is_one_track_for_both_halves() -> None:
    assert spans(COLOCATED, "decode") == [("queued", 2, 3), ("prefill", 3, 10), ("decode", 10, 30)]
    assert spans(COLOCATED, "prefill") == spans(COLOCATED, "transfer") == []


# ------------------------------------------------------------------ the command


class Server(HTTPServer):
    answer: dict[str, Any]
    asked: dict[str, Any]


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        asked = self.rfile.read(int(self.headers["content-length"]))
        self.server.asked = json.loads(asked)
        body = json.dumps(self.server.answer).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Handler) as server:
        choice = {"text": "x", "index": 0, "finish_reason": "length", "logprobs": None}
        usage = {"prompt_tokens": 2, "completion_tokens": 4}
        server.answer = {"id": "cmpl-1", "choices": [choice], "usage": usage, "timeline": PLAIN}
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def run(server: Server, *words: str) -> int:
    parser = argparse.ArgumentParser()
    add_trace(parser.add_subparsers())
    url = f"http://127.0.0.1:{server.server_port}"
    options = parser.parse_args(["trace", "--url", url, *words])
    return int(options.run(options))


def test_the_command_asks_for_the_timeline_and_writes_the_file(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "t.json"
    assert run(server, "Hello", "--max-tokens", "4", "--out", str(out)) == 0
    assert server.asked == {"prompt": "Hello", "max_tokens": 4, "timeline": True}
    assert json.loads(out.read_text()) == trace_events(PLAIN, "cmpl-1")
    assert "https://ui.perfetto.dev" in capsys.readouterr().out


def test_a_request_of_a_file_is_sent_as_it_is_but_not_streamed(
    server: Server, tmp_path: Path
) -> None:
    request = tmp_path / "r.json"
    request.write_text(json.dumps({"prompt": [1, 2], "seed": 3, "stream": True}))
    assert run(server, "--request", str(request), "--out", str(tmp_path / "t.json")) == 0
    assert server.asked == {"prompt": [1, 2], "seed": 3, "timeline": True}


def test_what_cannot_be_traced_is_told_and_nothing_is_written(
    server: Server, tmp_path: Path
) -> None:
    out = tmp_path / "t.json"
    request = tmp_path / "r.json"
    request.write_text('{"messages": []}')
    for words in (("--request", str(request)), (), ("Hello", "--request", str(request))):
        with pytest.raises(BadRequest):
            run(server, *words, "--out", str(out))
    del server.answer["timeline"]
    with pytest.raises(ProtocolError, match="tells no timeline"):
        run(server, "Hello", "--out", str(out))
    assert not out.exists()
