"""The measured points of sweeps, as files, and which of them are worth having. Knows no plots."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class BadPoint(Exception):
    """A file that is no point, or not of this sweep."""


@dataclass(frozen=True)
class Axes:
    """What a phase's plot shows; `better` is the direction of x in which users gain."""

    x: str
    y: str
    x_label: str
    y_label: str
    batch: str
    better: int


AXES = {
    "decode": Axes(
        "tokens_per_s_user",
        "tokens_per_s_gpu",
        "output speed of one user [tokens/s]",
        "output throughput [tokens/s/GPU]",
        "requests",
        better=1,
    ),
    "prefill": Axes(
        "latency_s",
        "tokens_per_s_gpu",
        "latency of a batch [s]",
        "input throughput [tokens/s/GPU]",
        "batch_tokens",
        better=-1,
    ),
    "encoder": Axes(
        "latency_s",
        "images_per_s_gpu",
        "latency of a batch [s]",
        "image throughput [images/s/GPU]",
        "images",
        better=-1,
    ),
}


@dataclass(frozen=True)
class Place:
    x: float
    y: float
    batch: int


def read_point(file: Path) -> dict[str, Any]:
    """BadPoint for what sweep.py has not written."""
    try:
        told: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        _ = told["asked"], told["point"]["phase"]
    except (ValueError, KeyError, TypeError) as error:
        raise BadPoint(f"{file} is no point of a sweep: {error}; remove it") from error
    return told


def curves(phase: str, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """By tag, the points of that phase, the smallest batch first."""
    found: dict[str, list[dict[str, Any]]] = {}
    for file in sorted(folder.glob(f"*/{phase}-*.json")):
        found.setdefault(file.parent.name, []).append(read_point(file)["point"])
    axes = AXES[phase]
    return {tag: sorted(points, key=lambda one: one[axes.batch]) for tag, points in found.items()}


def places(points: Sequence[dict[str, Any]], axes: Axes) -> list[Place]:
    return [Place(one[axes.x], one[axes.y], one[axes.batch]) for one in points]


def front(found: Sequence[Place], axes: Axes) -> list[Place]:
    """Those that no other beats in both directions, by x."""
    return sorted(
        (one for one in found if not any(_beats(other, one, axes) for other in found)),
        key=lambda one: one.x,
    )


def _beats(one: Place, other: Place, axes: Axes) -> bool:
    gain_x, gain_y = axes.better * (one.x - other.x), one.y - other.y
    return gain_x >= 0 and gain_y >= 0 and (gain_x > 0 or gain_y > 0)
