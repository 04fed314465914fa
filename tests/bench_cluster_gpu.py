"""The whole cluster under Ray on one GPU: HTTP in front, real ranks behind, every promise checked.

    python -m tests.bench_cluster_gpu
    python -m tests.bench_cluster_gpu --parts colocated,direct --set decode.engine.max_rows=128
    python -m tests.bench_cluster_gpu --cpu --long 600 --shape 1+2x2    # a rehearsal without a GPU

Four parts, each a launch, requests, and an end:

    colocated   one decode rank does it all: what the others have to answer
    direct      a prefill and a decode rank share the GPU; state goes from blocks to blocks
    domain      4 prefill and 64 decode ranks, 68 processes with the tiny model on one GPU
    packed      direct again, but by way of NIXL

Each prints its table at once. Exit status 1 if anything in it does not hold: other tokens than
colocated, another path than asked for, a rank that nobody knows, a process that is left.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster import local_ray
from cluster.config import ClusterConfig, load_config
from cluster.errors import BadRequest, ClusterError
from cluster.http_client import Answer
from cluster.launch import DEFAULT_CONFIG, Say, timed
from cluster.processes import alive
from tests.cluster_parts import Findings, Plan, Shape, happened, in_words, ranks_of
from tests.greedy_answers import References, ask, refer
from tests.token_match import match

if TYPE_CHECKING:  # it imports ray, which reads the environment then, before there is a head
    from tests.whole_cluster import WholeCluster

PARTS = ("colocated", "direct", "domain", "packed")  # in the order in which they run


class Bench:
    """The parts, on a Ray head that runs. What is colocated comes first, if it comes at all."""

    def __init__(self, plan: Plan, overrides: Sequence[str], margin: float, say: Say) -> None:
        self._plan, self._overrides, self._margin, self._say = plan, overrides, margin, say
        self._references: References = {}

    def run(self, part: str) -> Findings:
        """A part that breaks off is found to do so, and does not stop the others."""
        findings = Findings(part)
        try:
            with self._cluster(part, findings) as cluster:
                if part == "domain":
                    self._domain(cluster, findings)
                else:
                    self._pair(cluster, findings)
        except Exception as error:  # of whichever layer, Ray and httpx have a dozen types
            findings.wrong.append(f"{type(error).__name__}: {error}")
        return findings

    def _pair(self, cluster: WholeCluster, findings: Findings) -> None:
        """One prompt after another, twice: the first time compiles."""
        prompts, output = self._plan.pair_prompts(), self._plan.output
        colocated = cluster.config.router.colocated
        if not self._references:
            self._references = asyncio.run(refer(cluster.url, prompts, output, together=False))
        elif not colocated:
            asyncio.run(ask(cluster.url, prompts, output, together=False))
        answers = asyncio.run(ask(cluster.url, prompts, output, together=False))
        timelines = {name: answer.timeline or {} for name, answer in answers.items()}
        for name, timeline in timelines.items():
            findings.rows[name] = in_words(timeline)
        self._compare(self._references, answers, findings)
        if not colocated:
            self._check_paths(cluster, list(timelines.values()), findings)

    def _domain(self, cluster: WholeCluster, findings: Findings) -> None:
        """A prompt for each decode rank, all at once, alone and then handed over."""
        shape, prompts, output = self._plan.shape, self._plan.domain_prompts(), self._plan.few
        status = cluster.status()
        known = [one for group in status["groups"] for one in group["ranks"] if one["load"]]
        findings.rows["tandem status"] = (
            f"{status['application']['status']}; {len(known)} ranks known to the router in "
            f"{len(status['groups'])} groups"
        )
        findings.check(len(known) == shape.all, f"not all of {shape.all} ranks report")
        first = dict([next(iter(prompts.items()))])
        self._say("domain: one request, which compiles for all")
        asyncio.run(refer(cluster.url, first, output, together=True))
        asyncio.run(ask(cluster.url, first, output, together=True))
        self._say(f"domain: {len(prompts)} requests colocated")
        references = asyncio.run(refer(cluster.url, prompts, output, together=True))
        self._say(f"domain: {len(prompts)} requests handed over")
        began = time.monotonic()
        answers = asyncio.run(ask(cluster.url, prompts, output, together=True))
        seconds = time.monotonic() - began
        timelines = [answer.timeline or {} for answer in answers.values()]
        prefill = ranks_of(timelines, "routed", "prefill")
        decode = ranks_of(timelines, "taken_over", "decode")
        findings.rows[f"{len(prompts)} requests at once"] = (
            f"{seconds:.1f} s, {len(prompts) * output / seconds:.0f} tokens/s; by {len(prefill)} "
            f"prefill and {len(decode)} decode ranks"
        )
        self._compare(references, answers, findings)
        self._check_paths(cluster, timelines, findings)
        findings.check(len(prefill) == shape.prefill, "a prefill rank had nothing to do")
        findings.check(2 * len(decode) >= shape.decode, "most decode ranks had nothing to do")
        findings.rows["tandem experts"] = _experts(cluster.config.name)

    def _compare(
        self, references: References, answers: Mapping[str, Answer], findings: Findings
    ) -> None:
        token_ids = {name: answer.choices[0].token_ids for name, answer in answers.items()}
        found = match(references, token_ids, margin=self._margin)
        findings.rows["against colocated"] = str(found)
        findings.check(not found.wrong, "other tokens than colocated")

    def _check_paths(
        self, cluster: WholeCluster, timelines: Sequence[Mapping[str, Any]], findings: Findings
    ) -> None:
        """As requests, the server's metrics and the ranks themselves have it."""
        wanted, pairs = self._plan.expected_path(findings.part), cluster.status()["pairs"]
        taken = {
            moved["path"] if (moved := happened(one, "handed_over")) else "none"
            for one in timelines
        }
        counted, met = cluster.handed_over(), {pair["path"] for pair in pairs}
        slowest = min((pair["gb_per_s"] for pair in pairs), default=0.0)
        findings.rows["path"] = (
            f"{', '.join(sorted(taken))}; in all {sum(counted.values()) / 1e6:.1f} MB; "
            f"{len(pairs)} pairs have met, the slowest at {slowest:.1f} GB/s"
        )
        for what, found in (("requests", taken), ("metrics", set(counted)), ("pairs", met)):
            findings.check(
                found == {wanted}, f"{what} say {', '.join(sorted(found))}, not {wanted}"
            )

    @contextmanager
    def _cluster(self, part: str, findings: Findings) -> Iterator[WholeCluster]:
        from tests.whole_cluster import WholeCluster

        with local_ray.free_ports(1) as (port,):
            settings = self._plan.settings(part, port)
        config: ClusterConfig = load_config(DEFAULT_CONFIG, [*settings, *self._overrides])
        with WholeCluster(config, lambda line: self._say(f"{part}: {line}")) as cluster:
            ranks = ", ".join(f"{number} {role}" for role, number in cluster.ranks().items())
            findings.rows["up"] = f"{cluster.up_s:.1f} s: {ranks}{_gpu_memory()}"
            yield cluster
        findings.rows["down"] = (
            f"{cluster.down_s:.1f} s; its {len(cluster.family)} processes had ended "
            f"{cluster.gone_s:.1f} s later"
        )
        findings.check(not cluster.left, f"processes are left: {cluster.left}")


