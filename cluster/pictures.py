"""Pictures from files to pixels on the model's canvas; the only place that meets Pillow.

What comes in is a stranger's: sizes are known and bounded before anything is decoded. All of it
takes a thread's time, never the event loop's.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass, field
from io import BytesIO

from PIL import Image as Pillow
from PIL import ImageOps, UnidentifiedImageError

from cluster.config import ImagesSection
from cluster.errors import BadRequest
from cluster.image import Image, key_of
from cluster.image_rules import Canvas, ImageRules

FORMATS = ("PNG", "JPEG", "WEBP")
GREY = (127, 127, 127)  # what a canvas shows beside the picture
_BASE64 = ";base64"


class BadPicture(BadRequest):
    """A picture that cannot be taken; `number` of several."""

    def __init__(self, number: int, why: str) -> None:
        super().__init__(f"images[{number}]: {why}")
        self.number, self.why = number, why


@dataclass(frozen=True)
class Picture:
    """A picture as the model sees it; where it stands in a prompt is not known yet."""

    height: int
    width: int
    count: int  # positions that it takes
    token_id: int  # at each of them
    key: bytes
    pixels: bytes = field(repr=False)  # uint8 [height, width, 3]

    @classmethod
    def of(cls, pixels: bytes, canvas: Canvas, rules: ImageRules) -> Picture:
        """Pixels that fill a canvas of these rules."""
        return cls(
            height=canvas.height,
            width=canvas.width,
            count=rules.positions(canvas),
            token_id=rules.image_token_id,
            key=key_of(canvas.height, canvas.width, pixels),
            pixels=pixels,
        )

    def at(self, start: int) -> Image:
        return Image(
            start=start,
            count=self.count,
            height=self.height,
            width=self.width,
            key=self.key,
            pixels=self.pixels,
        )


def read_pictures(
    files: Sequence[bytes], rules: ImageRules, limits: ImagesSection
) -> tuple[Picture, ...]:
    """PNG, JPEG or WebP files, each fitted into its canvas. Raises BadPicture.

    Transparency and a file's word on its orientation are ignored, and of several frames the first
    counts, as in the model's own image processor.
    """
    check_number(len(files), limits)
    pictures: list[Picture] = []
    left = limits.request_bytes
    for number, data in enumerate(files):
        try:
            picture = _read(data, rules, limits)
        except BadRequest as error:
            raise BadPicture(number, str(error)) from error
        left -= len(picture.pixels)
        if left < 0:
            raise BadPicture(
                number,
                f"with it the pixels of one request are more than {limits.request_bytes} bytes "
                "(images.request_bytes)",
            )
        pictures.append(picture)
    return tuple(pictures)


def check_number(count: int, limits: ImagesSection) -> None:
    if count > limits.max_images:
        raise BadPicture(
            limits.max_images,
            f"a request may have {limits.max_images} images (images.max_images), not {count}",
        )


def read_data_url(url: str) -> bytes:
    """The bytes that `data:image/png;base64,...` holds. BadRequest for any other text."""
    head, comma, text = url.partition(",")
    if not (comma and head.startswith("data:") and head.endswith(_BASE64)):
        raise BadRequest(
            f"must be data:image/png;base64,... and begins with {url[:24]!r}; addresses are not "
            "fetched"
        )
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadRequest(f"is not base64: {error}") from error


def _read(data: bytes, rules: ImageRules, limits: ImagesSection) -> Picture:
    if len(data) > limits.max_file_bytes:
        raise BadRequest(
            f"the file has {len(data)} bytes; at most {limits.max_file_bytes} are taken "
            "(images.max_file_bytes)"
        )
    with _decoded(data, limits.max_pixels) as image:
        canvas = rules.canvas(image.width, image.height)
        return Picture.of(_fitted(image, canvas, rules).tobytes(), canvas, rules)


def _decoded(data: bytes, max_pixels: int) -> Pillow.Image:
    """In RGB. The header alone is read before its size is known to be small enough."""
    try:
        with Pillow.open(BytesIO(data), formats=FORMATS) as source:
            width, height = source.size
            if width * height > max_pixels:
                raise BadRequest(
                    f"{width} x {height} are {width * height} pixels; at most {max_pixels} are "
                    "taken (images.max_pixels)"
                )
            return source.convert("RGB")
    except BadRequest:
        raise
    except UnidentifiedImageError:
        raise BadRequest(f"is none of {', '.join(FORMATS)}") from None
    except Exception as error:  # decoders have no common one for a file that is wrong
        raise BadRequest(f"cannot be decoded: {type(error).__name__}: {error}") from error


def _fitted(image: Pillow.Image, canvas: Canvas, rules: ImageRules) -> Pillow.Image:
    """In the middle of a grey canvas; stretched over it only where its shape leaves no choice."""
    scale = min(canvas.width / image.width, canvas.height / image.height)
    vanishes = min(round(image.width * scale), round(image.height * scale)) < 1
    if vanishes or rules.is_too_wide(image.width, image.height):
        return image.resize(canvas, Pillow.Resampling.BICUBIC)
    return ImageOps.pad(image, canvas, Pillow.Resampling.BICUBIC, color=GREY)
