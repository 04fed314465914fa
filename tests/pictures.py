"""Pictures made by formula, as files and in requests of the tiny model."""

from __future__ import annotations

import base64
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image as Pillow

from cluster.client import build_request
from cluster.config import ImagesSection
from cluster.image_rules import ImageRules, load_image_rules
from cluster.messages import Request
from cluster.pictures import Picture, read_pictures

MODELS = Path(__file__).parents[1] / "deploy" / "models"
LIMITS = ImagesSection()


def rules(model: str = "tiny") -> ImageRules:
    found = load_image_rules(MODELS / model)
    assert found is not None
    return found


IMAGE = rules().image_token_id


def painted(width: int, height: int, seed: int = 0) -> Pillow.Image:
    noise = np.random.default_rng((seed, width, height))
    values = noise.integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Pillow.fromarray(values, "RGB")


def file(width: int, height: int, seed: int = 0, form: str = "PNG", **options: Any) -> bytes:
    """`form` is Pillow's name of the format."""
    out = BytesIO()
    painted(width, height, seed).save(out, form, **options)
    return out.getvalue()


def plain(width: int, height: int) -> bytes:
    """A JPEG of one colour: a large one is made at once."""
    out = BytesIO()
    Pillow.new("RGB", (width, height), (200, 10, 10)).save(out, "JPEG")
    return out.getvalue()


def data_url(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def read(*files: bytes, limits: ImagesSection = LIMITS) -> tuple[Picture, ...]:
    """As the tiny model sees them."""
    return read_pictures(files, rules(), limits)


def picture_request(prompt: list[int], *files: bytes, name: str = "r", **sampling: Any) -> Request:
    """`prompt` has one image token a file."""
    sampling = {"ignore_stop": True, "max_tokens": 8, "seed": 0} | sampling
    return build_request(prompt, request_id=name, images=read(*files), **sampling)
