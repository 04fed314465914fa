"""`tandem down`: the end of an application, and of the Ray head that was started for it."""

from __future__ import annotations

import argparse
import os

from cluster import local_ray
from cluster.commands.parser import WHICH, Commands, add_command
from cluster.launch import timed


def add_down(commands: Commands) -> None:
    help_text = "drain and end the cluster, and the Ray that `up --local` started"
    parser = add_command(commands, "down", help_text, _down)
    parser.add_argument("--name", default="tandem", help=WHICH)


def _down(options: argparse.Namespace) -> None:
    from cluster.application import Applications, NotRunning, connect, disconnect, take_down

    say = timed()
    head = local_ray.running()
    ours = head if head is not None and os.environ.get("RAY_ADDRESS") == head.address else None
    try:
        take_down(options.name, say=say)
    except NotRunning as error:
        if ours is None or options.name != "tandem":
            raise
        say(str(error))  # the head that `up --local` left behind is ended all the same
    if ours is None:
        return
    if others := ", ".join(Applications(connect()).details()["applications"]):
        say(f"the local Ray stays: {others} runs on it")
        return
    disconnect()
    ours.stop()
    say("the local Ray has ended")
