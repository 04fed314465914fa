"""Trained parameters to a checkpoint folder and back: python -m examples.mini.export FROM TO

Writes the real formats (FP8, FP4, bf16), as training rounded them, in one shard.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import torch
from torch import Tensor

from examples.mini.corpus import FOLDER
from examples.mini.parameters import Parameters, stacks
from examples.mini.saved import load
from model.catalogue import TensorSpec, catalogue
from model.checkpoint import save_checkpoint
from model.spec import ModelSpec
from model.stored import Stored, decode, encode
from model.weights import load_weights


def export(parameters: Parameters, spec: ModelSpec, folder: Path) -> None:
    values: dict[str, Tensor] = parameters.unstacked()

    def read(name: str, tensor: TensorSpec) -> Stored:
        return encode(values[name].contiguous(), tensor.kind)

    save_checkpoint(folder, spec, catalogue(spec, vision=False), read, shards=1)


def restore(folder: Path) -> Parameters:
    """What a checkpoint holds, for scores and for training on."""
    spec = ModelSpec.load(folder)
    weights = load_weights(folder, spec)
    values = {
        key: torch.stack([decode(weights.stored(name), stack.kind) for name in stack.members])
        for key, stack in stacks(spec).items()
    }
    return Parameters(spec, values)


def main(arguments: list[str]) -> None:
    source, target = map(Path, arguments)
    spec = ModelSpec.load(FOLDER)
    parameters, _ = load(spec, source)
    export(parameters, spec, target)
    if target.resolve() != FOLDER:
        shutil.copy(FOLDER / "tokenizer.json", target)
    size = sum(path.stat().st_size for path in target.iterdir())
    print(f"{target}: {size / 1e6:.2f} MB")


if __name__ == "__main__":
    main(sys.argv[1:])
