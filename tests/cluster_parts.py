"""What tests.bench_cluster_gpu launches and asks, and what its figures are called. Pure.

Settings of each part, its prompts, and rows of its table from what a request's timeline says.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cluster.errors import BadRequest

LOWEST_ID, HIGHEST_ID = 256, 1999  # of prompts: text in both small models' vocabularies
SHORT = (5, 17, 300, 1500)  # tokens of the other prompts of one rank or two
BLOCK_TOKENS = 16
DEVICE_PATH, HOST_PATH, PACKED_PATH = "nvlink/cuda_ipc", "host/cma", "nixl/UCX"
Json = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """Ranks of the largest part: one prefill group, and decode groups of so many ranks each."""

    prefill: int = 4
    groups: int = 8
    ranks: int = 8

    @classmethod
    def parse(cls, text: str) -> Shape:
        """ "4+8x8"; BadRequest for anything else."""
        found = re.fullmatch(r"([1-9]\d*)\+([1-9]\d*)x([1-9]\d*)", text)
        if found is None:
            raise BadRequest(f"{text!r} is not a shape such as 4+8x8")
        return cls(*map(int, found.groups()))

    @property
    def decode(self) -> int:
        return self.groups * self.ranks

    @property
    def all(self) -> int:
        return self.prefill + self.decode

    def __str__(self) -> str:
        return f"{self.prefill}+{self.groups}x{self.ranks}"


@dataclass(frozen=True)
class Plan:
    long: int = 32704  # tokens of the longest prompt
    output: int = 64  # and of each answer
    few: int = 12  # tokens of an answer where all ranks answer at once
    shape: Shape = Shape()
    on_gpu: bool = True

    def settings(self, part: str, port: int) -> list[str]:
        """Over the defaults of deploy/configs/local.toml, as `--set` takes them."""
        mine = self._domain() if part == "domain" else self._pair(part)
        return [f"http.port={port}", *mine]

    def expected_path(self, part: str) -> str:
        """What carries the state, said by name."""
        if part == "packed" or (part == "domain" and not self.on_gpu):
            return PACKED_PATH
        return DEVICE_PATH if self.on_gpu else HOST_PATH

    def pair_prompts(self) -> dict[str, list[int]]:
        """By name, the longest last."""
        lengths = [one for one in SHORT if one < self.long] + [self.long]
        return {f"{length:,} tokens": prompt_of(length, seed=length) for length in lengths}

    def domain_prompts(self) -> dict[str, list[int]]:
        """One for each decode rank, of ragged lengths."""
        return {
            f"prompt {number}": prompt_of(8 + 5 * number % 113, seed=number)
            for number in range(self.shape.decode)
        }

    def _pair(self, part: str) -> list[str]:
        length = -(-(self.long + self.output) // BLOCK_TOKENS) * BLOCK_TOKENS
        engine = {
            "max_length": length,
            "num_blocks": 2 * (length // BLOCK_TOKENS) + 104,
            "chunk_tokens": 4096,
        }
        found = [f"{pool}.engine.{k}={v}" for pool in _POOLS for k, v in engine.items()]
        found += [f"transfer.ring_bytes={64 << 20}", f"transfer.cell_bytes={8 << 20}"]
        found += ["life.start_timeout_s=90", "life.drain_timeout_s=5"]
        if self.on_gpu:
            found += ["prefill.gpus=0.5", "decode.gpus=0.5"]
        if part == "colocated":
            return [*found, "prefill.groups=0", "router.colocated=true"]
        return [*found, f"transfer.path={part}"]

    def _domain(self) -> list[str]:
        shape = self.shape
        engine = {"max_length": 256, "num_blocks": 256, "num_slots": 16, "chunk_tokens": 128}
        found = [f"{pool}.engine.{k}={v}" for pool in _POOLS for k, v in engine.items()]
        found += ["model.path=deploy/models/tiny", "model.weights=random"]
        found += [f"prefill.ranks={shape.prefill}", f"decode.groups={shape.groups}"]
        # Each rank with the whole model: NCCL refuses several ranks of one group on one GPU.
        found += [f"decode.ranks={shape.ranks}", "prefill.ep=1", "decode.ep=1"]
        found += ["life.start_timeout_s=150", "life.drain_timeout_s=5"]
        # So many processes share a few cores and one GPU: silence is no death here.
        found += ["wire.t_detect_s=30", "wire.connect_timeout_s=30"]
        for pool in _POOLS:
            found.append(f"{pool}.engine.graphs=off")  # capturing would take most of the start
            found.append(f"{pool}.cpus=0.02")
            if self.on_gpu:  # Ray counts ten-thousandths
                found.append(f"{pool}.gpus={int(0.99 / shape.all * 1e4) / 1e4}")
        return found


_POOLS = ("prefill", "decode")


@dataclass
class Findings:
    """Of one part: rows of its table, and what does not hold."""

    part: str
    rows: dict[str, str] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def check(self, holds: bool, what: str) -> None:
        if not holds:
            self.wrong.append(what)

    def __str__(self) -> str:
        width = max(map(len, self.rows), default=0)
        lines = [f"  {name:{width}}  {value}" for name, value in self.rows.items()]
        verdict = [f"  DOES NOT HOLD: {one}" for one in self.wrong] or ["  holds"]
        return "\n".join([f"{self.part}:", *lines, *verdict])


def prompt_of(length: int, *, seed: int) -> list[int]:
    dice = random.Random(seed)
    return [dice.randint(LOWEST_ID, HIGHEST_ID) for _ in range(length)]


def happened(timeline: Mapping[str, Any], event: str) -> Json | None:
    """The last event of that name in an answer's timeline."""
    found: list[Json] = [one for one in timeline["events"] if one["event"] == event]
    return found[-1] if found else None


def in_words(timeline: Mapping[str, Any]) -> str:
    """Times of one request, and of its handoff if it had one."""
    words = f"TTFT {timeline['ttft_s'] * 1e3:,.1f} ms, TPOT {timeline['tpot_s'] * 1e3:.2f} ms"
    moved = happened(timeline, "handed_over")
    if moved is None:
        return words
    rate = moved["bytes"] / moved["push_s"] / 1e9
    return (
        f"{words}; {moved['bytes'] / 1e6:.2f} MB in {moved['pushes']} pushes, "
        f"{moved['push_s'] * 1e3:.1f} ms ({rate:.2f} GB/s), {moved['hidden_s'] * 1e3:.1f} of them "
        f"hidden; last chunk to accepted {moved['tail_s'] * 1e3:.1f} ms"
    )


def ranks_of(timelines: Sequence[Mapping[str, Any]], event: str, role: str) -> set[str]:
    """Which ranks that event names."""
    return {one[role] for each in timelines if (one := happened(each, event)) is not None}
