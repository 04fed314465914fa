"""The `tandem` command: up, down, status, demo, bench, and what model/commands.py adds.

Each command's `run` takes the parsed arguments and returns the exit status. Imports wait for the
command that needs them: `tandem --help` answers without ray and torch.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence

from cluster import local_ray
from cluster.bench.command import add_bench
from cluster.config import load_config
from cluster.errors import ClusterError
from cluster.launch import add_arguments, launch, timed
from model.commands import add_commands

LOCAL_CPUS = 4  # what a local head hands out; our shares of it are small, whatever the machine has


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="tandem", description="Prefill and decode on separate GPUs, one cluster on Ray."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_up(commands)
    _add_down(commands)
    _add_status(commands)
    _add_demo(commands)
    add_bench(commands)
    add_commands(commands)
    options = parser.parse_args(arguments)
    local_ray.prefer()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was begun is ended
    try:
        return int(options.run(options) or 0)
    except (ClusterError, ValueError, OSError) as error:
        print(f"tandem: {error}", file=sys.stderr)
    except ModuleNotFoundError as error:
        print(f"tandem: {sys.executable} lacks {error.name}; install tandem-serve", file=sys.stderr)
    except KeyboardInterrupt:
        print("tandem: interrupted", file=sys.stderr)
    return 1


def _add_up(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    help_text = "launch the cluster on a running Ray, or with --local on a Ray of its own"
    up = commands.add_parser("up", help=help_text, description=help_text)
    up.add_argument("--local", action="store_true", help="start a Ray head on this machine first")
    add_arguments(up)
    up.set_defaults(run=_up)


def _add_down(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    help_text = "drain and end the cluster, and the Ray that `up --local` started"
    down = commands.add_parser("down", help=help_text, description=help_text)
    down.add_argument("--name", default="tandem", help="of the application (default: tandem)")
    down.set_defaults(run=_down)


def _add_status(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    help_text = "what runs: application, deployments, groups, ranks, router"
    status = commands.add_parser("status", help=help_text, description=help_text)
    status.add_argument("--name", default="tandem", help="of the application (default: tandem)")
    status.add_argument("--json", action="store_true", help="print JSON")
    status.set_defaults(run=_status)


def _add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    help_text = "start a local cluster, stream prompts through it, show what happened, end it"
    demo = commands.add_parser("demo", help=help_text, description=help_text)
    demo.set_defaults(run=_demo)


def _up(options: argparse.Namespace) -> int:
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
    return 0


def _down(options: argparse.Namespace) -> int:
    from cluster.application import Applications, connect, disconnect, take_down

    say = timed()
    take_down(options.name, say=say)
    head = local_ray.running()
    if head is not None and os.environ.get("RAY_ADDRESS") == head.address:
        if others := ", ".join(Applications(connect()).details()["applications"]):
            say(f"the local Ray stays: {others} runs on it")
            return 0
        disconnect()
        head.stop()
        say("the local Ray has ended")
    return 0


def _status(options: argparse.Namespace) -> int:
    from cluster.application import connect
    from cluster.status import collect, render

    status = collect(options.name, connect())
    print(json.dumps(status, indent=2) if options.json else render(status))
    healthy = status["application"] is not None and status["application"]["status"] == "RUNNING"
    return 0 if healthy else 1


def _demo(_options: argparse.Namespace) -> int:
    from cluster.demo import run_demo

    return run_demo()


if __name__ == "__main__":
    sys.exit(main())
