"""One image of a prompt, as processes tell it each other: where it stands, and its pixels.

Values and what must hold of them. Knows nothing of files, formats and tensors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from pydantic import Field

from cluster.block_hash import DIGEST_BYTES, ImageSpan
from cluster.errors import BadRequest
from cluster.image_rules import Canvas, ImageRules
from cluster.value import Value


class Image(Value):
    """Positions start .. stop - 1 of a prompt show it; all of them carry the image token's id.

    `pixels` are uint8 [height, width, 3], row by row; empty where only positions matter: decode
    never looks at an image. `key` names them, in the identity of blocks too.
    """

    start: int = Field(ge=0)
    count: int = Field(ge=1)  # positions
    height: int = Field(ge=1)
    width: int = Field(ge=1)
    key: bytes = Field(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)
    pixels: bytes = Field(default=b"", repr=False)

    @property
    def stop(self) -> int:
        return self.start + self.count

    @property
    def span(self) -> ImageSpan:
        return ImageSpan(self.start, self.stop, self.key)

    def without_pixels(self) -> Image:
        return self.model_copy(update={"pixels": b""})


def key_of(height: int, width: int, pixels: bytes) -> bytes:
    """Equal keys, equal images."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    digest.update(f"{height} {width} ".encode())
    digest.update(pixels)
    return digest.digest()


def check_images(images: Sequence[Image], prompt: bytes, rules: ImageRules | None) -> None:
    """BadRequest for what a model of these rules cannot run; `prompt` has int32 token ids."""
    if not images:
        return
    if rules is None:
        raise BadRequest(
            "images: no vision encoder here: the model has none, or the pool's `vision` is false"
        )
    free = 0
    for number, image in enumerate(images):
        who = f"images[{number}]"
        canvas, patch = Canvas(image.width, image.height), rules.patch_size
        if image.width % patch or image.height % patch:
            raise BadRequest(f"{who}: {image.width} x {image.height} is not in patches of {patch}")
        if len(image.pixels) != 3 * image.width * image.height:
            raise BadRequest(f"{who}: {len(image.pixels)} bytes are not {canvas} x 3 pixels")
        wanted = rules.positions(canvas)
        if image.count != wanted or wanted > rules.max_image_tokens:
            raise BadRequest(
                f"{who}: {image.width} x {image.height} pixels take {wanted} positions, of at most "
                f"{rules.max_image_tokens}; it has {image.count}"
            )
        shown = prompt[4 * image.start : 4 * image.stop]
        if image.start < free or len(shown) < 4 * image.count:
            raise BadRequest(f"{who}: it overlaps the one before it, or ends behind the prompt")
        if shown != image.count * rules.image_token_id.to_bytes(4, "little"):
            raise BadRequest(
                f"{who}: not every position from {image.start} to {image.stop - 1} has the image "
                f"token {rules.image_token_id}"
            )
        free = image.stop
