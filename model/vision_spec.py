"""What a config.json's vision_config says, and how many positions an image of some size takes.

Values only. Key names are those of the published file. How a picture of any size comes to a size
that the encoder takes is not known here: cluster/image_rules.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple


class Grid(NamedTuple):
    """An image as the encoder sees it (patches) and as the language model does (cells)."""

    patch_rows: int
    patch_columns: int
    rows: int
    columns: int

    @property
    def positions(self) -> int:
        """A start, the cells row by row with a newline after each row, an end."""
        return self.rows * (self.columns + 1) + 2


@dataclass(frozen=True)
class VisionSpec:
    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    intermediate_size: int
    patch_size: int  # pixels
    rope_theta: float
    downsample_ratio: int  # patches on either side of a cell
    max_image_tokens: int
    min_pixels: int
    max_wh_ratio: float | None

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> VisionSpec:
        """Raises ValueError that names what is missing or cannot be."""
        missing = sorted(one.name for one in fields(cls) if one.name not in raw)
        if missing:
            raise ValueError(f"vision_config lacks {', '.join(missing)}")
        spec = cls(**{one.name: raw[one.name] for one in fields(cls)})
        if spec.hidden_size % (4 * spec.num_attention_heads):
            raise ValueError(
                "vision_config: hidden_size must be a multiple of 4 x num_attention_heads: a head "
                "has as many pairs that turn by row as by column"
            )
        return spec

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    def rope_frequencies(self) -> list[float]:
        """Radians per row, and per column, of each pair that turns by it."""
        size = self.head_dim // 2
        return [self.rope_theta ** (-2.0 * i / size) for i in range(size // 2)]

    def grid(self, height: int, width: int) -> Grid:
        """Of an image of so many pixels. Raises ValueError for sides that are no whole patches,
        and for an image of more than max_image_tokens."""
        patch, ratio = self.patch_size, self.downsample_ratio
        if height < patch or width < patch or height % patch or width % patch:
            raise ValueError(
                f"an image of {width} x {height} pixels is not made of whole patches of {patch}"
            )
        patch_rows, patch_columns = height // patch, width // patch
        grid = Grid(patch_rows, patch_columns, -(-patch_rows // ratio), -(-patch_columns // ratio))
        if grid.positions > self.max_image_tokens:
            raise ValueError(
                f"an image of {width} x {height} pixels takes {grid.positions} positions; at most "
                f"{self.max_image_tokens} are allowed"
            )
        return grid
