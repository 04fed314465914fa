"""How every command joins the `tandem` parser: a name, a line of help, and what runs it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TypeAlias

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"  # not at run time
Run = Callable[[argparse.Namespace], int | None]

WHICH = "of the application (default: tandem)"


def add_command(commands: Commands, name: str, help_text: str, run: Run) -> argparse.ArgumentParser:
    """The command's own parser, for its arguments. `run` returns the exit status, None for 0."""
    parser = commands.add_parser(name, help=help_text, description=help_text)
    parser.set_defaults(run=run)
    return parser
