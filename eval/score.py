"""Scores files of results that run_eval.py has written:

    python eval/score.py results/*.jsonl

Answers are read out of the texts again, so a change of that needs no new run.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

if __name__ == "__main__":  # a script's own folder is first on the path; the root belongs there
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from eval.extraction import extract, is_right
from eval.passing import pass_at_1
from eval.question import Kind
from eval.results import BadResults, Result, read_results


def right(result: Result) -> bool:
    kind = cast(Kind, result.kind)
    return is_right(extract(result.text, kind), result.answer, kind)


def by_question(results: Sequence[Result]) -> Mapping[str, Sequence[bool]]:
    """Whether each answer to a question is right."""
    found: dict[str, list[bool]] = defaultdict(list)
    for result in results:
        found[result.id].append(right(result))
    return found


def summary(name: str, results: Sequence[Result]) -> str:
    """One line: the score with its interval, and what stood in its way."""
    score = pass_at_1(by_question(results))
    unread = sum(extract(one.text, cast(Kind, one.kind)) is None for one in results)
    cut = sum(one.finish == "length" for one in results)
    tokens = sum(one.completion_tokens for one in results) / len(results)
    return (
        f"{name}: Pass@1 {100 * score.share:.1f} % (95 %: {100 * score.low:.1f} to "
        f"{100 * score.high:.1f}), {score.questions} questions, {score.answers} answers; "
        f"{unread} without an answer in it, {cut} cut at max_tokens; {tokens:.0f} tokens an answer"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0 if every file could be scored."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        prog="score.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("results", nargs="+", type=Path, help="files of run_eval.py's --out")
    parser.add_argument("--wrong", action="store_true", help="list the answers that are wrong too")
    options = parser.parse_args(arguments)
    status = 0
    for path in options.results:
        try:
            settings, results = read_results(path)
            if not results:
                raise BadResults(f"{path} has no answers yet")
        except BadResults as error:
            print(error, file=sys.stderr)
            status = 1
            continue
        print(summary(str(settings.get("set", path)), results))
        for result in results if options.wrong else ():
            if not right(result):
                found = extract(result.text, cast(Kind, result.kind))
                print(f"  {result.id}, sample {result.sample}: {found}, not {result.answer}")
    return status


if __name__ == "__main__":
    sys.exit(main())
