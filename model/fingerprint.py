"""Tells apart the weights of two checkpoint folders without reading them whole.

Two ranks that exchange state must hold the same weights, and two checkpoints of one config differ
in nothing that a config says. A difference in the sampled bytes is found for certain: training
moves all weights, so it shows there. One edited tensor may lie between the samples.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

_SPOTS = 64  # of each shard, evenly spread, the first and the last bytes among them
_SPOT_BYTES = 4096


def weights_fingerprint(folder: str | Path) -> str:
    """16 hex digits of the folder's shards: names, sizes, headers, and samples of their values.

    Raises OSError for a shard that cannot be read.
    """
    digest = hashlib.sha256()
    for path in sorted(Path(folder).glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as shard:
            header_bytes = int.from_bytes(shard.read(8), "little")  # safetensors begins so
            digest.update(shard.read(min(header_bytes, size)))
            first, last = shard.tell(), max(shard.tell(), size - _SPOT_BYTES)
            for spot in range(_SPOTS):
                shard.seek(first + (last - first) * spot // (_SPOTS - 1))
                digest.update(shard.read(_SPOT_BYTES))
    return digest.hexdigest()[:16]
