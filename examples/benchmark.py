"""Measures what one rank's steps cost: decode, prefill, image encoder. No server, no scheduling.

    python examples/benchmark.py
    python examples/benchmark.py --decode_num_requests 1
    python examples/benchmark.py --context_length 131072 --yoco_clip --scale 64
    python examples/benchmark.py --prompt_mode image --model_name tandem-tiny

A model without a checkpoint gets random weights. docs/guide.md says how the figures are counted.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":  # a script's own folder is first on the path; the root belongs there
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch

from cluster import environment
from cluster.config import load_config, setting_names
from cluster.environment_table import BY_NAME
from cluster.errors import ClusterError
from examples.bench.point import Ran, json_line, lines, point
from examples.bench.rank import Job, Outcome, measure, measure_on
from examples.bench.settings import Phase, Settings, from_environment, routing_of
from examples.counts import count, positive
from kernels.accelerator import Accelerator, choose
from model.spec import ModelSpec
from offline.machines import Machines, machines
from offline.model_folder import model_folder

CONTEXT = 8192  # tokens, unless the model has fewer positions
CPU_CONTEXT = 1024
KEEP_BEYOND_WINDOW = 12  # DeepSeek's 140 rows for a window of 128
PHASES: tuple[Phase, ...] = ("decode", "prefill", "encoder")


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 2, and one line, for what cannot be; 130 if interrupted."""
    options = _parser().parse_args(arguments)
    others = {
        name: value
        for name, value in os.environ.items()
        if name not in BY_NAME or not BY_NAME[name].benchmark
    }
    for remark in environment.remarks(others, setting_names()):
        print(f"note: {remark}", file=sys.stderr)
    try:
        for line in run(options):
            print(line, flush=True)
    except (ClusterError, ValueError, OSError) as error:
        print(f"benchmark.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("benchmark.py: interrupted", file=sys.stderr)
        return 130
    return 0


def run(options: argparse.Namespace) -> list[str]:
    """The table and the JSON lines. ValueError or StartupError for what cannot be."""
    accelerator = choose(load_config(None).decode.accelerator)
    there = accelerator.module.device_count() if accelerator.kind != "cpu" else 0
    here = machines(os.environ, cards_there=there)
    folder = model_folder(options.model_name)
    settings = settings_of(options, ModelSpec.load(folder), here, accelerator)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.touch()  # a place that cannot be written to is told before, not after
    job = Job(folder, accelerator.kind, _phases(options), (settings,), options.profile)
    outcomes = [measure(job)] if here.cards == 1 else measure_on(_cards(here), job)
    told = _points(folder.name, accelerator, here, outcomes)
    found = [json_line(one) for one in told]
    if options.json is not None:
        with options.json.open("a", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in found)
    first = outcomes[0]
    return [
        f"{folder.name}, {first.weights} weights, {first.device}; ep_size {here.ep_size} = "
        f"{here.count} machine(s) x {here.cards} card(s); routing {settings.routing}",
        *_notes(here, settings),
        *lines(told),
        *found,
    ]


def settings_of(
    options: argparse.Namespace, spec: ModelSpec, here: Machines, accelerator: Accelerator
) -> Settings:
    """With lengths divided by --scale, and what is not given taken from the environment."""
    usual = CPU_CONTEXT if accelerator.kind == "cpu" else CONTEXT
    context = options.context_length or usual * options.scale
    tokens = options.prefill_tokens or context
    keep = from_environment(os.environ, "DEEPINFER_YOCO_PREFILL_KEEP_TOKENS", 0)
    if options.clock == "cpu" and accelerator.kind != "cpu":
        raise ValueError(f"--clock cpu says nothing of work on {accelerator.kind}")
    nextn = options.nextn
    if nextn is None:
        nextn = from_environment(os.environ, "DEEPINFER_USE_NEXTN_DECODE", 0)
    if not 0 <= nextn <= spec.dspark_block_size:
        raise ValueError(
            f"--nextn {nextn}: a draft block of this model has {spec.dspark_block_size} tokens"
        )
    ranks = here.ep_size if here.ep_size > 1 else 8  # whose first one a skewed routing loads
    return Settings(
        tag=options.tag,
        requests=options.decode_num_requests,
        context=-(-context // options.scale),
        nextn=nextn,
        acceptance=options.acceptance,
        prefill_tokens=-(-tokens // options.scale),
        chunk_tokens=options.chunk_tokens or (128 if accelerator.kind == "cpu" else 8192),
        yoco_keep=(keep or spec.sliding_window + KEEP_BEYOND_WINDOW) if options.yoco_clip else 0,
        prompt_mode=options.prompt_mode,
        image_size=options.image_size,
        images=options.images,
        routing=routing_of(options.routing, options.imbalance, ranks, os.environ),
        warmup=options.warmup,
        steps=options.steps,
        scale=options.scale,
        clock=options.clock,
    )


def _phases(options: argparse.Namespace) -> tuple[Phase, ...]:
    if options.phase:
        return (options.phase,)
    return PHASES if options.prompt_mode == "image" else PHASES[:2]


def _cards(here: Machines) -> list[str]:
    listed = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return [card.strip() for card in listed.split(",") if card.strip()] or [
        str(card) for card in range(here.cards)
    ]


def _points(
    name: str, accelerator: Accelerator, here: Machines, outcomes: Sequence[Outcome]
) -> list[dict[str, object]]:
    """Of each phase the slowest rank's: a step of ranks that work together takes so long."""
    first = outcomes[0]
    ran = Ran(
        model=name,
        weights=first.weights,
        accelerator=accelerator.kind,
        device=first.device,
        torch=torch.__version__,
        ranks=len(outcomes),
        world_size=here.count,
    )
    slowest = [
        max(same, key=lambda one: one.times.median)
        for same in zip(*(outcome.measured for outcome in outcomes), strict=True)
    ]
    return [point(one.phase, one.settings, ran, one.times, one.per_image) for one in slowest]


def _notes(here: Machines, settings: Settings) -> list[str]:
    found = []
    if here.cards > 1:
        found.append("note: ranks hold all experts each, and exchange nothing: no expert traffic")
    if here.count > 1:
        found.append(f"note: this is machine {here.rank} of {here.count}; others measure their own")
    if settings.clock == "cpu":
        found.append("note: times are processor time of this process, not of a clock")
    if settings.scale > 1:
        found.append(f"note: --scale {settings.scale}: lengths are divided by it")
    return found


def _parser() -> argparse.ArgumentParser:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        prog="benchmark.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model_name", help="folder or name (default: DEEPINFER_HF_MODEL_DIR, else tandem-mini)")
    add("--phase", choices=PHASES, help="only this one (default: decode and prefill)")
    add("--decode_num_requests", type=positive, default=8, help="of each rank (default: 8)")
    add("--context_length", type=positive, help="tokens of a prompt (default: 8192; CPU: 1024)")
    add("--prefill_tokens", type=positive, help="of a batch (default: one prompt)")
    add("--chunk_tokens", type=positive, help="of a step of a prompt (default: 8192; CPU: 128)")
    add("--yoco_clip", action="store_true", help="truncate prefill after the last KV source")
    add("--nextn", type=count, help="drafts (default: DEEPINFER_USE_NEXTN_DECODE, else 0)")
    add("--acceptance", type=_share, default=0.75, help="of a draft, for the converted figures")
    add("--prompt_mode", choices=("text", "image"), default="text", help="image: one a prompt")
    add("--image_size", type=positive, default=224, help="pixels of a side (default: 224)")
    add("--images", type=positive, default=1, help="of an encoder's batch (default: 1)")
    add("--routing", choices=("natural", "balanced", "skewed"), help="of experts' rows")
    add("--imbalance", type=float, help="skewed: the first rank gets so many times the average")
    add("--warmup", type=count, default=2, help="steps before those that count (default: 2)")
    add("--steps", type=positive, default=10, help="of which the median counts (default: 10)")
    add("--clock", choices=("wall", "cpu"), default="wall", help="cpu: on a CPU that is shared")
    add("--scale", type=positive, default=1, help="divide all lengths, for small models")
    add("--tag", default="", help="name of the run, such as ep64-decode-128k")
    add("--json", type=Path, help="append the JSON lines to this file")
    add("--profile", type=Path, metavar="FILE", help="write a Chrome trace of a step a phase")
    return parser


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"must be in 0 to 1, not {text}")
    return value


if __name__ == "__main__":
    sys.exit(main())
