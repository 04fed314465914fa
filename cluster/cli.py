"""The `tandem` command: one line of COMMANDS for each.

Each command's `run` takes the parsed arguments and returns the exit status. Imports wait for the
command that needs them: `tandem --help` answers without ray and torch.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence

from cluster import local_ray
from cluster.bench.command import add_bench
from cluster.commands.demo import add_demo
from cluster.commands.down import add_down
from cluster.commands.experts import add_experts
from cluster.commands.scale import add_scale
from cluster.commands.status import add_status
from cluster.commands.up import add_up
from cluster.doctor.command import add_doctor
from cluster.environment_command import add_env
from cluster.errors import ClusterError
from cluster.render import add_render
from cluster.trace_command import add_trace
from engine.plan_command import add_plan
from model.commands import add_commands

COMMANDS = (
    add_up,
    add_scale,
    add_status,
    add_experts,
    add_down,
    add_demo,
    add_bench,
    add_doctor,
    add_env,
    add_plan,
    add_render,
    add_trace,
    add_commands,
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="tandem", description="Prefill and decode on separate GPUs, one cluster on Ray."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for add in COMMANDS:
        add(commands)
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


if __name__ == "__main__":
    sys.exit(main())
