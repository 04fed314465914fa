"""`tandem scale decode=2 prefill=1`: other numbers of groups, at once or not at all."""

from __future__ import annotations

import argparse
import json
import sys

from cluster.commands.parser import WHICH, Commands, add_command
from cluster.launch import timed


def add_scale(commands: Commands) -> None:
    help_text = "change the number of groups of a pool; a group that leaves drains first"
    parser = add_command(commands, "scale", help_text, _scale)
    parser.add_argument(
        "sizes",
        nargs="+",
        metavar="POOL=GROUPS",
        type=_size,
        help="such as decode=2 or prefill=1",
    )
    parser.add_argument("--name", default="tandem", help=WHICH)
    parser.add_argument("--no-wait", action="store_true", help="return as soon as Serve has heard")
    parser.add_argument(
        "--json", action="store_true", help="print the result as JSON, progress to stderr"
    )


def _scale(options: argparse.Namespace) -> None:
    from cluster.scale import scale

    say = timed(sys.stderr if options.json else sys.stdout)
    result = scale(options.name, dict(options.sizes), say=say, wait=not options.no_wait)
    if options.json:
        print(json.dumps(result, indent=2))


def _size(word: str) -> tuple[str, int]:
    pool, _, groups = word.partition("=")
    if not pool or not groups.isdecimal():
        raise argparse.ArgumentTypeError(f"{word!r} is not POOL=GROUPS")
    if int(groups) < 1:
        raise argparse.ArgumentTypeError(
            f"{word}: a pool keeps at least one group; `tandem down` ends the cluster"
        )
    return pool, int(groups)
