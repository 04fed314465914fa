"""From a model folder to a model that can run: config, weights, and Engram's token map."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from model.catalogue import is_vision
from model.checkpoint import Progress
from model.compressed_vocab import compress_vocabulary
from model.device_weights import DeviceWeights
from model.moe import LocalExperts, MakeExperts
from model.options import ModelOptions
from model.spec import ModelSpec
from model.tokenizer import Tokenizer
from model.transformer import Transformer
from model.weight_source import WeightSource
from model.weights import Weights, load_weights, random_weights


def load_model(
    path: str | Path,
    *,
    weights: Literal["checkpoint", "random"],
    seed: int = 0,
    options: ModelOptions | None = None,
    experts: range | None = None,
    draft_experts: range | None = None,
    progress: Progress | None = None,
    device: torch.device | None = None,
    vision: bool = False,
    make_experts: MakeExperts = LocalExperts,
) -> Transformer:
    """The model of `path`/config.json, with the folder's weights or random ones from `seed`.

    `experts` and `draft_experts` are a rank's share of a checkpoint's routed experts; `progress`
    hears of shards opened and tensors decoded. All but Engram's tables goes to `device`, if given.
    `vision`: with the vision encoder, if config and checkpoint have one. `make_experts`: where
    the routed experts of each layer are.
    Raises ValueError for a config, checkpoint or tokenizer that does not fit.
    """
    spec = ModelSpec.load(path)
    stored = stored_weights(
        path,
        spec,
        weights,
        seed,
        vision,
        experts=experts,
        draft_experts=draft_experts,
        progress=progress,
    )
    loaded: WeightSource = stored
    if device is not None and device.type != "cpu":
        loaded = DeviceWeights(stored, device)
    return Transformer(
        spec,
        loaded,
        options or ModelOptions(),
        token_map=token_map(path, spec),
        vision=vision and any(map(is_vision, stored.names())),
        make_experts=make_experts,
    )


def stored_weights(
    path: str | Path,
    spec: ModelSpec,
    weights: Literal["checkpoint", "random"],
    seed: int,
    vision: bool,
    *,
    experts: range | None = None,
    draft_experts: range | None = None,
    progress: Progress | None = None,
) -> Weights:
    """Of a folder, or random ones of its config; raises as load_model does."""
    if weights == "random":
        return random_weights(spec, seed, vision=vision, progress=progress)
    return load_weights(path, spec, progress=progress, experts=experts, draft_experts=draft_experts)


def token_map(path: str | Path, spec: ModelSpec) -> Tensor | None:
    """Engram's compressed id of each token id, int64 [V]; None is the identity.

    Raises ValueError if the tokenizer does not compress to the size that the config says.
    """
    size = spec.engram_compressed_vocab_size
    if size >= spec.vocab_size:
        return None
    found = compress_vocabulary(Tokenizer.load(path))
    distinct = int(found.max()) + 1
    if (len(found), distinct) != (spec.vocab_size, size):
        raise ValueError(
            f"{path}: tokenizer.json has {len(found)} ids, {distinct} when compressed; "
            f"config.json says {spec.vocab_size} and {size}"
        )
    return found
