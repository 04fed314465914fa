"""What the router knows of experts, for people and as JSON. Pure; `tandem experts` prints it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from cluster.expert_messages import ExpertBalance, ExpertDecision, GroupBalance
from cluster.expert_tables import counts_of, placement_of

Json = dict[str, Any]


def as_json(balance: ExpertBalance) -> Json:
    """Slots [layers][ranks][slots] as expert numbers, loads [layers][experts] as tokens."""
    return {
        "waiting_for": list(balance.waiting_for),
        "groups": [
            one.model_dump(mode="json", exclude={"table", "loads"})
            | {
                "experts": one.table.experts,
                "slots": placement_of(one.table).slots.tolist(),
                "loads": None if one.loads is None else counts_of(one.loads).tolist(),
            }
            for one in balance.groups
        ],
    }


def render(balance: ExpertBalance) -> str:
    """A block for each group; one line says so where there is none."""
    lines = [f"waiting for the first report of {name}" for name in balance.waiting_for]
    for one in balance.groups:
        lines += _group(one)
    return "\n".join(lines) or "no group shares its experts over several ranks"


def render_layers(
    before: Sequence[float], after: Sequence[float], moved: Sequence[int], *, indent: str = "  "
) -> str:
    """A line for each layer: busiest rank over mean before and after, slots moved."""
    lines = [f"{indent}layer  before   after  moved"]
    for layer, (old, new, slots) in enumerate(zip(before, after, moved, strict=True)):
        lines.append(f"{indent}{layer:5}{old:8.3f}{new:8.3f}{slots:7}")
    return "\n".join(lines)


def in_words(one: ExpertDecision) -> str:
    """One line."""
    match one.outcome:
        case "given":
            return (
                f"version {one.version} given, {sum(one.moved)} slots moved, "
                f"{_mean(one.before):.3f} -> {_mean(one.after):.3f}: {one.why}"
            )
        case "kept":
            return f"version {one.version} kept at {_mean(one.before):.3f}: {one.why}"
        case "arrived":
            return (
                f"version {one.version} in use, {one.seconds:.1f} s after it was given; steps "
                f"stood still for at most {one.stall_s * 1e3:.1f} ms"
            )
        case "given_up":
            return f"version {one.version} given up: {one.why}"


def _group(one: GroupBalance) -> Iterator[str]:
    table = one.table
    coming = f", version {one.given} on its way" if one.given is not None else ""
    yield f"{one.group}  version {one.version}{coming}: {one.preparing or one.doing}"
    yield (
        f"  {table.layers} layers of {table.experts} experts in {table.ranks} x {table.slots} "
        f"slots; {_copies(one)}"
    )
    newest = (
        f"busiest rank over mean in the newest: {_mean(one.imbalance):.3f}, worst layer "
        f"{max(one.imbalance):.3f}"
        if one.imbalance
        else "no load known before the first is full"
    )
    yield f"  {one.windows} windows and {one.steps} steps; {newest}"
    for decision in one.decisions:
        yield f"  {time.strftime('%H:%M:%S', time.localtime(decision.at))}  {in_words(decision)}"
    shown = [decision for decision in one.decisions if decision.before]
    if shown:
        last = shown[-1]
        what = "given" if last.outcome == "given" else "found and not given"
        yield f"  the last placement {what}, over the window before it:"
        yield render_layers(last.before, last.after, last.moved, indent="    ")


def _copies(one: GroupBalance) -> str:
    """How many experts have how many copies, over all layers."""
    copies = placement_of(one.table).copies().ravel().tolist()
    counted = ", ".join(
        f"{copies.count(number)} with {number}" for number in sorted(set(copies), reverse=True)
    )
    return f"copies: {counted}"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 1.0
