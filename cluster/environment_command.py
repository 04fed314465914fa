"""`tandem env`: the environment variables that the product reads, their values and meanings."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import reduce
from typing import Any

from cluster.config import ClusterConfig, load_config, setting_names
from cluster.environment import given, misspelt, remarks, variable_of
from cluster.environment_table import TABLE, Variable

ENV = "environment variables that are read: value, where it comes from, what it means"
HIDDEN = "(set, not shown)"


@dataclass(frozen=True)
class Row:
    name: str
    value: str | None  # None: not set, and nothing stands for it
    source: str  # "environment", or "" for a variable that is not set
    meaning: str
    kind: str = "setting"  # or the type of its text


def add_env(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    env = commands.add_parser("env", help=ENV, description=ENV)
    env.add_argument("--config", help="a TOML file: says where each setting's value comes from")
    env.add_argument(
        "--all", action="store_true", help="settings that are not set, and unused names, too"
    )
    env.add_argument("--json", action="store_true", help="print JSON")
    env.set_defaults(run=run_env)


def run_env(options: argparse.Namespace) -> int:
    """Exit status 1 where a launch would refuse a name. Raises StartupError, with the variable's
    name, for a value that cannot be."""
    names = setting_names()
    wrong = misspelt(os.environ, names)
    usable = {name: value for name, value in os.environ.items() if name not in wrong}
    shown = rows(usable, everything=options.all)
    shown += setting_rows(usable, options.config, everything=options.all)
    found = remarks(os.environ, names)
    status = 1 if wrong else 0
    if options.json:
        print(json.dumps({"variables": [asdict(row) for row in shown], "remarks": found}, indent=2))
        return status
    width = max(len(row.name) for row in shown)
    for row in shown:
        value = "-" if row.value is None else row.value
        print(f"{row.name:<{width}}  {value:<24} {row.source:<12} {row.meaning}".rstrip())
    for remark in found:
        print(f"warning: {remark}")
    if wrong:
        print(f"a launch refuses {', '.join(wrong)}")
    return status


def rows(environ: Mapping[str, str], *, everything: bool) -> list[Row]:
    """Of the table. What this version does not use, only where everything is asked for."""
    return [_row(one, environ) for one in TABLE if everything or not one.unused]


def setting_rows(environ: Mapping[str, str], config: str | None, *, everything: bool) -> list[Row]:
    """Of the configuration's settings, by the variables that can give them; with a file, or with
    `everything`, also those that the environment does not set."""
    said = {one.setting: one.variable for one in given(environ, setting_names())}
    in_file = _differ(config)
    found = []
    for setting, value in _values(load_config(config, (), environ)).items():
        source = said.get(setting) or ("file" if setting in in_file else "default")
        if everything or setting in said or source == "file":
            name = variable_of(setting)
            mark = "environment" if source == name else source
            found.append(Row(name, json.dumps(value), mark, setting))
    return found


def _differ(config: str | None) -> set[str]:
    """Settings to which the file alone gives another value than the default."""
    if config is None:
        return set()
    default, told = (_values(load_config(path, (), {})) for path in (None, config))
    return {setting for setting, value in told.items() if value != default[setting]}


def _values(config: ClusterConfig) -> dict[str, Any]:
    return {name: reduce(getattr, name.split("."), config) for name in setting_names()}


def _row(variable: Variable, environ: Mapping[str, str]) -> Row:
    text = environ.get(variable.name)
    value = HIDDEN if text is not None and variable.secret else text
    meaning = f"unused: {variable.meaning}" if variable.unused else variable.meaning
    if variable.sets:
        settings = sorted({key for chosen in variable.sets.values() for key in chosen})
        meaning += f" ({', '.join(settings)})"
    source = "" if text is None else "environment"
    return Row(variable.name, value, source, meaning, variable.kind)
