"""A model's weights by logical name, as float32 tensors, from a checkpoint folder or from a seed.

Each is decoded when it is asked for. The model asks once, and keeps the form that it computes
with; keeping the plain form here as well would double its memory.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from torch import Tensor

from model.catalogue import TensorSpec, catalogue
from model.checkpoint import Progress, Read, open_checkpoint, save_checkpoint
from model.random_tensors import random_stored
from model.spec import ModelSpec
from model.stored import Stored, decode

_EXPERT = re.compile(r"(layers|mtp)\.\d+\.ffn\.experts\.(\d+)\.")


class Weights:
    """Read-only. Engram tables stay in their stored form and are read by rows.

    `progress` hears of each tensor that was decoded, or read as it is.
    """

    def __init__(
        self, tensors: Mapping[str, TensorSpec], read: Read, progress: Progress | None = None
    ) -> None:
        self._tensors = tensors
        self._read = read
        self._progress = progress
        self._num_decoded = 0
        self._tables: dict[str, Stored] = {}

    def __getitem__(self, name: str) -> Tensor:
        """Float32 values. Raises KeyError for a tensor that is not there, or not this rank's."""
        tensor = self._spec(name)
        if tensor.kind == "fp8_rows":
            raise ValueError(f"{name} is a table: read it by table_rows")
        values = decode(self._read(name, tensor), tensor.kind)
        self._num_decoded += 1
        if self._progress:
            self._progress(self._num_decoded, len(self._tensors), name)
        return values

    def table_rows(self, name: str, rows: Tensor) -> Tensor:
        """Rows [...] (int64) of a table as float32 values [..., dim]; the rest stays untouched."""
        if name not in self._tables:
            self._tables[name] = self._read(name, self._spec(name))
        return decode(self._tables[name].rows(rows.flatten()), "fp8_rows").view(*rows.shape, -1)

    def stored(self, name: str) -> Stored:
        """The tensor in its stored form, for kernels that compute on it."""
        found = self._read(name, self._spec(name))
        self._num_decoded += 1
        if self._progress:
            self._progress(self._num_decoded, len(self._tensors), name)
        return found

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Kind and shape of each tensor that is there."""
        return self._tensors

    def names(self) -> tuple[str, ...]:
        return tuple(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def _spec(self, name: str) -> TensorSpec:
        if name not in self._tensors:
            raise KeyError(f"no tensor {name!r} here; experts may belong to another rank")
        return self._tensors[name]


def random_weights(
    spec: ModelSpec, seed: int, *, vision: bool = False, progress: Progress | None = None
) -> Weights:
    """Made when asked for, in memory; equal to those of a checkpoint written with this seed."""
    return Weights(catalogue(spec, vision), partial(random_stored, seed=seed), progress)


def load_weights(
    folder: str | Path,
    spec: ModelSpec,
    *,
    progress: Progress | None = None,
    experts: range | None = None,
    draft_experts: range | None = None,
) -> Weights:
    """The weights of a checkpoint folder, memory-mapped.

    The whole folder is checked (see open_checkpoint, also for what is raised). `experts` and
    `draft_experts` are a rank's share of each layer's and each draft stage's routed experts;
    default all. `progress` hears of each shard that was opened, then of each tensor decoded.
    """
    checkpoint = open_checkpoint(folder, spec, progress)
    shares = {"layers": experts, "mtp": draft_experts}
    mine = {n: tensor for n, tensor in checkpoint.tensors.items() if _in_share(n, shares)}
    return Weights(mine, checkpoint.read, progress)


def write_checkpoint(
    folder: str | Path,
    spec: ModelSpec,
    seed: int,
    *,
    vision: bool = True,
    shards: int = 2,
    progress: Progress | None = None,
) -> None:
    """Write random weights as a checkpoint folder: shards, index and config.json."""
    save_checkpoint(
        folder,
        spec,
        catalogue(spec, vision),
        partial(random_stored, seed=seed),
        shards=shards,
        progress=progress,
    )


def _in_share(name: str, shares: Mapping[str, range | None]) -> bool:
    expert = _EXPERT.match(name)
    if not expert:
        return True
    share = shares[expert[1]]
    return share is None or int(expert[2]) in share
