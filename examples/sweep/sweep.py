"""Runs examples/benchmark.py once for each point of a curve, and keeps a JSON file of each.

    sweep.py decode TAG CONTEXT [NEXTN ACCEPTANCE]    requests at a time: 8 to 256
    sweep.py prefill TAG CONTEXT                      tokens of a batch: 4096 to 65536
    sweep.py encoder TAG [IMAGE_SIZE]                 images of a batch: 1 to 16

A point whose file is there is not measured again; a file appears whole or not at all. Variables:

    SWEEP_CONCURRENCY, SWEEP_BATCH_TOKENS, SWEEP_IMAGES    the points, such as "1 2 4"
    SWEEP_SCALE      divides all lengths, for small models (1)
    SWEEP_MODEL      as --model_name of benchmark.py
    SWEEP_OPTIONS    more options of benchmark.py, such as "--steps 5 --routing balanced"
    SWEEP_OUT        folder of the results (sweeps)
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # a script's own folder is first on the path; the root belongs there
    sys.path[0] = str(Path(__file__).resolve().parent.parent.parent)

from cluster.progress_bar import ProgressBar
from examples.sweep.points import BadPoint, read_point

BENCHMARK = Path(__file__).resolve().parent.parent / "benchmark.py"
RANGES = {
    "decode": ("SWEEP_CONCURRENCY", "8 16 32 64 128 256"),
    "prefill": ("SWEEP_BATCH_TOKENS", "4096 8192 16384 32768 65536"),
    "encoder": ("SWEEP_IMAGES", "1 2 4 8 16"),
}
BATCH_OPTION = {
    "decode": "--decode_num_requests",
    "prefill": "--prefill_tokens",
    "encoder": "--images",
}
IMAGE_SIZE = 800
Measure = Callable[[Sequence[str]], dict[str, Any]]


class Failed(Exception):
    """A point could not be measured; says why in one line."""


@dataclass(frozen=True)
class Plan:
    """`asked` are the options of every point; `batches` what differs."""

    phase: str
    tag: str
    asked: tuple[str, ...]
    batches: tuple[int, ...]
    folder: Path

    def options(self, batch: int) -> list[str]:
        return [*self.asked, BATCH_OPTION[self.phase], str(batch)]

    def file(self, batch: int) -> Path:
        return self.folder / self.tag / f"{self.phase}-{batch:06}.json"


def plan_of(arguments: Sequence[str], environ: Mapping[str, str]) -> Plan:
    """ValueError for numbers and tags that cannot be."""
    options = _parser().parse_args(arguments)
    if options.tag in ("", ".", "..") or options.tag.startswith("-") or "/" in options.tag:
        raise ValueError(f"TAG names a folder, so it cannot be {options.tag!r}")
    phase = options.phase
    asked = ["--phase", phase, "--tag", options.tag]
    if phase == "encoder":
        asked += ["--image_size", str(options.context or IMAGE_SIZE)]
    elif options.context is None:
        raise ValueError(f"{phase} needs CONTEXT, tokens of a prompt: {phase} TAG CONTEXT")
    else:
        asked += ["--context_length", str(options.context)]
    if phase == "decode":
        asked += ["--nextn", str(options.nextn), "--acceptance", str(options.acceptance)]
    asked += ["--scale", environ.get("SWEEP_SCALE") or "1"]
    if model := environ.get("SWEEP_MODEL"):
        asked += ["--model_name", model]
    asked += shlex.split(environ.get("SWEEP_OPTIONS", ""))
    variable, usual = RANGES[phase]
    text = environ.get(variable) or usual
    try:
        batches = tuple(sorted({int(word) for word in text.split()}))
    except ValueError:
        raise ValueError(f"{variable}: {text!r} are no whole numbers") from None
    if not batches or batches[0] < 1:
        raise ValueError(f"{variable}: {text!r} must list numbers from 1 on")
    return Plan(phase, options.tag, tuple(asked), batches, Path(environ.get("SWEEP_OUT", "sweeps")))


def sweep(plan: Plan, measure: Measure, bar: ProgressBar) -> list[str]:
    """Why points are missing; none if all are there. BadPoint if a file was made otherwise."""
    failures = []
    for batch in pending(plan):
        try:
            told = measure(plan.options(batch))
        except Failed as failure:
            failures.append(f"{plan.phase} {batch}: {failure}")
            continue
        _write(plan.file(batch), {"asked": list(plan.asked), "point": told})
        bar.step(f"{plan.phase} {batch}")
    bar.end()
    return failures


def pending(plan: Plan) -> list[int]:
    """Batches without a file."""
    left = []
    for batch in plan.batches:
        file = plan.file(batch)
        if not file.exists():
            left.append(batch)
            continue
        asked = read_point(file)["asked"]
        if asked != list(plan.asked):
            raise BadPoint(
                f"{file} was made with {shlex.join(asked)}, not {shlex.join(plan.asked)}; give "
                "this sweep another TAG, or remove it"
            )
    return left


def run_benchmark(options: Sequence[str]) -> dict[str, Any]:
    """In a process of its own: one that fails, for want of memory, takes no other with it."""
    command = [sys.executable, str(BENCHMARK), *options]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = done.stderr.strip().splitlines()
        raise Failed(said[-1] if said else f"exit status {done.returncode}")
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 1 if points are missing, 2 if it could not begin, 130 if interrupted."""
    try:
        plan = plan_of(sys.argv[1:] if arguments is None else arguments, os.environ)
        left = len(pending(plan))
        bar = ProgressBar(len(plan.batches), sys.stderr, done=len(plan.batches) - left)
        failures = sweep(plan, run_benchmark, bar)
    except (BadPoint, ValueError, OSError) as error:
        print(f"sweep.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("sweep.py: interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    for failure in failures:
        print(f"missing: {failure}", file=sys.stderr)
    if len(failures) < len(plan.batches):
        _plot(plan)
    return 1 if failures else 0


def _plot(plan: Plan) -> None:
    try:
        from examples.sweep.plot_pareto import plot
    except ModuleNotFoundError as error:
        print(f"no plot: {error.name} is missing; pip install 'tandem-serve[plots]'")
        return
    try:
        files = plot(plan.phase, plan.folder, plan.folder / plan.phase)
    except (BadPoint, OSError) as error:  # of another sweep in that folder: this one is measured
        print(f"no plot: {error}", file=sys.stderr)
        return
    for file in files:
        print(file)


def _write(file: Path, told: object) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    part.write_text(json.dumps(told, indent=1), encoding="utf-8")
    part.replace(file)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sweep.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("phase", choices=tuple(RANGES))
    parser.add_argument("tag", help="names the curve, such as ep64-decode-128k")
    parser.add_argument("context", type=int, nargs="?", help="tokens; of encoder: pixels of a side")
    parser.add_argument("nextn", type=int, nargs="?", default=0, help="drafts (default: 0)")
    parser.add_argument("acceptance", type=float, nargs="?", default=0.75)
    return parser


if __name__ == "__main__":
    sys.exit(main())
