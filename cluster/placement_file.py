"""Expert placements as a JSON file: kept over restarts, read by people, written by hand if wanted.

    {"format": 1, "placements": [
      {"group": "decode-0", "version": 7, "experts": 384, "slots": [[[0, 17, ...], ...], ...]}]}

`slots` are layers of ranks of experts. A group named "*" stands for every group of that size that
is not named itself. Knows nothing of who decides or uses placements.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cluster.expert_placement import Placement

FORMAT = 1
EVERY_GROUP = "*"


@dataclass(frozen=True)
class GroupPlacement:
    """A placement of one group; of two versions the larger is the newer, whatever the group."""

    group: str
    version: int
    placement: Placement


def write(path: Path, placements: Iterable[GroupPlacement]) -> None:
    """Replaces the file whole, so that a reader sees the old or the new one."""
    document = {
        "format": FORMAT,
        "placements": [
            {
                "group": one.group,
                "version": one.version,
                "experts": one.placement.experts,
                "slots": one.placement.slots.tolist(),
            }
            for one in placements
        ],
    }
    fresh = path.with_name(f"{path.name}.new")
    with fresh.open("w", encoding="ascii") as file:
        json.dump(document, file)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)


def read(path: Path) -> dict[str, GroupPlacement]:
    """Placements by group. ValueError names the file and what is wrong; OSError if unreadable."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["format"] != FORMAT:
            raise ValueError(f"format {document['format']} is not {FORMAT}")
        placements = [_group_placement(entry) for entry in document["placements"]]
    except (ValueError, TypeError, KeyError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else error
        raise ValueError(f"{path} is not a file of expert placements: {reason}") from error
    by_group = {one.group: one for one in placements}
    if len(by_group) < len(placements):
        raise ValueError(f"{path} places a group twice")
    return by_group


def _group_placement(entry: dict[str, Any]) -> GroupPlacement:
    group, version, experts = entry["group"], entry["version"], entry["experts"]
    if not isinstance(group, str) or type(version) is not int or type(experts) is not int:
        raise ValueError("a group is a name, version and experts are whole numbers")
    slots = np.asarray(entry["slots"])  # a ragged list raises ValueError
    if slots.dtype.kind != "i":
        raise ValueError(f"group {group}: slots hold numbers of experts")
    return GroupPlacement(group, version, Placement(slots.astype(np.int64), experts))
