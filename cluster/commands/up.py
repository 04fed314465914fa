"""`tandem up`: launch, if need be on a Ray head of its own."""

from __future__ import annotations

import argparse
import os

from cluster import local_ray
from cluster.commands.parser import Commands, add_command
from cluster.config import load_config
from cluster.launch import add_arguments, launch, timed

LOCAL_CPUS = 4  # what a local head hands out; our shares of it are small, whatever the machine has


def add_up(commands: Commands) -> None:
    help_text = "launch the cluster on a running Ray, or with --local on a Ray of its own"
    parser = add_command(commands, "up", help_text, _up)
    parser.add_argument(
        "--local", action="store_true", help="start a Ray head on this machine first, if none runs"
    )
    add_arguments(parser)


def _up(options: argparse.Namespace) -> None:
    config = load_config(options.config, options.set)
    say = timed()
    started = None
    if options.local and "RAY_ADDRESS" not in os.environ and local_ray.running() is None:
        say("starting a local Ray")
        started = local_ray.start(cpus=LOCAL_CPUS)
        local_ray.remember(started)
        started.enter_environment()
    try:
        launch(config, say=say)
    except BaseException:
        if started is not None:
            started.stop()
        raise
    if (head := local_ray.running()) is not None:
        words = " ".join(f"{name}={value}" for name, value in head.settings().items())
        say(f"dashboard {head.dashboard}; for other programs: export {words}")
