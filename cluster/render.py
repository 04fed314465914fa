"""`tandem render`: what launch would ask of Serve, as the YAML of a RayService. Starts nothing.

    tandem render --config deploy/configs/one_node.toml --set http.proxy_port=8000
    tandem render ... --into deploy/kuberay/rayservice.yaml

Code is taken to be installed on every node, as deploy/Dockerfile does it: no package is named.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from cluster.config import ClusterConfig, load_config
from cluster.errors import StartupError
from cluster.launch import add_arguments
from cluster.packing import Domain
from cluster.wanted import sizes_to_ask, wanted_of

RENDER = "the Serve configuration of a launch as YAML, for a RayService's serveConfigV2"
KEY = "serveConfigV2"
_BLOCK = re.compile(rf"^(?P<indent> *){KEY}: \|\n(?P<text>(?:(?P=indent)  .*\n|\n)*)", re.MULTILINE)


def add_render(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    render = commands.add_parser("render", help=RENDER, description=RENDER)
    add_arguments(render)
    render.add_argument(
        "--domain",
        type=parse_domain,
        metavar="LABEL=VALUE",
        help="nodes that share a scale-up network, as tandem/domain=a; launch finds one itself",
    )
    render.add_argument(
        "--into", type=Path, metavar="FILE", help=f"replace this file's {KEY} instead of printing"
    )
    render.set_defaults(run=run_render)


def run_render(options: argparse.Namespace) -> int:
    text = as_yaml(serve_config(load_config(options.config, options.set), options.domain))
    if options.into is None:
        print(text, end="")
        return 0
    before = options.into.read_text(encoding="utf-8")
    options.into.write_text(put_into(before, text), encoding="utf-8")
    print(f"{options.into}: {KEY} is that of {options.config}")
    return 0


def serve_config(config: ClusterConfig, domain: Domain | None) -> dict[str, Any]:
    """Serve's declarative configuration, the application as a first launch would ask for it.

    Where there is a proxy, every node with a replica has one: Kubernetes sends requests to all
    pods that are ready.
    """
    wanted = wanted_of(config, sizes_to_ask(config, None, {}), domain, code={}, surge=False)
    proxy, application = wanted.proxy(), wanted.schema()
    if config.http.proxy_port:
        proxy["proxy_location"] = "EveryNode"
    told = beyond_defaults(config)
    for deployment in application["deployments"]:
        deployment["user_config"] = told
    return {**proxy, "applications": [application]}


def beyond_defaults(config: ClusterConfig) -> dict[str, Any]:
    """The settings that are not as they are by default: all that a reader wants to see, and all
    that parse_config() needs."""
    default = ClusterConfig().model_dump(mode="json")
    return _beyond(default, config.model_dump(mode="json")) | {"name": config.name}


def _beyond(default: dict[str, Any], tree: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            if inner := _beyond(default[key], value):
                found[key] = inner
        elif value != default[key]:
            found[key] = value
    return found


def as_yaml(config: dict[str, Any]) -> str:
    """What several deployments share stands once, as an anchor."""
    import yaml  # not earlier: `tandem --help` does not need it

    return str(yaml.safe_dump(config, sort_keys=False, width=100))


def put_into(manifest: str, text: str) -> str:
    """The manifest with `text` as its serveConfigV2. StartupError where it has none."""
    found = _BLOCK.search(manifest)
    if found is None:
        raise StartupError(f"the file has no `{KEY}: |`, the place where the text goes")
    indent = found["indent"] + "  "
    lines = "".join(f"{indent}{line}\n" for line in text.splitlines())
    return f"{manifest[: found.start('text')]}{lines}{manifest[found.end('text') :]}"


def parse_domain(text: str) -> Domain:
    label, separator, value = text.partition("=")
    if not (label and separator and value):
        raise argparse.ArgumentTypeError(f"{text!r} is not LABEL=VALUE")
    return Domain(label, value)
