"""One rank of a benchmark: loads the model on its card and measures the phases asked for.

Several ranks are several processes, each with one card; they do not talk to each other, they only
begin to measure at the same time.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from cluster.errors import ClusterError, StartupError
from examples.bench.phases import (
    Step,
    decode_steps,
    encoder_steps,
    image_positions,
    prefill_steps,
)
from examples.bench.settings import Phase, Settings
from examples.bench.subject import Subject, load_subject
from examples.bench.timing import Times, timed
from examples.bench.trace import traced
from kernels.accelerator import choose

PATIENCE_S = 1800.0  # for the slowest rank to load and warm up
_STEPS: dict[Phase, Callable[[Subject, Settings], AbstractContextManager[Step]]] = {
    "decode": decode_steps,
    "prefill": prefill_steps,
    "encoder": encoder_steps,
}


@dataclass(frozen=True)
class Job:
    folder: Path
    accelerator: Any  # a name that kernels.accelerator.choose() takes
    phases: tuple[Phase, ...]
    settings: tuple[Settings, ...]  # each phase is measured with each
    trace: Path | None = None


@dataclass(frozen=True)
class Measured:
    phase: Phase
    settings: Settings
    times: Times
    per_image: int


@dataclass(frozen=True)
class Outcome:
    weights: str
    device: str
    measured: tuple[Measured, ...]


def measure(job: Job, together: Callable[[], object] = lambda: None) -> Outcome:
    """ValueError, in one line, for sizes that the model does not have or that do not fit."""
    torch.set_num_threads(1)
    accelerator = choose(job.accelerator)
    first = job.settings[0]
    truncated = any(one.yoco_keep for one in job.settings)
    subject = load_subject(
        job.folder, accelerator, routing=first.routing, truncated=truncated, seed=first.seed
    )
    measured = []
    with torch.inference_mode():
        for settings in job.settings:
            _check(subject, settings, job.phases)
            for phase in job.phases:
                measured.append(_measure(subject, phase, settings, together, job.trace))
    device = "CPU" if accelerator.kind == "cpu" else accelerator.module.get_device_name()
    return Outcome(subject.weights, device, tuple(measured))


def measure_on(cards: Sequence[str], job: Job) -> list[Outcome]:
    """A process for each card, with that card alone visible."""
    spawn = multiprocessing.get_context("spawn")
    barrier = spawn.Barrier(len(cards), timeout=PATIENCE_S)
    pipes, processes = [], []
    for number, card in enumerate(cards):
        ours, theirs = spawn.Pipe(duplex=False)
        its = job if number == 0 else Job(job.folder, job.accelerator, job.phases, job.settings)
        process = spawn.Process(target=_rank, args=(card, its, barrier, theirs), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        return [_received(number, pipe) for number, pipe in enumerate(pipes)]
    finally:
        for process in processes:
            process.terminate()
            process.join()


def _rank(card: str, job: Job, barrier: Any, told: Connection) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = card
    try:
        told.send(measure(job, barrier.wait))
    except (ClusterError, ValueError) as error:
        barrier.abort()
        told.send(str(error))


def _received(number: int, pipe: Connection) -> Outcome:
    try:
        outcome = pipe.recv()
    except EOFError:
        raise StartupError(f"rank {number} has died; see its words above") from None
    if isinstance(outcome, str):
        raise StartupError(f"rank {number}: {outcome}")
    assert isinstance(outcome, Outcome)
    return outcome


def _measure(
    subject: Subject,
    phase: Phase,
    settings: Settings,
    together: Callable[[], object],
    trace: Path | None,
) -> Measured:
    images = phase == "encoder" or settings.prompt_mode == "image"
    per_image = image_positions(subject, settings.image_size) if images else 0
    with _STEPS[phase](subject, settings) as step:
        times = timed(
            step,
            subject.accelerator,
            warmup=settings.warmup,
            steps=settings.steps,
            clock=settings.clock,
            together=together,
        )
        if trace is not None:
            traced(step, subject.accelerator, trace.with_name(f"{trace.stem}-{phase}.json"))
    return Measured(phase, settings, times, per_image)


def _check(subject: Subject, settings: Settings, phases: Sequence[Phase]) -> None:
    positions = subject.spec.max_position_embeddings
    longest = settings.context + 1 + settings.nextn if "decode" in phases else settings.context
    if longest > positions:
        raise ValueError(
            f"--context_length {settings.context} does not fit {subject.name}, which has "
            f"{positions} positions; --scale {-(-longest * settings.scale // positions)} divides "
            "it so that it does"
        )
    least = subject.spec.sliding_window + subject.spec.dspark_block_size
    if 0 < settings.yoco_keep < least:
        raise ValueError(
            f"--yoco_clip keeps {settings.yoco_keep} rows; {subject.name} has a window of "
            f"{subject.spec.sliding_window} and drafts of {subject.spec.dspark_block_size}, so it "
            f"needs {least}"
        )