def _experts(name: str) -> str:
    """What `tandem experts` prints."""
    from cluster.application import connect
    from cluster.expert_status import Asker
    from cluster.expert_view import render

    return render(Asker(name, connect()).ask())


def _gpu_memory() -> str:
    """Of the first GPU, as its driver says; nothing where there is none."""
    if shutil.which("nvidia-smi") is None:
        return ""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    told = subprocess.run(query, capture_output=True, text=True, timeout=30).stdout.strip()
    return f"; {int(told) / 1024:.1f} GiB of the GPU's memory" if told.isdigit() else ""


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench_cluster_gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    plan = Plan()
    parser.add_argument("--parts", default=",".join(PARTS), help="(default: %(default)s)")
    parser.add_argument("--long", type=int, default=plan.long, help="tokens of the longest prompt")
    parser.add_argument("--output", type=int, default=plan.output, help="tokens of each answer")
    parser.add_argument("--few", type=int, default=plan.few, help="tokens of an answer in domain")
    parser.add_argument("--shape", default=str(plan.shape), help="of domain: prefill+groupsxranks")
    parser.add_argument("--cpu", action="store_true", help="ranks hold no GPU")
    parser.add_argument(
        "--margin",
        type=float,
        default=0.0,
        help="a token may differ where the reference's two likeliest were so close, in nats",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="a setting of every part, over its own; may be repeated",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found there")
    return parser


def main(words: Sequence[str] | None = None) -> int:
    """Exit status 1 if anything does not hold, 2 if it could not begin, 130 if interrupted."""
    options = arguments().parse_args(words)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was begun is ended
    try:
        plan = Plan(
            long=options.long,
            output=options.output,
            few=options.few,
            shape=Shape.parse(options.shape),
            on_gpu=not options.cpu,
        )
        parts = options.parts.split(",")
        if unknown := set(parts) - set(PARTS):
            raise BadRequest(f"no part is called {', '.join(sorted(unknown))}: {', '.join(PARTS)}")
        findings = run(plan, parts, options.set, options.margin)
    except (ClusterError, ValueError, OSError) as error:
        print(f"bench_cluster_gpu: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("bench_cluster_gpu: interrupted; all that it began has ended", file=sys.stderr)
        return 130
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(one) for one in findings], indent=1))
    return 1 if any(one.wrong for one in findings) else 0


def run(
    plan: Plan, parts: Sequence[str], overrides: Sequence[str], margin: float
) -> list[Findings]:
    """On a Ray head of its own, which has ended with all its processes afterwards."""
    say = timed()
    head = local_ray.start(cpus=max(4, os.cpu_count() or 1))  # Ray starts so many at a time
    head.enter_environment()
    family = head.family()
    found = []
    try:
        bench = Bench(plan, overrides, margin, say)
        for part in sorted(parts, key=PARTS.index):
            found.append(bench.run(part))
            family |= head.family()
            print(f"\n{found[-1]}\n", flush=True)
    finally:
        from cluster.application import disconnect

        disconnect()
        head.stop()
    left = alive(family)
    end = Findings("the end", {"Ray": f"{len(family)} processes have been"})
    end.check(not left, f"processes are left: {left}")
    print(end, flush=True)
    return [*found, end]


if __name__ == "__main__":
    sys.exit(main())
