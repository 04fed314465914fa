r"""Asks a model, served or offline, the questions of AIME, GPQA or HLE, and keeps its answers:

    python eval/run_eval.py --set aime --data aime.jsonl --base-url http://127.0.0.1:8100 \
        --out results/aime.jsonl --samples 4
    python eval/score.py results/aime.jsonl

The same command again goes on where it was. docs/evaluation.md has the rest.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

if __name__ == "__main__":  # a script's own folder is first on the path; the root belongs there
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from cluster.errors import ClusterError, StartupError
from cluster.progress_bar import ProgressBar
from eval.endpoint import Endpoint
from eval.question import Question
from eval.results import BadResults, Result, Results, open_results
from eval.rows import BadFile
from eval.score import right, summary
from eval.sets import SETS, Asked, read_questions

MOST_FAILURES = 5  # answers that could not be had, one after the other: the server is gone


@dataclass(frozen=True)
class Plan:
    """What is asked, and how."""

    questions: Sequence[Question]
    samples: int
    fields: dict[str, Any]  # of each request, but for the seed
    seed: int
    concurrency: int


async def ask_all(plan: Plan, endpoint: Endpoint, results: Results, out: TextIO) -> list[str]:
    """Every answer that `results` lack, so many at a time; returns why some could not be had.

    Stops early when MOST_FAILURES come in a row.
    """
    done = set(results.done)
    correct = sum(map(right, results.results))
    wanted = [
        (question, sample)
        for sample in range(plan.samples)
        for question in plan.questions
        if (question.id, sample) not in done
    ]
    bar = ProgressBar(len(wanted) + len(done), out, done=len(done))
    waiting, failures, in_a_row = iter(wanted), list[str](), 0

    async def work() -> None:
        nonlocal in_a_row, correct
        for question, sample in waiting:
            if in_a_row >= MOST_FAILURES:
                return
            fields = plan.fields | {"seed": plan.seed + sample}
            try:
                said = await endpoint.say(question.prompt, fields)
            except ClusterError as error:
                in_a_row += 1
                failures.append(f"{question.id}, sample {sample}: {error}")
                continue
            in_a_row = 0
            result = Result(
                id=question.id,
                sample=sample,
                kind=question.kind,
                answer=question.answer,
                text=said.text,
                finish=said.finish,
                completion_tokens=said.completion_tokens,
            )
            results.add(result)
            correct += right(result)
            bar.step(f"{correct} right")

    await asyncio.gather(*(work() for _ in range(plan.concurrency)))
    bar.end()
    return failures


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0 if every answer is there, 1 if some are missing, 2 if it could not begin, 130
    if interrupted: what was answered is kept."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.offline and (options.model or options.api == "chat"):
        parser.error("--model and --api are told to a server; --offline has none")
    try:
        asked = read_questions(SETS[options.set], options.data, seed=options.seed)
        plan = _plan(options, asked)
        with open_results(options.out, _settings(options)) as results:
            failures = asyncio.run(_run(options, plan, results))
            kept = list(results.results)
    except (BadFile, BadResults, StartupError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("run_eval.py: interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    if asked.left_out:
        print(f"{asked.left_out} questions need an image and were left out", file=sys.stderr)
    if kept:
        print(summary(options.set, kept))
    for failure in failures[:MOST_FAILURES]:
        print(f"no answer: {failure}", file=sys.stderr)
    missing = len(plan.questions) * plan.samples - len(kept)
    if missing > 0:
        print(f"{missing} answers are missing; the same command asks for them", file=sys.stderr)
    return 1 if missing > 0 else 0


async def _run(options: argparse.Namespace, plan: Plan, results: Results) -> list[str]:
    async with _endpoint(options) as endpoint:
        return await ask_all(plan, endpoint, results, sys.stderr)


def _endpoint(options: argparse.Namespace) -> Endpoint:
    """StartupError if an offline engine cannot be."""
    if options.offline:
        from eval.offline_engine import OfflineEngine  # which takes seconds to import

        return Endpoint(
            OfflineEngine.of(
                options.offline, concurrency=options.concurrency, max_tokens=options.max_tokens
            )
        )
    key = os.environ.get(options.api_key_env)
    return Endpoint.at(options.base_url, options.api, api_key=key, silence_s=options.timeout)


def _plan(options: argparse.Namespace, asked: Asked) -> Plan:
    fields: dict[str, Any] = {
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
        "top_p": options.top_p,
    }
    if options.model:
        fields["model"] = options.model
    return Plan(
        questions=asked.questions[: options.limit],
        samples=options.samples,
        fields=fields,
        seed=options.seed,
        concurrency=options.concurrency,
    )


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    """What a run must share with the one that it goes on with; more samples may be asked for."""
    return {
        "set": options.set,
        "data": hashlib.sha256(options.data.read_bytes()).hexdigest(),
        "model": options.offline or options.model,
        "api": "offline" if options.offline else options.api,
        "temperature": options.temperature,
        "top_p": options.top_p,
        "max_tokens": options.max_tokens,
        "seed": options.seed,
    }


def _parser() -> argparse.ArgumentParser:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        prog="run_eval.py", description=__doc__, formatter_class=_Formatter
    )
    parser.add_argument("--set", required=True, choices=sorted(SETS), help="which questions")
    parser.add_argument("--data", type=Path, help="their file: .jsonl, .csv, .json or .parquet")
    answers = parser.add_mutually_exclusive_group(required=True)
    answers.add_argument("--base-url", help="of the server, with or without /v1")
    answers.add_argument(
        "--offline", metavar="MODEL", help="no server: an engine here, of this folder or name"
    )
    parser.add_argument("--out", required=True, type=Path, help="file of results, to go on with")
    parser.add_argument("--model", help="its served name, if the server asks for one")
    parser.add_argument(
        "--api",
        choices=("completions", "chat"),
        default="completions",
        help="chat has the server put its template around the question",
    )
    parser.add_argument("--samples", type=_positive, default=1, help="answers to each question")
    parser.add_argument("--limit", type=_positive, help="only so many questions, the first ones")
    parser.add_argument("--concurrency", type=_positive, default=8, help="answers at a time")
    parser.add_argument("--temperature", type=_number, default=1.0, help="0: greedy")
    parser.add_argument("--top-p", type=_number, default=1.0, help="as the server takes it")
    parser.add_argument("--max-tokens", type=_positive, default=32768, help="of one answer")
    parser.add_argument("--seed", type=int, default=0, help="sample i has seed + i")
    parser.add_argument("--timeout", type=_number, default=3600.0, help="seconds for one answer")
    parser.add_argument(
        "--api-key-env", default="OPENAI_API_KEY", help="variable that holds the server's key"
    )
    return parser


class _Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    pass


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 on, not {text!r}")
    return int(text)


def _number(text: str) -> float:
    """JSON has no infinity, and what is no number compares with nothing."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"must be a finite number from 0 on, not {text!r}")
    return number


if __name__ == "__main__":
    sys.exit(main())
