"""Parameters on the way from one training run to the next: 24 bits of each value, in parts.

The parts fit where files may not be large. What optimizers remember is not kept: they find it
again within a few dozen steps.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch

from examples.mini.parameters import Parameters, stacks
from model.spec import ModelSpec

_PARTS = 4


def save(parameters: Parameters, folder: Path, place: float) -> None:
    """`place`: how far the whole training has come, 0 to 1."""
    folder.mkdir(parents=True, exist_ok=True)
    flat = torch.cat([parameters.values[key].detach().flatten() for key in parameters.stacks])
    bits = flat.float().cpu().numpy().view(np.uint32)
    high = ((bits + 0x80) >> 8).astype(np.uint32)
    packed = high.view(np.uint8).reshape(-1, 4)[:, :3]
    for number, part in enumerate(np.array_split(packed, _PARTS)):
        np.save(folder / f"part-{number}.npy", part)
    (folder / "place.json").write_text(json.dumps({"place": place}) + "\n", encoding="utf-8")


def load(spec: ModelSpec, folder: Path) -> tuple[Parameters, float]:
    """The parameters, and how far training had come."""
    packed = np.concatenate([np.load(folder / f"part-{n}.npy") for n in range(_PARTS)])
    whole = np.zeros((len(packed), 4), np.uint8)
    whole[:, 1:] = packed
    flat = torch.from_numpy(whole.reshape(-1).view(np.float32))
    values, at = {}, 0
    for key, stack in stacks(spec).items():
        shape = (len(stack.members), *stack.shape)
        size = int(np.prod(shape))
        values[key] = flat[at : at + size].view(shape).clone()
        at += size
    place = json.loads((folder / "place.json").read_text(encoding="utf-8"))["place"]
    return Parameters(spec, values), float(place)
