"""Will a launch fit, and if not, what lacks? Pure: nodes and bundles in, a domain or a reason out.

The same first-fit that explains a refusal decides about it, so a launch that cannot be placed is
refused in a second instead of waiting for ever. Ray does the real placing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cluster.errors import StartupError

DOMAIN_LABELS = ("ray.io/gpu-domain", "tandem/domain")
Resources = Mapping[str, float]


@dataclass(frozen=True)
class Node:
    """`free` counts what this application itself holds as free: it keeps it or gives it up."""

    name: str
    free: Resources
    total: Resources
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Bundle:
    """One rank or head that must lie on one node; `owner` says whose, for people."""

    owner: str
    needs: Resources


@dataclass(frozen=True)
class Domain:
    """Nodes that share a scale-up network: all with this value of this label."""

    label: str
    value: str

    @property
    def selector(self) -> dict[str, str]:
        return {self.label: self.value}


def domain_of(arguments: Mapping[str, Any]) -> Domain | None:
    """The domain in an application's arguments, a label selector."""
    selector = arguments.get("domain") or {}
    return next((Domain(label, value) for label, value in selector.items()), None)


def choose_domain(
    nodes: Sequence[Node], bundles: Sequence[Bundle], *, preferred: Domain | None = None
) -> Domain | None:
    """One domain that takes all bundles, `preferred` before others; None where nodes name none.

    StartupError says which bundle lacks what, and what each node has.
    """
    domains = _domains(nodes)
    if not domains:
        lacking = first_unplaced(nodes, bundles)
        if lacking is not None:
            raise StartupError(explain_unplaced(nodes, lacking, bundles))
        return None
    for domain in sorted(domains, key=lambda domain: domain != preferred):
        if first_unplaced(domains[domain], bundles) is None:
            return domain
    domain = max(domains, key=lambda domain: len(domains[domain]))
    lacking = first_unplaced(domains[domain], bundles)
    assert lacking is not None
    where = f"no domain fits both pools; in the largest, {domain.label}={domain.value}: "
    raise StartupError(where + explain_unplaced(domains[domain], lacking, bundles))


def first_unplaced(nodes: Sequence[Node], bundles: Sequence[Bundle]) -> Bundle | None:
    """First fit, large bundles first; the first bundle that finds no node, if any."""
    left = [dict(node.free) for node in nodes]
    for bundle in sorted(bundles, key=_size, reverse=True):
        for free in left:
            if _fits(bundle.needs, free):
                for name, amount in bundle.needs.items():
                    free[name] -= amount
                break
        else:
            return bundle
    return None


def explain_unplaced(nodes: Sequence[Node], lacking: Bundle, bundles: Sequence[Bundle]) -> str:
    """Which bundle lacks what, what is asked for in all, and what each node has."""
    names = sorted({name for bundle in bundles for name in bundle.needs})
    asked = {name: sum(bundle.needs.get(name, 0.0) for bundle in bundles) for name in names}
    lines = [
        f"{lacking.owner} cannot be placed: its bundle needs {_amounts(lacking.needs)}",
        f"the launch asks for {_amounts(asked)} in {len(bundles)} bundles; this cluster has",
    ]
    for node in nodes:
        parts = [
            f"{name} {node.free.get(name, 0.0):g} free of {node.total.get(name, 0.0):g}"
            for name in names
        ]
        lines.append(f"  node {node.name}: {', '.join(parts)}")
    if not nodes:
        lines.append("  no node")
    elif not any(_fits(lacking.needs, node.total) for node in nodes):
        lines.append("  no node is large enough for that bundle, even when empty")
    return "\n".join(lines)


def _domains(nodes: Sequence[Node]) -> dict[Domain, list[Node]]:
    for label in DOMAIN_LABELS:
        domains: dict[Domain, list[Node]] = {}
        for node in nodes:
            if label in node.labels:
                domains.setdefault(Domain(label, node.labels[label]), []).append(node)
        if domains:
            return domains
    return {}


def _size(bundle: Bundle) -> tuple[float, float]:
    return bundle.needs.get("GPU", 0.0), sum(bundle.needs.values())


def _fits(needs: Resources, free: Resources) -> bool:
    return all(free.get(name, 0.0) >= amount - 1e-6 for name, amount in needs.items())


def _amounts(needs: Resources) -> str:
    return ", ".join(f"{name} {amount:g}" for name, amount in needs.items())
