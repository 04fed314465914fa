"""`tandem bench`: loads a server over HTTP and prints what its clients got.

tandem bench --requests 200 --concurrency 16 --prompt-tokens 64-256 --output-tokens 64
tandem bench --rate 8 --compare colocated --json result.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cluster.bench.drive import drive, poster
from cluster.bench.load import Lengths, Load
from cluster.bench.record import Goal, Record, Summary, summarise
from cluster.errors import Unavailable

COLOCATED = "colocated"
_ROWS = (("TTFT", "ttft_ms"), ("TPOT", "tpot_ms"), ("gap", "gap_ms"), ("total", "total_ms"))
_SPREAD = ("mean", "p50", "p90", "p99")


def add_bench(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    help_text = "load a server over HTTP: TTFT, TPOT, throughput, goodput"
    bench = commands.add_parser("bench", help=help_text, description=help_text)
    bench.add_argument("--url", default=os.environ.get("TANDEM_URL", "http://127.0.0.1:8100"))
    bench.add_argument("--requests", type=int, default=50)
    bench.add_argument("--concurrency", type=int, default=4, help="clients of the closed loop")
    bench.add_argument("--rate", type=float, help="open loop instead: requests a second, Poisson")
    bench.add_argument("--prompt-tokens", default="128", help="such as 128 or 64-256")
    bench.add_argument("--output-tokens", default="32", help="such as 32 or 16-64")
    bench.add_argument("--highest-id", type=int, default=1999, help="of the ids in prompts")
    bench.add_argument("--warmup", type=int, default=2, help="requests before, not counted")
    bench.add_argument("--seed", type=int, default=0, help="of the load")
    bench.add_argument("--ttft-ms", type=float, help="goal for goodput")
    bench.add_argument("--tpot-ms", type=float, help="goal for goodput")
    bench.add_argument(
        "--compare",
        metavar="WITH",
        help=f"then the same load again: '{COLOCATED}', where decode ranks do whole requests and "
        "prefill ranks rest, or the URL of another server",
    )
    bench.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    bench.add_argument(
        "--stop-at-eos", action="store_true", help="answers may end before their length"
    )
    bench.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Exit status 1 if any request failed. Raises BadRequest for a load that cannot be."""
    if options.json is not None:
        options.json.touch()  # a place that cannot be written to is told before the load, not after
    load = Load(
        requests=options.requests,
        concurrency=options.concurrency,
        rate=options.rate,
        prompt_tokens=Lengths.parse(options.prompt_tokens),
        output_tokens=Lengths.parse(options.output_tokens),
        highest_id=options.highest_id,
        seed=options.seed,
    )
    goal = Goal(_seconds(options.ttft_ms), _seconds(options.tpot_ms))
    names = [options.url] + ([options.compare] if options.compare else [])
    results: dict[str, tuple[Summary, list[Record]]] = {}
    for name in names:
        url = options.url if name == COLOCATED else name
        more = {} if options.stop_at_eos else {"ignore_eos": True}
        more |= {COLOCATED: True} if name == COLOCATED else {}
        records = asyncio.run(_measure(load, url, more, options.warmup, name))
        results[name] = summarise(records, goal), records
    summaries = {name: summary for name, (summary, _) in results.items()}
    print(render(summaries))
    if options.json is not None:
        told = {
            name: summary.as_dict() | {"records": [asdict(record) for record in records]}
            for name, (summary, records) in results.items()
        }
        options.json.write_text(
            json.dumps({"load": asdict(load), "goal": asdict(goal), "results": told}, indent=1)
        )
    return 1 if any(summary.errors for summary in summaries.values()) else 0


async def _measure(
    load: Load, url: str, more: Mapping[str, Any], warmup: int, name: str
) -> list[Record]:
    post = poster(url, os.environ.get("TANDEM_API_KEY"))
    if warmup:
        before = Load(**{**vars(load), "requests": warmup, "rate": None, "seed": load.seed + 2})
        tried = await drive(before, post, more=more)
        if all(record.error for record in tried):
            raise Unavailable(f"{url} answers nothing: {tried[0].error}")
    records = await drive(load, post, more=more, progress=_progress(name, load.requests))
    if sys.stderr.isatty():
        print(file=sys.stderr)
    return records


def _progress(name: str, requests: int) -> Callable[[list[Record]], None]:
    def show(records: list[Record]) -> None:
        ended = [record for record in records if record.ended_s]
        tokens = sum(record.output_tokens for record in ended)
        elapsed_s = max(record.ended_s for record in ended)
        failed = sum(record.error is not None for record in ended)
        bar = "#" * (20 * len(ended) // requests)
        line = (
            f"{name} [{bar:20}] {len(ended)}/{requests}, {len(records) - len(ended)} running, "
            f"{failed} failed, {tokens / elapsed_s:.0f} tokens/s"
        )
        if sys.stderr.isatty():
            print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)
        elif len(ended) == requests:
            print(line, file=sys.stderr)

    return show


def render(summaries: Mapping[str, Summary]) -> str:
    """A table for each, then their ratios to the first."""
    parts = [_table(name, summary) for name, summary in summaries.items()]
    (first_name, first), *others = summaries.items()
    for name, other in others:
        ratios = [
            f"{label} {key} x{getattr(other, field)[key] / getattr(first, field)[key]:.2f}"
            for label, field in _ROWS
            for key in ("p50", "p99")
            if getattr(first, field).get(key) and getattr(other, field).get(key)
        ]
        if first.output_tokens_per_s:
            ratio = other.output_tokens_per_s / first.output_tokens_per_s
            ratios.append(f"tokens/s x{ratio:.2f}")
        parts.append(f"{name} against {first_name}: {', '.join(ratios)}")
    return "\n\n".join(parts)


def _table(name: str, summary: Summary) -> str:
    failed = sum(summary.errors.values())
    lines = [
        f"{name}: {summary.requests} requests in {summary.duration_s:.1f} s, {failed} failed",
        f"  {summary.requests_per_s:.2f} requests/s, goodput {summary.goodput_per_s:.2f}/s, "
        f"{summary.output_tokens_per_s:.1f} output tokens/s",
        f"  {'ms':8}" + "".join(f"{column:>10}" for column in _SPREAD),
    ]
    for label, field in _ROWS:
        spread = getattr(summary, field)
        if spread:
            lines.append(f"  {label:8}" + "".join(f"{spread[column]:10.1f}" for column in _SPREAD))
    for message, times in summary.errors.items():
        lines.append(f"  {times} x {message}")
    return "\n".join(lines)


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3
