"""What the environment asks of the configuration, and what it asks in vain. Pure.

A setting of the tree can be given as a variable: `http.port` is TANDEM_HTTP__PORT, its value in
TOML's syntax or a bare word, as with --set. The other names are in environment_table.py. Knows
nothing of the tree but the names of its settings.
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from cluster.environment_table import BY_NAME, ENGINE, OWN, TABLE
from cluster.errors import StartupError

NOT_USED = "not used by this version"


@dataclass(frozen=True)
class Given:
    """A setting that the environment gives a value."""

    setting: str
    value: Any
    variable: str


def given(environ: Mapping[str, str], settings: Collection[str]) -> Iterator[Given]:
    """What the environment sets, DeepInfer's names before our own, which so overrule them.

    `settings` are the names there are. StartupError for a value or a setting that cannot be.
    """
    for variable in TABLE:
        if variable.sets and variable.name in environ:
            for setting, value in variable.settings(environ[variable.name]).items():
                yield Given(setting, value, variable.name)
    for name in sorted(environ):
        if name in BY_NAME or not name.startswith(OWN):
            continue
        setting = setting_of(name)
        if setting in settings:
            yield Given(setting, toml_value(environ[name]), name)
        elif _is_meant(setting):
            raise StartupError(f"{name}: {_unknown(name, _names(settings))}")


def misspelt(environ: Mapping[str, str], settings: Collection[str]) -> list[str]:
    """Variables that are meant as settings of which there is none: a launch refuses them."""
    return [
        name
        for name in sorted(environ)
        if name.startswith(OWN) and name not in BY_NAME and _is_meant(setting_of(name))
        if setting_of(name) not in settings
    ]


def variable_of(setting: str) -> str:
    """`http.port` -> TANDEM_HTTP__PORT."""
    return OWN + setting.replace(".", "__").upper()


def setting_of(name: str) -> str:
    """TANDEM_HTTP__PORT -> `http.port`."""
    return name.removeprefix(OWN).replace("__", ".").lower()


def toml_value(text: str) -> Any:
    """In TOML's syntax, else the text as it is."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def remarks(environ: Mapping[str, str], settings: Collection[str]) -> list[str]:
    """Names that are set and have no effect: unknown ones with the nearest known, unused ones.

    Kubernetes tells every pod of every service, so of one that is called tandem-... too.
    """
    known = _names(settings)
    services = tuple(
        name.removesuffix("SERVICE_HOST") for name in environ if name.endswith("_SERVICE_HOST")
    )
    found = []
    for name in sorted(environ):
        if not name.startswith((OWN, ENGINE)) or name.startswith(services):
            continue
        variable = BY_NAME.get(name)
        if variable is not None and (variable.unused or variable.benchmark):
            reads = "only examples/benchmark.py reads it" if variable.benchmark else NOT_USED
            found.append(f"{name}: {reads}: {variable.meaning}")
            try:
                variable.parse(environ[name])
            except StartupError as error:  # a version that used it would not start
                found.append(str(error))
        elif name not in known:
            found.append(f"{name}: {_unknown(name, known)}")
    return found


def _is_meant(setting: str) -> bool:
    """Not only one of ours by accident: it has a section."""
    return "." in setting


def _names(settings: Collection[str]) -> list[str]:
    return [*BY_NAME, *map(variable_of, settings)]


def _unknown(name: str, known: Collection[str]) -> str:
    nearest = get_close_matches(name, known, n=1)
    return "is no variable of ours" + (f"; did you mean {nearest[0]}?" if nearest else "")
