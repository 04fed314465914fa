"""What becomes of a changed setting while the cluster runs: taken over, or whose restart it costs.

Two declared lists. LIVE names what running processes take over. Of the others HELD_BY says which
deployments have built something on them; these are replaced, one group after another, and their
streams finish. A setting that is in neither list restarts everything: forgetting one is safe, and
some have to, such as [autoscale], which Serve takes with the application's code only.
Pure; knows nothing of Ray.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from cluster.config import ClusterConfig, parse_config

Json = dict[str, Any]

DEPLOYMENTS = ("Ingress", "Router", "Prefill", "Decode")

LIVE = (
    "decode.engine.max_waiting",
    "experts",
    "generation",
    "http.body_timeout_s",
    "http.max_body_bytes",
    "http.max_concurrent",
    "http.stall_timeout_s",
    "life",
    "log",
    "prefill.engine.max_waiting",
    "router",
)
"""Sections and settings that running processes take over."""

HELD_BY: Mapping[str, tuple[str, ...]] = {
    "decode": ("Decode",),
    "decode.engine.max_length": ("Decode", "Ingress"),
    "decode.groups": (),  # scaling replaces nobody
    "experts.placement_file": ("Router",),  # which reads it when it starts
    "experts.save_file": ("Router",),
    "http": ("Ingress",),
    "http.proxy_port": (),  # of Serve itself, which takes it when it starts
    "images": ("Ingress", "Prefill", "Decode"),
    "model": ("Ingress", "Prefill", "Decode"),
    "prefill": ("Prefill",),
    "prefill.engine.max_length": ("Prefill", "Ingress"),
    "prefill.groups": (),
    "transfer": ("Prefill", "Decode"),
}
"""Who is replaced for a setting that is not live. Of all names that fit, the longest counts."""


class Change(NamedTuple):
    """One setting that differs; `restarts` is empty where nobody has to be replaced."""

    setting: str
    before: Any
    after: Any
    live: bool
    restarts: tuple[str, ...]

    def __str__(self) -> str:
        what = f"{self.setting} {self.before!r} -> {self.after!r}"
        if self.live:
            return f"{what}: live"
        if self.restarts:
            return f"{what}: restarts {', '.join(self.restarts)}"
        if self.setting.endswith(".groups"):
            return f"{what}: scales"
        return f"{what}: taken when Serve starts anew"


def changes(before: ClusterConfig, after: ClusterConfig) -> list[Change]:
    """Settings that differ, in order of name; none of what only one of the two has switched on."""
    old, new = dict(_leaves(_tree(before))), dict(_leaves(_tree(after)))
    return [
        Change(name, old[name], new[name], live=is_live(name), restarts=restarted_for(name))
        for name in sorted(old.keys() & new.keys())
        if old[name] != new[name]
    ]


def is_live(setting: str) -> bool:
    """Whether running processes take it over: the longer name that fits decides."""
    return len(_longest(setting, LIVE)) > len(_longest(setting, HELD_BY))


def restarted_for(setting: str) -> tuple[str, ...]:
    """The deployments whose replicas are replaced when it changes."""
    if is_live(setting):
        return ()
    held = _longest(setting, HELD_BY)
    return HELD_BY[held] if held else DEPLOYMENTS


def digest(config: ClusterConfig, deployment: str) -> str:
    """Differs for two configurations exactly if the deployment must be replaced between them.

    Of what is not as it is by default: other defaults come with other code, which replaces all.
    """
    default = dict(_leaves(_tree(ClusterConfig())))
    held = {
        name: value
        for name, value in _leaves(_tree(config))
        if value != default.get(name) and deployment in restarted_for(name)
    }
    return hashlib.sha256(json.dumps(held, sort_keys=True).encode()).hexdigest()[:12]


def take_over(running: ClusterConfig, wanted: ClusterConfig) -> ClusterConfig:
    """The running configuration with the live settings of the wanted one, and no others."""
    tree = _tree(running)
    for name, value in _leaves(_tree(wanted)):
        if is_live(name):
            *sections, key = name.split(".")
            inner = tree
            for section in sections:
                inner = inner[section]
            inner[key] = value
    return parse_config(tree)


def _tree(config: ClusterConfig) -> Json:
    """Without what is switched off: nobody is restarted for that."""
    tree: Json = config.model_dump(mode="json")
    if not config.autoscale.enabled:
        tree["autoscale"] = {"enabled": False}
    return tree


def _leaves(tree: Mapping[str, Any], below: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        name = f"{below}{key}"
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{name}.")
        else:
            yield name, value


def _longest(setting: str, names: Mapping[str, Any] | tuple[str, ...]) -> str:
    """The longest of the names that is the setting or a section around it; "" if none is."""
    fitting = (name for name in names if setting == name or setting.startswith(f"{name}."))
    return max(fitting, key=len, default="")
