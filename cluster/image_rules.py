"""How large a picture is to a model: the canvas that it is fitted into, and its positions. Pure.

A canvas is made of whole patches; a square of patches is one cell, and each row of cells takes one
position more for its end. Knows nothing of pixels.
Source: config.json and image processor of DeepSeek-V4.1-Flash.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import NamedTuple

from cluster.errors import StartupError
from cluster.value import Value


class Canvas(NamedTuple):
    """In pixels."""

    width: int
    height: int


class ImageRules(Value):
    """Names as in a config.json's vision_config; `image_token_id` stands at every position."""

    patch_size: int
    downsample_ratio: int
    max_image_tokens: int
    min_pixels: int
    max_wh_ratio: float | None
    image_token_id: int

    @property
    def cell(self) -> int:
        """Pixels on either side of a cell."""
        return self.patch_size * self.downsample_ratio

    def canvas(self, width: int, height: int) -> Canvas:
        """For a picture of any size: near to it, not too small, and within max_image_tokens."""
        wide, high = float(width), float(height)
        if self.is_too_wide(width, height):
            assert self.max_wh_ratio is not None
            wide = high * self.max_wh_ratio
        if wide * high < self.min_pixels:
            scale = math.sqrt(self.min_pixels / (wide * high))
            wide, high = max(1.0, int(wide * scale)), max(1.0, int(high * scale))
        canvas = Canvas(self._up(wide), self._up(high))
        if self.positions(canvas) <= self.max_image_tokens:
            return canvas
        return self._shrunk(wide, high)

    def is_too_wide(self, width: int, height: int) -> bool:
        return self.max_wh_ratio is not None and width >= height * self.max_wh_ratio

    def positions(self, canvas: Canvas) -> int:
        """A start, the cells row by row with an end after each row, an end."""
        columns, rows = (-(-(side // self.patch_size) // self.downsample_ratio) for side in canvas)
        return rows * (columns + 1) + 2

    def _up(self, side: float) -> int:
        return math.ceil(side / self.patch_size) * self.patch_size

    def _shrunk(self, wide: float, high: float) -> Canvas:
        """The largest of about this shape whose cells fit, as whole patches.

        With c columns, and rows = c * high / wide, all cells and row ends are c**2 + c times that
        ratio: solved for c, then both sides rounded down to whole cells before the scale is taken.
        """
        room, ratio = self.max_image_tokens - 2, high / wide
        columns = math.sqrt(room / ratio + 0.25) - 0.5
        rows = columns * ratio
        if columns < 1.0:  # one column, each of whose cells has an end of row
            return Canvas(self.cell, room // 2 * self.cell)
        if rows < 1.0:  # one row, with one end
            return Canvas((room - 1) * self.cell, self.cell)
        scale = min(
            math.floor(columns) * self.cell / wide,
            math.floor(rows) * self.cell / high,
        )
        return Canvas(self._down(wide * scale), self._down(high * scale))

    def _down(self, side: float) -> int:
        return math.floor(side / self.patch_size) * self.patch_size


def load_image_rules(folder: str | Path) -> ImageRules | None:
    """Of a model folder's config.json; None: the model takes no images. StartupError names what is
    wrong with it."""
    path = Path(folder) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        vision = config.get("vision_config")
        if vision is None:
            return None
        names = ImageRules.model_fields.keys() - {"image_token_id"}
        return ImageRules(
            image_token_id=config["image_token_id"], **{name: vision[name] for name in names}
        )
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise StartupError(f"{path}: cannot read what images are to the model: {error}") from error
