"""Measures a served tandem-mini: python -m eval.mini --base-url http://127.0.0.1:8100

Held-out samples, greedy answers, exact scores; a table at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import httpx

from eval.mini.baselines import gzip_bits, ngram_bits
from eval.mini.client import Client
from eval.mini.grading import Verdict, grade
from eval.mini.tasks import samples, tasks
from examples.mini.chat import ChatEncoder
from examples.mini.corpus import FOLDER, texts
from examples.mini.tasks.sample import Sample

BARS = {  # percent valid, percent right
    "schema": (95.0, None),
    "agent": (98.0, 90.0),
    "retrieval 1024": (None, 98.0),
    "retrieval 4096": (None, 95.0),
    "retrieval 16384": (None, 90.0),
}
_WINDOW = 1024  # tokens of held-out code scored at once
_LONGEST_ANSWER = 400


@dataclass(frozen=True)
class Score:
    task: str
    count: int
    valid: float  # percent
    right: float
    seconds: float

    def line(self) -> str:
        valid_bar, right_bar = BARS.get(self.task, (None, None))
        shown = [_shown(self.valid, valid_bar), _shown(self.right, right_bar)]
        return f"| {self.task} | {self.count} | {shown[0]} | {shown[1]} | {self.seconds:.0f} |"


def _shown(value: float, bar: float | None) -> str:
    if bar is None:
        return f"{value:.1f}"
    return f"{value:.1f} (bar {bar:.0f})" if value >= bar else f"**{value:.1f}** (bar {bar:.0f})"


async def measure(options: argparse.Namespace) -> None:
    encoder = ChatEncoder(FOLDER)
    client = Client(options.base_url, options.model, options.timeout, options.concurrency)
    try:
        scores, longest = [], await client.longest()
        for name, make in tasks().items():
            count = options.long if name.startswith("retrieval") else options.count
            if options.tasks and not any(name.startswith(wanted) for wanted in options.tasks):
                continue
            asked = samples(make, name, count)
            need = _LONGEST_ANSWER + max(len(encoder.prompt_ids(sample)) for sample in asked)
            if need > longest:
                print(f"| {name} | skipped: it needs {need} tokens, the server takes {longest} |")
                continue
            scores.append(await _score(client, encoder, name, asked))
            print(scores[-1].line(), flush=True)
        print("\n| task | samples | valid % | right % | seconds |\n|---|---|---|---|---|")
        print("\n".join(score.line() for score in scores))
        if options.bytes:
            await _code(client, encoder, options.bytes)
    finally:
        await client.close()


async def _score(client: Client, encoder: ChatEncoder, name: str, asked: Sequence[Sample]) -> Score:
    started, done = time.monotonic(), 0

    async def one(sample: Sample) -> Verdict:
        nonlocal done
        try:
            answer = await client.complete(encoder.prompt_ids(sample), _LONGEST_ANSWER)
        except (RuntimeError, httpx.HTTPError) as error:  # one lost answer does not end the run
            print(f"{name}: counted as wrong: {error!r}", file=sys.stderr)
            return Verdict(valid=False, right=False)
        finally:
            done += 1
        ids = [token for token in answer.token_ids if token != encoder.tokenizer.eos_token_id]
        if sys.stderr.isatty():
            print(f"\r{name}: {done} of {len(asked)}", end="", file=sys.stderr)
        return grade(sample, encoder.tokenizer.decode(ids))

    verdicts = await asyncio.gather(*map(one, asked))

    def percent(what: Callable[[Verdict], bool]) -> float:
        return 100 * sum(map(what, verdicts)) / len(verdicts)

    return Score(
        name,
        len(verdicts),
        percent(lambda verdict: verdict.valid),
        percent(lambda verdict: verdict.right),
        time.monotonic() - started,
    )


async def _code(client: Client, encoder: ChatEncoder, limit: int) -> None:
    """Bits a byte of held-out files, in windows that do not see each other."""
    text = "".join(texts(held_out=True))[:limit]
    ids = encoder.tokenizer.encode(text)
    parts = [ids[start : start + _WINDOW] for start in range(0, len(ids), _WINDOW)]
    logs = await asyncio.gather(*(client.log_probability(part) for part in parts))
    bits = -sum(logs) / math.log(2) + len(parts) * math.log2(encoder.tokenizer.vocab_size)
    data = text.encode()
    known = "".join(texts(held_out=False)).encode()
    print(
        f"\nheld-out code, {len(data)} bytes: {bits / len(data):.2f} bits a byte; "
        f"gzip {gzip_bits(data):.2f}; 5-grams {ngram_bits(known, data):.2f}"
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m eval.mini", description=__doc__)
    parser.add_argument("--base-url", required=True, help="of a running cluster")
    parser.add_argument("--model", default="tandem-mini", help="its served name")
    parser.add_argument("--count", type=int, default=100, help="samples of each task")
    parser.add_argument("--long", type=int, default=50, help="samples of each retrieval length")
    parser.add_argument("--tasks", nargs="*", default=(), help="only those that begin so")
    parser.add_argument("--bytes", type=int, default=60_000, help="of held-out code; 0: none")
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds of one answer")
    asyncio.run(measure(parser.parse_args(arguments)))


if __name__ == "__main__":
    main()
