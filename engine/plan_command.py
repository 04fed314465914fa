"""`tandem plan`: does this configuration of this model fit, and how many long requests with it?

tandem plan deploy/configs/scale_up_domain.toml --model deploy/models/deepseek-v41-flash \
    --gpu-memory 141GB
"""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import asdict
from pathlib import Path

from cluster.config import load_config
from cluster.errors import StartupError
from engine.memory_plan import GpuMemory, plan_lines, plan_memory
from model.spec import ModelSpec

PLAN = "what each rank of a configuration takes of its GPU's memory, and how many requests fit"
_UNITS = {"": 1, "MB": 10**6, "GB": 10**9, "MIB": 1 << 20, "GIB": 1 << 30}


def add_plan(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    plan = commands.add_parser("plan", help=PLAN, description=PLAN)
    plan.add_argument("config", type=Path, help="TOML file with the sections of cluster/config.py")
    plan.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    plan.add_argument("--model", type=Path, help="a folder with config.json, if not model.path")
    plan.add_argument(
        "--gpu-memory", type=parse_bytes, metavar="SIZE", help="of one GPU, as 141GB or 80GiB"
    )
    plan.add_argument(
        "--share", type=float, default=0.9, help="of it that may be planned (default: 0.9)"
    )
    plan.add_argument(
        "--length", type=int, help="tokens of an example request (default: decode's max_length)"
    )
    plan.add_argument(
        "--experts",
        choices=("shared", "whole"),
        default="shared",
        help="split over a group's ranks, or all on each of them (default: shared)",
    )
    plan.add_argument("--json", action="store_true", help="print JSON")
    plan.set_defaults(run=run_plan)


def run_plan(options: argparse.Namespace) -> int:
    """Raises StartupError, with the numbers, for what does not fit."""
    if not 0 < options.share <= 1:
        raise ValueError(f"--share is above 0 and at most 1, not {options.share}")
    config = load_config(options.config, options.set)
    folder = Path(options.model or config.model.path)
    if not (folder / "config.json").is_file():
        raise StartupError(
            f"{folder} has no config.json; --model names a folder that has, such as "
            "deploy/models/deepseek-v41-flash"
        )
    length = config.decode.engine.max_length if options.length is None else options.length
    spec = ModelSpec.load(folder)
    plans = plan_memory(config, spec, length=length, experts=options.experts)
    memory = GpuMemory(options.gpu_memory, options.share) if options.gpu_memory else None
    if options.json:
        told = [asdict(plan) | {"bytes": plan.nbytes, "requests": plan.requests} for plan in plans]
        print(json.dumps({"length": length, "pools": told}, indent=2))
    else:
        print("\n".join(plan_lines(plans, length, memory)))
    if memory is not None:
        for plan in plans:
            plan.check(memory)
    return 0


def parse_bytes(text: str) -> int:
    """`141GB`, `80 GiB`, `1000000`. Raises argparse's error for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", text.strip())
    if match is None or match[2].upper() not in _UNITS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 141GB or 80GiB")
    return int(float(match[1]) * _UNITS[match[2].upper()])
