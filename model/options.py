"""How the model is computed where implementations in the field differ. Values only."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, get_args, get_type_hints


@dataclass(frozen=True)
class ModelOptions:
    """Raises ValueError for a value that is not among the allowed ones.

    activations  exact: linear layers see unrounded inputs; fp8: inputs of FP8 and FP4 layers are
                 rounded to e4m3 per 32 values. Cached rows and index queries are always rounded.
    wo_a         with fp8 activations, whether the first output projection's input is rounded too
                 (fp8, as in DeepInfer) or not (plain, as in the official converter).
    truncation   what happens at the cut layer to prompt rows below a request's window start.
                 off: window starts are refused; mask: they go on, unseen; compact: they leave.
    cut_window   whether the cut layer itself sees no window rows below the window start (clip, as
                 in DeepInfer) or sees them all (full, as in vLLM).
    """

    activations: Literal["exact", "fp8"] = "exact"
    wo_a: Literal["plain", "fp8"] = "plain"
    truncation: Literal["off", "mask", "compact"] = "off"
    cut_window: Literal["clip", "full"] = "clip"

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for field in fields(self):
            value, allowed = getattr(self, field.name), get_args(hints[field.name])
            if value not in allowed:
                raise ValueError(f"{field.name} is {value!r}; it must be one of {allowed}")
