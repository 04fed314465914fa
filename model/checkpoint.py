"""Checkpoint folders: safetensors shards, their index, and config.json.

Opening one checks every name, type and shape before any weight is read, and reports all that is
wrong at once. Tensors are memory-mapped: bytes come from the disk when they are touched. Knows
nothing of what the tensors mean.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from model.catalogue import StoredSpec, TensorSpec, catalogue, is_vision
from model.spec import ModelSpec
from model.stored import Stored

INDEX_FILE = "model.safetensors.index.json"
Read = Callable[[str, TensorSpec], Stored]
Progress = Callable[[int, int, str], None]
"""Called with the steps done, the steps in all, and what was done last."""

_SHOWN = 6  # names that an error shows of each kind of problem


class CheckpointError(ValueError):
    """A folder does not hold exactly what its config asks for; the message lists all of it."""


class Checkpoint:
    """A checked checkpoint folder: its logical tensors, each read on demand."""

    def __init__(self, tensors: Mapping[str, TensorSpec], places: Mapping[str, _Place]) -> None:
        self.tensors = tensors
        self._places = places
        self._shards: dict[Path, _Shard] = {}  # those that something was read from

    @property
    def num_shards(self) -> int:
        return len({place.path for place in self._places.values()})

    def read(self, name: str, tensor: TensorSpec) -> Stored:
        """The stored tensors of one logical tensor, as views of the mapped file."""
        parts: list[Tensor] = []
        for stored_name in tensor.stored(name):
            place = self._places[stored_name]
            parts.append(self._shard(place.path).get_tensor(place.name))
        return Stored(*parts)

    def _shard(self, path: Path) -> _Shard:
        if path not in self._shards:
            try:
                self._shards[path] = safe_open(path, framework="pt", device="cpu")
            except RuntimeError as error:  # torch maps privately, which Linux counts as memory
                raise CheckpointError(
                    f"{path} cannot be mapped; where a shard is larger than the machine's memory, "
                    f"set vm.overcommit_memory to 1: {error}"
                ) from error
        return self._shards[path]


class _Shard(Protocol):
    """An open safetensors file; the library's own stubs have no types."""

    def keys(self) -> list[str]: ...
    def get_slice(self, name: str) -> Any: ...
    def get_tensor(self, name: str) -> Tensor: ...


class _Place(NamedTuple):
    """Where a stored tensor lies: its file, its name there, and what the header says."""

    path: Path
    name: str
    spec: StoredSpec


def open_checkpoint(
    folder: str | Path, spec: ModelSpec, progress: Progress | None = None
) -> Checkpoint:
    """Open all shards of `folder` and check that they hold the tensors of `spec`, no more.

    Names may carry a `model.` prefix. The vision group may be absent, but only as a whole.
    Raises CheckpointError with everything that is wrong.
    """
    problems: dict[str, list[str]] = {}
    places = _scan(Path(folder), problems, progress)
    tensors = catalogue(spec, vision=any(map(is_vision, places)))
    expected = {k: v for name, tensor in tensors.items() for k, v in tensor.stored(name).items()}
    problems["missing tensors"] = sorted(expected.keys() - places.keys())
    problems["unknown tensors"] = sorted(places.keys() - expected.keys())
    problems["tensors of another type or shape"] = [
        f"{name}: {_shown(places[name].spec)} instead of {_shown(wanted)}"
        for name, wanted in expected.items()
        if name in places and places[name].spec != wanted
    ]
    if any(problems.values()):
        raise CheckpointError(f"{folder} does not fit its config.json: {_listed(problems)}")
    return Checkpoint(tensors, places)


