"""What a model weighs: parameters, file bytes and request state, from its config alone."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import Literal

from model.catalogue import TensorSpec, catalogue, is_vision
from model.spec import ModelSpec
from model.state import PerToken, Ring, Tail, state_fields

Part = Literal["backbone", "engram_tables", "drafter", "vision"]
PARTS: tuple[Part, ...] = ("backbone", "engram_tables", "drafter", "vision")

_LAYER = re.compile(r"layers\.(\d+)\.")
_EXPERT = re.compile(r"(layers|mtp)\.\d+\.ffn\.experts\.(\d+)\.")
# All that a prompt token needs of the cut layer unless it is among the kept ones.
_CUT_LAYER_PARTS = (
    "attn_norm.",
    "hc_attn_",
    "attn.compressor.",
    "attn.indexer.wk.",
    "attn.indexer.k_norm.",
)


@dataclass(frozen=True)
class Census:
    """Counts of one model. Scales of quantised matrices count as bytes, not as parameters."""

    parameters: dict[Part, int]
    tensors: dict[Part, int]  # as stored: a quantised matrix is two
    part_bytes: dict[Part, int]
    type_bytes: dict[str, int]  # by safetensors type
    expert_bytes: int  # one routed expert of one layer
    active: ActiveParameters
    state: StateCensus


@dataclass(frozen=True)
class ActiveParameters:
    """Parameters that one text token passes through; table look-ups are not counted."""

    prefill: int  # a prompt token that prefill truncation drops at the cut layer
    decode: int
    draft: int  # one position of a draft block; the shared output head included


@dataclass(frozen=True)
class StateCensus:
    """Packed bytes of one request's state, which model/state.py declares."""

    row_bytes: dict[str, int]  # by field
    per_token: float  # global rows
    windows: int  # rings of all layers and draft stages, once they are full
    tail: int  # while a group of the compressor is incomplete


def take_census(spec: ModelSpec) -> Census:
    """Count every tensor of the catalogue, vision included if the config has it."""
    tensors = catalogue(spec)
    parameters, counts, part_bytes = Counter[Part](), Counter[Part](), Counter[Part]()
    type_bytes = Counter[str]()
    for name, tensor in tensors.items():
        part = part_of(name)
        parameters[part] += tensor.parameters
        for stored in tensor.stored(name).values():
            counts[part] += 1
            part_bytes[part] += stored.nbytes
            type_bytes[stored.dtype] += stored.nbytes
    return Census(
        parameters={part: parameters[part] for part in PARTS},
        tensors={part: counts[part] for part in PARTS},
        part_bytes={part: part_bytes[part] for part in PARTS},
        type_bytes=dict(sorted(type_bytes.items())),
        expert_bytes=_expert_bytes(tensors),
        active=_active_parameters(spec, tensors),
        state=_state_census(spec),
    )


def part_of(name: str) -> Part:
    """Which part of the model a tensor belongs to, by its logical name."""
    if is_vision(name):
        return "vision"
    if name.startswith("mtp."):
        return "drafter"
    return "engram_tables" if name.endswith(".engram.embed") else "backbone"


def state_bytes(spec: ModelSpec, length: int) -> int:
    """Packed bytes that a continuation after `length` positions needs, exactly."""
    return sum(
        len(field.layers) * field.row_bytes * len(field.growth.rows(length))
        for field in state_fields(spec)
    )


def _expert_bytes(tensors: dict[str, TensorSpec]) -> int:
    names = [f"layers.0.ffn.experts.0.{matrix}" for matrix in ("w1", "w2", "w3")]
    return sum(stored.nbytes for name in names for stored in tensors[name].stored(name).values())


def _active_parameters(spec: ModelSpec, tensors: dict[str, TensorSpec]) -> ActiveParameters:
    prefill = decode = draft = 0
    chosen = {"layers": spec.num_experts_per_tok, "mtp": spec.dspark_num_experts_per_tok}
    for name, tensor in tensors.items():
        expert = _EXPERT.match(name)
        if expert and int(expert[2]) >= chosen[expert[1]]:
            continue  # experts are of one size: the first ones stand for the chosen ones
        match part_of(name):
            case "backbone" if name != "embed.weight":
                decode += tensor.parameters
                prefill += tensor.parameters * _serves_dropped_tokens(name, spec)
            case "drafter" if not name.endswith("markov_head.embed.weight"):
                draft += tensor.parameters
    return ActiveParameters(prefill, decode, draft + tensors["head.weight"].parameters)


def _serves_dropped_tokens(name: str, spec: ModelSpec) -> bool:
    layer = _LAYER.match(name)
    if not layer:
        return False  # final norm and head
    if int(layer[1]) == spec.cut_layer:
        return name[layer.end() :].startswith(_CUT_LAYER_PARTS)
    return int(layer[1]) < spec.cut_layer


def _state_census(spec: ModelSpec) -> StateCensus:
    fields = state_fields(spec)
    per_token, windows, tail = 0.0, 0, 0
    for field in fields:
        size = len(field.layers) * field.row_bytes
        match field.growth:
            case PerToken(ratio):
                per_token += size / ratio
            case Ring(window):
                windows += size * window
            case Tail():
                tail += size
    return StateCensus({field.name: field.row_bytes for field in fields}, per_token, windows, tail)
