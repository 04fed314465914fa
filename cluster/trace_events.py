"""One request's timeline as Chrome trace events, which ui.perfetto.dev and chrome://tracing open.

Four tracks: the caller, and what the timeline knows of prefill, transfer and decode. Pure. Spans
are as the caller saw them, so a span of a rank begins and ends one message later than there.
Source: Trace Event Format, Google; ph "X" is a span, "i" an instant, "M" a name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, Literal

Event = dict[str, Any]
Track = Literal["caller", "prefill", "transfer", "decode"]
TRACKS: tuple[Track, ...] = ("caller", "prefill", "transfer", "decode")
PID = 1
ENDS = ("lost", "preempted", "handed_back", "finished")  # of an attempt


def trace_events(told: Mapping[str, Any], name: str) -> dict[str, Any]:
    """`told` as Timeline.as_dict() makes it; `name` is what the whole is called, for people."""
    return {
        "displayTimeUnit": "ms",
        "traceEvents": [
            *_names(name),
            *sorted(_all_spans(told, name), key=lambda event: (event["ts"], -event.get("dur", 0))),
        ],
    }


def _all_spans(told: Mapping[str, Any], name: str) -> list[Event]:
    events: Sequence[Mapping[str, Any]] = told["events"]
    times: Sequence[float] = told["token_times_s"]
    last_s = max([*times, *(event["at_s"] for event in events)], default=0.0)
    figures = {key: told[key] for key in ("ttft_s", "tpot_s") if told.get(key) is not None}
    found = [_span("caller", name, 0.0, last_s, {"tokens": len(times), **figures})]
    for event in events:
        found.append(_instant(event["event"], event["at_s"], _detail(event)))
    index = 0
    for at_s, group in groupby(times):
        count = len(list(group))
        last = f" to {index + count - 1}" if count > 1 else ""
        found.append(_instant(f"token {index}{last}", at_s, {}))
        index += count
    for attempt in _attempts(events):
        found += _spans_of_attempt(attempt, times, last_s)
    return found


def _attempts(events: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Events from each `routed` to the next; what was before the first belongs to none."""
    attempts: list[list[Mapping[str, Any]]] = []
    for event in events:
        if event["event"] == "routed":
            attempts.append([])
        if attempts:
            attempts[-1].append(event)
    return attempts


def _spans_of_attempt(
    events: Sequence[Mapping[str, Any]], times: Sequence[float], last_s: float
) -> list[Event]:
    first = events[0]
    end_s = next((one["at_s"] for one in events if one["event"] in ENDS), last_s)
    mine = [at_s for at_s in times if first["at_s"] <= at_s <= end_s]
    colocated = first.get("prefill") is None
    runs: Track = "decode" if colocated else "prefill"
    found: list[Event] = []
    started = _last(events, "started")
    if started is not None:
        queued_s = started.get("queued_s", 0.0)
        begun_s = max(started["at_s"] - queued_s, 0.0)
        who = {"rank": first["decode"] if colocated else first["prefill"]}
        if begun_s < started["at_s"]:
            found.append(_span(runs, "queued", begun_s, started["at_s"], who))
        done_s = mine[0] if mine else end_s
        found.append(_span(runs, "prefill", started["at_s"], done_s, who))
        if colocated and mine:
            found.append(_span("decode", "decode", done_s, end_s, who | {"tokens": len(mine)}))
    if not colocated:
        found += _transfers(events, end_s)
        found += _decode(events, mine, end_s)
    return found


def _transfers(events: Sequence[Mapping[str, Any]], end_s: float) -> list[Event]:
    """From each reservation to what became of it."""
    found = []
    reserved: Mapping[str, Any] | None = None
    for event in events:
        if event["event"] == "reserved":
            reserved = event
        elif event["event"] == "handed_over" and reserved is not None:
            detail = _detail(reserved) | _detail(event)
            found.append(_span("transfer", "handoff", reserved["at_s"], event["at_s"], detail))
            if event.get("tail_s"):
                tail_s = min(event["tail_s"], event["at_s"] - reserved["at_s"])
                since = {"since": "the last chunk was computed"}
                found.append(
                    _span("transfer", "tail", event["at_s"] - tail_s, event["at_s"], since)
                )
            reserved = None
        elif event["event"] == "place_lost" and reserved is not None:
            detail = _detail(reserved) | _detail(event)
            found.append(_span("transfer", "place lost", reserved["at_s"], event["at_s"], detail))
            reserved = None
    if reserved is not None:
        found.append(
            _span("transfer", "handoff, not told", reserved["at_s"], end_s, _detail(reserved))
        )
    return found


def _decode(
    events: Sequence[Mapping[str, Any]], mine: Sequence[float], end_s: float
) -> list[Event]:
    taken = _last(events, "taken_over")
    if taken is None:
        return []
    tokens = max(0, len(mine) - 1)  # the first is prefill's
    return [
        _span("decode", "decode", taken["at_s"], end_s, {"rank": taken["decode"], "tokens": tokens})
    ]


def _last(events: Sequence[Mapping[str, Any]], name: str) -> Mapping[str, Any] | None:
    return next((event for event in reversed(events) if event["event"] == name), None)


def _detail(event: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in event.items() if key not in ("event", "at_s")}


def _names(name: str) -> list[Event]:
    found = [_named("process_name", 0, {"name": name})]
    for number, track in enumerate(TRACKS, 1):
        found.append(_named("thread_name", number, {"name": track}))
        found.append(_named("thread_sort_index", number, {"sort_index": number}))
    return found


def _named(kind: str, tid: int, args: dict[str, Any]) -> Event:
    return {"ph": "M", "name": kind, "pid": PID, "tid": tid, "ts": 0, "args": args}


def _span(track: Track, name: str, from_s: float, to_s: float, args: dict[str, Any]) -> Event:
    return {
        "ph": "X",
        "name": name,
        "cat": track,
        "pid": PID,
        "tid": TRACKS.index(track) + 1,
        "ts": round(from_s * 1e6, 3),
        "dur": round(max(0.0, to_s - from_s) * 1e6, 3),
        "args": args,
    }


def _instant(name: str, at_s: float, args: dict[str, Any]) -> Event:
    return {
        "ph": "i",
        "name": name,
        "cat": "caller",
        "pid": PID,
        "tid": 1,
        "ts": round(at_s * 1e6, 3),
        "s": "t",  # drawn across its own track only
        "args": args,
    }
