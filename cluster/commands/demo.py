"""`tandem demo`: see cluster/demo.py."""

from __future__ import annotations

import argparse

from cluster.commands.parser import Commands, add_command


def add_demo(commands: Commands) -> None:
    help_text = "start a local cluster, stream prompts through it, show what happened, end it"
    add_command(commands, "demo", help_text, _demo)


def _demo(_options: argparse.Namespace) -> int:
    from cluster.demo import run_demo

    return run_demo()
