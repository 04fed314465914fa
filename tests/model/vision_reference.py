"""The vision encoder once more, in float64 NumPy, patch by patch and pair by pair.

Written from the architecture's description, apart from the model's code: loops where that has
tensor operations, no shared constant. Slow; for small configs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Weights = Callable[[str], Floats]
_erf = np.vectorize(math.erf)


def encode(pixels: npt.NDArray[np.uint8], config: Mapping[str, Any], weight: Weights) -> Floats:
    """[positions, D] of an image [height, width, 3]; `weight` gives tensors by stored name."""
    side = config["patch_size"]
    rows, columns = pixels.shape[0] // side, pixels.shape[1] // side
    patches = [
        _flattened(pixels[r * side : (r + 1) * side, c * side : (c + 1) * side])
        for r in range(rows)
        for c in range(columns)
    ]
    x = np.stack(patches) @ weight("vision.patch_embed.proj.weight").T
    x = x + weight("vision.patch_embed.proj.bias")
    places = [(r, c) for r in range(rows) for c in range(columns)]
    for block in range(config["num_hidden_layers"]):
        prefix = f"vision.blocks.{block}."
        x = x + _attention(
            _norm(x, weight(f"{prefix}norm1.weight")), places, config, prefix, weight
        )
        x = x + _mlp(_norm(x, weight(f"{prefix}norm2.weight")), prefix, weight)
    x = _norm(x, weight("vision.norm.weight"))
    return _aligned(x.reshape(rows, columns, -1), config["downsample_ratio"], weight)


def _flattened(patch: npt.NDArray[np.uint8]) -> Floats:
    """All of red, then green, then blue, each -1 .. 1 and rounded to bfloat16."""
    return np.array([_bfloat16((int(v) / 255 - 0.5) / 0.5) for v in patch.transpose(2, 0, 1).flat])


def _bfloat16(value: float) -> float:
    """To eight significant bits, ties to even."""
    if value == 0.0:
        return 0.0
    step = 2.0 ** (math.floor(math.log2(abs(value))) - 7)
    return round(value / step) * step


def _norm(x: Floats, weight: Floats) -> Floats:
    size: Floats = np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
    return x / size * weight


def _attention(
    x: Floats,
    places: list[tuple[int, int]],
    config: Mapping[str, Any],
    prefix: str,
    weight: Weights,
) -> Floats:
    heads = config["num_attention_heads"]
    size = x.shape[1] // heads
    q, k, v = np.split(
        x @ weight(f"{prefix}attn.wqkv.weight").T + weight(f"{prefix}attn.wqkv.bias"), 3, 1
    )
    out = np.zeros_like(x)
    for head in range(heads):
        mine = slice(head * size, (head + 1) * size)
        turned_q = np.stack([_turned(*one, config) for one in zip(q[:, mine], places, strict=True)])
        turned_k = np.stack([_turned(*one, config) for one in zip(k[:, mine], places, strict=True)])
        logits = turned_q @ turned_k.T / math.sqrt(size)
        shares = np.exp(logits - logits.max(1, keepdims=True))
        out[:, mine] = shares / shares.sum(1, keepdims=True) @ v[:, mine]
    return out @ weight(f"{prefix}attn.wo.weight").T + weight(f"{prefix}attn.wo.bias")


def _turned(vector: Floats, place: tuple[int, int], config: Mapping[str, Any]) -> Floats:
    """Pair k is dims k and k + half; the first half of the pairs turns by the row."""
    half = len(vector) // 2
    turned = vector.copy()
    for k in range(half):
        axis, i = divmod(k, half // 2)
        angle = place[axis] * config["rope_theta"] ** (-2 * i / half)
        a, b = vector[k], vector[k + half]
        turned[k] = a * math.cos(angle) - b * math.sin(angle)
        turned[k + half] = b * math.cos(angle) + a * math.sin(angle)
    return turned


def _mlp(x: Floats, prefix: str, weight: Weights) -> Floats:
    gate, up = np.split(x @ weight(f"{prefix}mlp.w1.weight").T, 2, 1)
    opened: Floats = gate / (1 + np.exp(-gate)) * up
    return opened @ weight(f"{prefix}mlp.w2.weight").T


def _aligned(grid: Floats, ratio: int, weight: Weights) -> Floats:
    """A start, for each row of cells its cells and a newline, an end."""
    rows, columns, width = grid.shape
    out = [weight("image_start")]
    for top in range(0, rows, ratio):
        for left in range(0, columns, ratio):
            cell = np.zeros(width * ratio * ratio)
            for channel in range(width):
                for h in range(ratio):
                    for w in range(ratio):
                        if top + h < rows and left + w < columns:
                            at = channel * ratio * ratio + h * ratio + w
                            cell[at] = grid[top + h, left + w, channel]
            x = weight("aligner.w1.weight") @ cell + weight("aligner.w1.bias")
            x = x * (1 + _erf(x / math.sqrt(2))) / 2
            out.append(weight("aligner.w2.weight") @ x + weight("aligner.w2.bias"))
        out.append(weight("image_newline"))
    return np.stack([*out, weight("image_end")])
