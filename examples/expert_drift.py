"""Traffic that drifts from one kind to another, and what the router makes of it.

    tandem up --local --config deploy/configs/local_ep2.toml
    python examples/expert_drift.py

Kinds of text like different experts (docs/mini.md says how much in tandem-mini), so a placement
that is level for questions is not for code. This sends questions, then more and more functions to
complete, and prints every placement that the router gives meanwhile, what it was worth in the
windows after it, and whether answers stayed the same.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Iterator
from itertools import cycle, product

import httpx

from cluster import local_ray
from cluster.errors import ClusterError
from cluster.expert_messages import ExpertBalance, GroupBalance
from cluster.expert_placement import first_placement
from cluster.expert_tables import counts_of, placement_of
from cluster.expert_view import in_words

AT_ONCE = 8  # requests
LOOK_S = 1.0  # between two looks at the router

THINGS = ("river", "city", "planet", "library", "engine", "garden", "island", "bridge")
QUESTIONS = (
    "What is the largest {thing} in Japan?",
    "Tell me something about a {thing}.",
    "Why is a {thing} useful?",
)
VERBS = ("add", "count", "sort", "find", "merge", "reverse", "check", "join")
NOUNS = ("values", "lines", "names", "files")
FUNCTION = 'def {verb}_{noun}({noun}):\n    """Return the {verb} of {noun}."""\n    '

Look = Callable[[], ExpertBalance]


def questions() -> Iterator[str]:
    return cycle(form.format(thing=thing) for form, thing in product(QUESTIONS, THINGS))


def functions() -> Iterator[str]:
    return cycle(FUNCTION.format(verb=verb, noun=noun) for verb, noun in product(VERBS, NOUNS))


def drifting(requests: int) -> Iterator[str]:
    """A third are questions, in the next third functions take over, then functions only."""
    asked, coded, owed = questions(), functions(), 0.0
    for number in range(requests):
        owed += min(1.0, max(0.0, 3 * number / requests - 1))
        if owed >= 1.0:
            owed -= 1.0
            yield next(coded)
        else:
            yield next(asked)


class Watch:
    """Prints what is new at the router, and keeps how level each window of each group was."""

    def __init__(self, look: Look) -> None:
        self._look = look
        self._told: set[tuple[str, float, str]] = set()
        self._seen: dict[str, int] = {}  # windows of each group so far
        self.in_order: dict[str, list[float]] = {}  # imbalance had experts stayed as they began
        self.as_placed: dict[str, list[float]] = {}  # imbalance with the placement then in use

    async def run(self) -> None:
        while True:
            for group in (await asyncio.to_thread(self._look)).groups:
                self.take(group)
            await asyncio.sleep(LOOK_S)

    def take(self, group: GroupBalance) -> None:
        for decision in group.decisions:
            key = (group.group, decision.at, decision.outcome)
            if key not in self._told and decision.outcome != "kept":
                print(f"  {group.group}: {in_words(decision)}", flush=True)
            self._told.add(key)
        if group.loads is None or self._seen.get(group.group) == group.windows:
            return
        self._seen[group.group] = group.windows
        table, loads = group.table, counts_of(group.loads)
        begun = first_placement(table.layers, table.experts, table.ranks, table.slots)
        level = float(begun.imbalance(loads).mean())
        placed = float(placement_of(table).imbalance(loads).mean())
        self.in_order.setdefault(group.group, []).append(level)
        self.as_placed.setdefault(group.group, []).append(placed)

    def summary(self) -> Iterator[str]:
        for group, level in self.in_order.items():
            placed = self.as_placed[group]
            late = max(1, len(level) // 3)
            yield (
                f"{group}: {len(level)} windows seen; busiest rank over mean in the last {late}: "
                f"{_mean(placed[-late:]):.3f}, and {_mean(level[-late:]):.3f} had experts stayed "
                "in order"
            )


async def complete(client: httpx.AsyncClient, prompt: str, tokens: int) -> str:
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0.0}
    answer = await client.post("/v1/completions", json=body)
    answer.raise_for_status()
    text: str = answer.json()["choices"][0]["text"]
    return text


async def drive(url: str, requests: int, tokens: int, look: Look) -> bool:
    """Whether the same questions got the same answers before and after."""
    probes = [next(questions()), next(functions())]
    left = drifting(requests)
    watch = Watch(look)
    async with httpx.AsyncClient(base_url=url, timeout=300.0) as client:
        before = [await complete(client, probe, tokens) for probe in probes]
        watching = asyncio.create_task(watch.run())

        async def caller() -> None:
            for prompt in left:
                await complete(client, prompt, tokens)

        await asyncio.gather(*(caller() for _ in range(AT_ONCE)))
        watching.cancel()
        after = [await complete(client, probe, tokens) for probe in probes]
    print("\n".join(watch.summary()) or "no window was full: send more requests")
    return before == after


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8100")
    parser.add_argument("--name", default="tandem", help="of the application")
    parser.add_argument("--requests", type=int, default=240)
    parser.add_argument("--tokens", type=int, default=48, help="of an answer")
    options = parser.parse_args()
    local_ray.prefer()
    from cluster.application import connect  # not earlier: ray reads the environment
    from cluster.expert_status import Asker

    try:
        look = Asker(options.name, connect()).ask
        print(f"{options.requests} requests: questions first, then functions", flush=True)
        same = asyncio.run(drive(options.url, options.requests, options.tokens, look))
    except (ClusterError, httpx.HTTPError) as error:
        print(f"expert_drift: {error}", file=sys.stderr)
        return 1
    print("answers before and after: " + ("the same" if same else "NOT the same"))
    return 0 if same else 1


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


if __name__ == "__main__":
    sys.exit(main())
