"""From a model folder to a model that works in place; what model/load.py is to the other one.

Apart, because it needs Triton, which not every machine has: import it where such a model is wanted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch

from model.catalogue import is_vision
from model.checkpoint import Progress
from model.device_weights import DeviceWeights
from model.load import stored_weights, token_map
from model.options import ModelOptions
from model.packed.experts import PackedLocalExperts
from model.packed.forward import PackedTransformer
from model.packed.weight_source import MakeExperts
from model.packed.weights import PackedWeights, from_weights
from model.spec import ModelSpec
from model.vision import VisionEncoder


def load_packed(
    path: str | Path,
    *,
    weights: Literal["checkpoint", "random"],
    device: torch.device,
    dtype: torch.dtype,
    seed: int = 0,
    options: ModelOptions | None = None,
    progress: Progress | None = None,
    vision: bool = False,
    make_experts: MakeExperts[PackedWeights] = PackedLocalExperts,
) -> PackedTransformer:
    """The model of `path`/config.json on weights as they are stored, for `device`.

    The vision encoder is the one of load_model, in float32. Raises as load_model does.
    """
    spec = ModelSpec.load(path)
    stored = stored_weights(path, spec, weights, seed, vision, progress=progress)
    encoder = None
    if vision and spec.vision and any(map(is_vision, stored.names())):
        encoder = VisionEncoder(DeviceWeights(stored, device), spec.vision)
    return PackedTransformer(
        spec,
        from_weights(stored, device, dtype),
        options,
        token_map(path, spec),
        make_experts=make_experts,
        vision=encoder,
    )
