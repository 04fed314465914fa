"""What running prompts show: each image is encoded once, in the step that reaches it.

Its rows are kept while a later chunk still needs some of them, so what is held at a time is one
image a prompt beside those of the step. Knows nothing of the encoder but that it can be called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from cluster.image import Image, key_of
from cluster.image_rules import ImageRules
from engine.request import Running
from engine.schedule import Grant
from model.vision_spec import VisionSpec

Encode = Callable[[Tensor], Tensor]
"""Pixels [height, width, 3], uint8 -> what each position of the image is to the model [S, D]."""


def rules_of(spec: VisionSpec, image_token_id: int) -> ImageRules:
    """What callers must know of the encoder."""
    names = ImageRules.model_fields.keys() - {"image_token_id"}
    sizes = {name: getattr(spec, name) for name in names}
    return ImageRules(image_token_id=image_token_id, **sizes)


class Shown(NamedTuple):
    """Embeddings [count, D] of a chunk, and the positions that they are for."""

    embeddings: Tensor | None = None
    positions: frozenset[int] = frozenset()


class ImageRows:
    """Used in the engine's thread only."""

    def __init__(self, encode: Encode | None) -> None:
        self._encode = encode
        self._kept: WeakKeyDictionary[Running, dict[int, Tensor]] = WeakKeyDictionary()

    def of(self, running: Running, grant: Grant) -> Shown:
        """What the chunk shows; nothing for one of text alone."""
        start, stop = grant.start, grant.start + grant.count
        shown = [
            image for image in running.request.images if image.start < stop and start < image.stop
        ]
        if not shown:
            return Shown()
        embeddings: Tensor | None = None
        positions: set[int] = set()
        for image in shown:
            rows = self._rows(running, image, keep=image.stop > stop)
            if embeddings is None:
                embeddings = rows.new_zeros(grant.count, rows.shape[1])
            first, last = max(image.start, start), min(image.stop, stop)
            mine = rows[first - image.start : last - image.start]
            embeddings[first - start : last - start] = mine
            positions.update(range(first, last))
        return Shown(embeddings, frozenset(positions))

    def _rows(self, running: Running, image: Image, *, keep: bool) -> Tensor:
        kept = self._kept.setdefault(running, {})
        rows = kept.pop(image.start, None)
        if rows is None:
            rows = self._encoded(image)
        if keep:
            kept[image.start] = rows
        return rows

    def _encoded(self, image: Image) -> Tensor:
        """Raises ValueError for a key that names other pixels: blocks would go by a false name."""
        assert self._encode is not None, "a rank without an encoder takes no request with images"
        if key_of(image.height, image.width, image.pixels) != image.key:
            raise ValueError(f"the image at position {image.start} has the key of another one")
        pixels = torch.frombuffer(bytearray(image.pixels), dtype=torch.uint8)
        return self._encode(pixels.view(image.height, image.width, 3))
