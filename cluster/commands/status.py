"""`tandem status`: what runs, for people or as JSON."""

from __future__ import annotations

import argparse
import json

from cluster.commands.parser import WHICH, Commands, add_command


def add_status(commands: Commands) -> None:
    help_text = "what runs: application, deployments, groups, ranks, router"
    parser = add_command(commands, "status", help_text, _status)
    parser.add_argument("--name", default="tandem", help=WHICH)
    parser.add_argument("--json", action="store_true", help="print JSON")


def _status(options: argparse.Namespace) -> int:
    from cluster.application import connect
    from cluster.status import collect, render

    status = collect(options.name, connect())
    print(json.dumps(status, indent=2) if options.json else render(status))
    healthy = status["application"] is not None and status["application"]["status"] == "RUNNING"
    return 0 if healthy else 1
