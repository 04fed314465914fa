"""What weights take in the memory of a rank, by the form in which it computes with them.

From the config alone. In bf16 (model/packed/weights.py) matrices stay as they are stored, the
first output projections apart, and of the drafter only what it remembers of each position is
there; in float32 everything is its values.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from model.catalogue import TensorSpec, catalogue
from model.census import part_of
from model.spec import ModelSpec

Form = Literal["stored", "float32"]

_ROUTED = re.compile(r"layers\.\d+\.ffn\.experts\.")
_REMEMBERED = re.compile(r"mtp\.(0\.main_(proj|norm\.weight)|\d+\.attn\.(wkv|kv_norm\.weight))$")


class WeightBytes(NamedTuple):
    dense: int  # all of the backbone but its routed experts
    expert: int  # one routed expert of one layer
    drafter: int
    vision: int


def weight_bytes(spec: ModelSpec, form: Form) -> WeightBytes:
    dense = expert = drafter = vision = 0
    for name, tensor in catalogue(spec).items():
        nbytes = _bytes(name, tensor, form)
        match part_of(name):
            case "vision":
                vision += 4 * tensor.parameters  # the encoder computes in float32
            case "drafter" if form == "float32" or _REMEMBERED.match(name):
                drafter += nbytes
            case "backbone" if not _ROUTED.match(name):
                dense += nbytes
            case "backbone" if name.startswith("layers.0.ffn.experts.0."):
                expert += nbytes
    return WeightBytes(dense, expert, drafter, vision)


def _bytes(name: str, tensor: TensorSpec, form: Form) -> int:
    if form == "float32":
        return 4 * tensor.parameters
    if name.endswith(".wo_a"):
        return 2 * tensor.parameters
    return sum(stored.nbytes for stored in tensor.stored(name).values())
