"""The whole domain in one process: 4 prefill ranks as one ep4, 64 decode ranks as eight ep8.

`python -m tests.topology [REQUESTS]` prints what it took. Real ranks, router, sockets, exchange
and hand-overs; the model is tiny (4 layers of 8 experts, each in two slots or so), ranks are
threads. What it shows is that the shape works and what is decided; times are of threads that
share a few cores, not of GPUs.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

from cluster.config import ClusterConfig
from cluster.expert_messages import ExpertDecision, GroupBalance
from cluster.messages import Request
from engine.expert_exchange import Exchange, Header, local_exchanges
from engine.expert_group import ExpertGroup
from model.spec import ModelSpec
from model.transformer import Transformer
from model.weights import random_weights
from tests.groups import GroupedCluster, KeptWeights
from tests.tiny import MODEL, TinyCluster, make_prompt, make_request, tiny_config, until

PREFILL, DECODE = (4,), (8,) * 8
RANKS = sum(PREFILL) + sum(DECODE)
PATIENCE_S = 300.0  # 68 engines on a few cores


@dataclass(frozen=True)
class Findings:
    start_s: float  # until the router has heard of every rank and knows every group's placement
    exchange_ms: float  # of one layer in one group of eight, nothing else going on
    requests: int
    answers_s: float  # for all of them at once, each prefilled here and decoded there
    same: bool  # as one rank alone answers
    handed_over: int
    given: int
    arrived: int
    rebalance_s: float  # median from giving a placement to its use
    stall_ms: float  # the longest of all switches
    before: float  # imbalance of the windows that led to placements, mean
    after: float  # of the same windows with these placements

    def table(self) -> str:
        """Markdown."""
        rows = {
            f"{RANKS} ranks in {len(PREFILL) + len(DECODE)} groups up and known": (
                f"{self.start_s:.1f} s"
            ),
            "exchange of one layer, 8 ranks of 8 rows": f"{self.exchange_ms:.2f} ms",
            f"{self.requests} requests at once, prefill to decode": f"{self.answers_s:.1f} s",
            "of them handed over": str(self.handed_over),
            "same tokens as one rank alone": "all" if self.same else "NOT ALL",
            "placements given, in use": f"{self.given}, {self.arrived}",
            "from given to in use, median": f"{self.rebalance_s:.2f} s",
            "steps stood still for a switch, at most": f"{self.stall_ms:.1f} ms",
            "busiest rank over mean in these windows": f"{self.before:.3f} -> {self.after:.3f}",
        }
        return "\n".join(
            ["| what | measured |", "|---|---|", *(f"| {k} | {v} |" for k, v in rows.items())]
        )


@cache
def four_layers() -> ModelSpec:
    """The tiny model cut to four layers, every kind of attention in them."""
    raw = json.loads((MODEL / "config.json").read_text(encoding="utf-8"))
    raw["text_config"] |= {
        "num_hidden_layers": 4,
        "num_nextn_predict_layers": 1,
        "compress_ratios": [0, 2, 2, 1, 0],
        "kv_source_layer_ids": [1, 3],
        "index_source_layer_ids": [1, 3],
        "dspark_target_layer_ids": [1, 2, 3],
    }
    return ModelSpec.from_dict(raw)


@cache
def weights() -> KeptWeights:
    torch.set_num_threads(1)
    return KeptWeights(random_weights(four_layers(), 0))


def part(exchange: Exchange, *, group: str, extra: int) -> tuple[ExpertGroup, Transformer]:
    experts = ExpertGroup.first(exchange, group, four_layers(), extra)
    return experts, Transformer(four_layers(), weights(), make_experts=experts.make_experts)


def config() -> ClusterConfig:
    engine = {"num_blocks": 48, "num_slots": 8, "chunk_tokens": 32, "max_length": 256}
    return tiny_config(
        prefill={"engine": engine | {"num_blocks": 192, "num_slots": 32}},
        decode={"engine": engine},
        wire={"heartbeat_s": 2.0, "t_detect_s": PATIENCE_S, "connect_timeout_s": PATIENCE_S},
        router={"report_s": 1.0},
        generation={
            "reserve_timeout_s": PATIENCE_S,
            "recovery_wait_s": PATIENCE_S,
            "new_request_wait_s": PATIENCE_S,
            "step_timeout_s": PATIENCE_S,
        },
        experts={  # short windows and an open gate: every group shall be seen to change
            "report_s": 0.5,
            "window_steps": 8,
            "most_moved_share": 0.3,
            "seconds_a_token": 1.0,
            "expert_bytes": 1,
        },
    )


def exchange_ms(ranks: int = 8, rows: int = 8, rounds: int = 50) -> float:
    """Of one layer: counts, rows there, rows back; each rank has as many rows for every other."""
    ends = local_exchanges(ranks, timeout_s=PATIENCE_S)
    sizes = np.full((ranks, ranks), rows // ranks)
    seconds = [0.0] * ranks

    def take_part(end: Exchange) -> None:
        sent = torch.zeros(rows, four_layers().hidden_size + 1)
        end.agree(Header(rows=rows))
        began = time.perf_counter()
        for _ in range(rounds):
            end.share_counts(np.zeros(8, np.int64))
            end.combine(end.dispatch(sent, sizes), sizes)
        seconds[end.index] = time.perf_counter() - began

    threads = [threading.Thread(target=take_part, args=(end,)) for end in ends]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return max(seconds) / rounds * 1e3


async def alone(asked: list[Request], settings: ClusterConfig) -> list[list[int]]:
    """What one rank with the whole model answers, one request after another."""
    whole = Transformer(four_layers(), weights())
    colocated = settings.router.model_copy(update={"colocated": True})
    settings = settings.model_copy(update={"router": colocated})
    async with TinyCluster(prefill=0, model=whole, config=settings) as cluster:
        return [await cluster.answer(one) for one in asked]


async def run(requests: int) -> Findings:
    # A rank waits for its engine's end in a thread, and a group's engines end together.
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2 * RANKS))
    settings = config()
    asked = [
        make_request(make_prompt(10 + number % 40, number), f"r{number}", max_tokens=10)
        for number in range(requests)
    ]
    expected = await alone(asked, settings)
    layer_ms = exchange_ms()

    began = time.perf_counter()

    def groups() -> tuple[GroupBalance, ...]:
        return cluster.router.experts.balance().groups

    async with GroupedCluster(
        settings, prefill=PREFILL, decode=DECODE, extra=8, make_part=part, patience_s=PATIENCE_S
    ) as cluster:
        await until(lambda: len(groups()) == len(PREFILL) + len(DECODE), PATIENCE_S)
        start_s = time.perf_counter() - began

        began = time.perf_counter()
        answers = await asyncio.gather(*(cluster.answer(one) for one in asked))
        answers_s = time.perf_counter() - began

        await until(lambda: not any(one.given for one in groups()), PATIENCE_S)
        again = await asyncio.gather(*(cluster.answer(one) for one in asked))
        await until(cluster.all_free, PATIENCE_S)
        decisions = [decision for one in groups() for decision in one.decisions]
        moved: list[Any] = [rank.status()["moved"] for rank in cluster.prefill]
        handed_over = sum(path["handoffs"] for paths in moved for path in paths.values())
    return _findings(
        decisions,
        start_s=start_s,
        exchange_ms=layer_ms,
        requests=requests,
        answers_s=answers_s,
        same=answers == expected == again,
        handed_over=handed_over,
    )


def _findings(decisions: list[ExpertDecision], **measured: Any) -> Findings:
    given = [one for one in decisions if one.outcome == "given"]
    arrived = [one for one in decisions if one.outcome == "arrived"]
    return Findings(
        given=len(given),
        arrived=len(arrived),
        rebalance_s=float(np.median([one.seconds for one in arrived])) if arrived else 0.0,
        stall_ms=max((one.stall_s for one in arrived), default=0.0) * 1e3,
        before=float(np.mean([one.before for one in given])) if given else 1.0,
        after=float(np.mean([one.after for one in given])) if given else 1.0,
        **measured,
    )


def main() -> None:
    print(asyncio.run(run(int(sys.argv[1]) if len(sys.argv) > 1 else 64)).table())


if __name__ == "__main__":
    main()