def _scan(
    folder: Path, problems: dict[str, list[str]], progress: Progress | None
) -> dict[str, _Place]:
    """Read the header of every shard; names lose their optional prefix."""
    places: dict[str, _Place] = {}
    unreadable = problems.setdefault("unreadable files", [])
    twice = problems.setdefault("tensors that occur twice", [])
    paths = _shards(folder)
    for number, path in enumerate(paths, 1):
        try:
            # Headers alone, which torch need not map.
            shard: _Shard = safe_open(path, framework="numpy")
        except (SafetensorError, OSError) as error:
            unreadable.append(f"{path.name}: {error}")
            continue
        for own_name in shard.keys():  # noqa: SIM118 - not a mapping
            header = shard.get_slice(own_name)
            stored = StoredSpec(header.get_dtype(), tuple(header.get_shape()))
            name = own_name.removeprefix("model.")
            if name in places:
                twice.append(name)
            places[name] = _Place(path, own_name, stored)
        if progress:
            progress(number, len(paths), path.name)
    return places


def _shards(folder: Path) -> list[Path]:
    """The files that the index names; without an index, all there are."""
    index = folder / INDEX_FILE
    if index.exists():
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, AttributeError) as error:
            raise CheckpointError(f"{index} is not a safetensors index: {error!r}") from error
        return sorted(folder / name for name in names)
    shards = sorted(folder.glob("*.safetensors"))
    if not shards:
        raise CheckpointError(f"{folder} holds no *.safetensors files")
    return shards


def _listed(problems: Mapping[str, list[str]]) -> str:
    parts = []
    for problem, names in problems.items():
        if names:
            more = ", ..." if len(names) > _SHOWN else ""
            parts.append(f"{len(names)} {problem} ({', '.join(names[:_SHOWN])}{more})")
    return "; ".join(parts)


def _shown(stored: StoredSpec) -> str:
    return f"{stored.dtype} {list(stored.shape)}"


def save_checkpoint(
    folder: str | Path,
    spec: ModelSpec,
    tensors: Mapping[str, TensorSpec],
    read: Read,
    *,
    shards: int,
    progress: Progress | None = None,
) -> None:
    """Write the tensors that `read` gives as a checkpoint of `shards` files.

    Holds one shard in memory. A shard appears under its name when it is whole, and config.json
    and the index come last, so that an interrupted write never looks like a checkpoint.
    Raises CheckpointError rather than mix with a checkpoint that is there already.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.glob("*.safetensors")):
        raise CheckpointError(f"{folder} already holds *.safetensors files; choose another folder")
    weight_map: dict[str, str] = {}
    for number, names in enumerate(_split(tensors, shards), 1):
        file_name = f"model-{number:05d}-of-{shards:05d}.safetensors"
        stored: dict[str, Tensor] = {}
        for name in names:
            parts = [part for part in read(name, tensors[name]) if part is not None]
            stored |= dict(zip(tensors[name].stored(name), parts, strict=True))
        with _whole_file(folder / file_name) as unfinished:
            save_file(stored, unfinished)
        weight_map |= dict.fromkeys(stored, file_name)
        if progress:
            progress(number, shards, file_name)
    _write_json(folder / "config.json", spec.raw)
    total = sum(_nbytes(tensors.items()))
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    _write_json(folder / INDEX_FILE, index)


def _split(tensors: Mapping[str, TensorSpec], shards: int) -> Iterator[list[str]]:
    """Names in `shards` runs of about the same number of bytes."""
    sizes = list(_nbytes(tensors.items()))
    total, done, names = sum(sizes), 0, iter(tensors)
    left = iter(sizes)
    for shard in range(1, shards + 1):
        run: list[str] = []
        while done < total * shard / shards:
            run.append(next(names))
            done += next(left)
        yield run


def _nbytes(tensors: Iterable[tuple[str, TensorSpec]]) -> Iterator[int]:
    for name, tensor in tensors:
        yield sum(stored.nbytes for stored in tensor.stored(name).values())


@contextmanager
def _whole_file(path: Path) -> Iterator[Path]:
    """A path to write to that becomes `path` at the end, or disappears."""
    unfinished = path.with_name(path.name + ".unfinished")
    try:
        yield unfinished
        unfinished.rename(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _write_json(path: Path, value: Mapping[str, object]) -> None:
    with _whole_file(path) as unfinished:
        unfinished.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
