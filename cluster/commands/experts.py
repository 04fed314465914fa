"""`tandem experts`: which rank holds which experts, how even their load is, what was decided."""

from __future__ import annotations

import argparse
import json

from cluster.commands.parser import WHICH, Commands, add_command


def add_experts(commands: Commands) -> None:
    help_text = (
        "placements of experts: version, copies, load of the layers, the last decisions and why"
    )
    parser = add_command(commands, "experts", help_text, _experts)
    parser.add_argument("--name", default="tandem", help=WHICH)
    parser.add_argument("--json", action="store_true", help="print JSON, with every slot")


def _experts(options: argparse.Namespace) -> None:
    from cluster.application import connect
    from cluster.expert_status import Asker
    from cluster.expert_view import as_json, render

    balance = Asker(options.name, connect()).ask()
    print(json.dumps(as_json(balance)) if options.json else render(balance))
