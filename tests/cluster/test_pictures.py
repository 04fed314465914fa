"""Files to pixels on a canvas: every format, every way a file can be wrong, every bound."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image as Pillow

from cluster.config import ImagesSection
from cluster.errors import BadRequest, NoRoom
from cluster.held_bytes import HeldBytes
from cluster.pictures import BadPicture, Picture, read_data_url
from tests.pictures import IMAGE, data_url, file, painted, read, rules


def pixels_of(picture: Picture) -> npt.NDArray[np.uint8]:
    return np.frombuffer(picture.pixels, np.uint8).reshape(picture.height, picture.width, 3)


def saved(image: Pillow.Image, form: str = "PNG") -> bytes:
    out = io.BytesIO()
    image.save(out, form)
    return out.getvalue()


def test_a_picture_that_fits_is_taken_as_it_is() -> None:
    (picture,) = read(file(84, 126))
    assert (picture.width, picture.height, picture.count, picture.token_id) == (84, 126, 11, IMAGE)
    assert np.array_equal(pixels_of(picture), np.asarray(painted(84, 126)))


def test_another_one_stands_in_the_middle_of_grey() -> None:
    (picture,) = read(saved(Pillow.new("RGB", (100, 90), (255, 0, 0))))
    assert (picture.width, picture.height) == (112, 98)
    red = (pixels_of(picture) == (255, 0, 0)).all(2)
    grey = (pixels_of(picture) == 127).all(2)
    assert red[:, 2:-2].all()  # 109 of 112 columns
    assert sorted(grey[:, edge].all(0).sum() for edge in (slice(2), slice(-2, None))) == [1, 2]
    assert (red | grey).all()


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP"])
def test_each_format_is_read(form: str) -> None:
    (picture,) = read(saved(Pillow.new("RGB", (84, 84), (10, 200, 30)), form))
    assert np.abs(pixels_of(picture).astype(int) - (10, 200, 30)).max() < 10


@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGBA", "1", "I;16", "CMYK"])
def test_each_kind_of_pixel_becomes_three_colours(mode: str) -> None:
    form = "JPEG" if mode == "CMYK" else "PNG"
    image = Pillow.new(mode, (84, 84)) if mode == "I;16" else painted(84, 84).convert(mode)
    (picture,) = read(saved(image, form))
    assert len(picture.pixels) == 84 * 84 * 3


def test_a_thin_line_is_stretched_where_it_would_vanish() -> None:
    (picture,) = read(saved(Pillow.new("RGB", (6000, 1), (1, 2, 3))))
    assert (pixels_of(picture) == (1, 2, 3)).all()
    assert picture.count <= rules().max_image_tokens


def test_equal_pixels_have_equal_keys_and_others_have_not() -> None:
    one, same, other, turned = read(
        file(84, 126), file(84, 126, compress_level=1), file(84, 126, seed=1), file(126, 84)
    )
    assert one.key == same.key
    assert len({one.key, other.key, turned.key}) == 3


def bomb(width: int, height: int) -> bytes:
    """A small file that says it is large."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        check = zlib.crc32(kind + body)
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", check)

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = zlib.compress(bytes(1 << 20))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


WRONG = {
    "nothing": (b"", "is none of PNG, JPEG, WEBP"),
    "text": (b"hello", "is none of PNG, JPEG, WEBP"),
    "another format": (saved(painted(84, 84), "GIF"), "is none of"),
    "half a PNG": (file(84, 84)[:900], "cannot be decoded"),
    "half a JPEG": (file(84, 84, form="JPEG")[:900], "cannot be decoded"),
    "half a WebP": (file(84, 84, form="WEBP")[:900], "cannot be decoded"),
    "a bomb": (bomb(50_000, 40_000), "2000000000 pixels|DecompressionBomb"),
    "a smaller bomb": (bomb(7000, 6000), "7000 x 6000 are 42000000 pixels; at most 36000000"),
    "too many bytes": (bytes(2 << 24), r"at most 16777216 are taken \(images.max_file_bytes\)"),
}


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_file_is_refused_with_its_number(kind: str) -> None:
    data, why = WRONG[kind]
    with pytest.raises(BadPicture, match=why) as refusal:
        read(file(84, 84), data)
    assert refusal.value.number == 1
    assert str(refusal.value).startswith("images[1]: ")


def test_flipped_bytes_never_harm() -> None:
    """What comes of them is a picture or a refusal."""
    noise = np.random.default_rng(4)
    for form in ("PNG", "JPEG", "WEBP"):
        whole = np.frombuffer(file(84, 84, form=form), np.uint8)
        for _ in range(40):
            broken = whole.copy()
            at = noise.integers(0, len(whole), 6)
            broken[at] = noise.integers(0, 256, 6)
            try:
                (picture,) = read(broken.tobytes())
            except BadRequest:
                continue
            assert picture.count <= rules().max_image_tokens


def test_one_request_has_so_many_images_and_so_many_pixels() -> None:
    with pytest.raises(BadPicture, match=r"may have 2 images \(images.max_images\), not 3") as many:
        read(*[file(84, 84)] * 3, limits=ImagesSection(max_images=2))
    assert many.value.number == 2
    with pytest.raises(BadPicture, match=r"images\[1\]: with it .* more than 40000 bytes"):
        read(*[file(84, 84)] * 2, limits=ImagesSection(request_bytes=40_000))


def test_a_data_url_is_read_and_nothing_else() -> None:
    assert read_data_url(data_url(b"bytes")) == b"bytes"
    for url, why in {
        "https://example.com/x.png": "addresses are not fetched",
        "file:///etc/passwd": "addresses are not fetched",
        "data:image/png,abc": "must be data:image/png;base64",
        "data:image/png;base64,a*c=": "is not base64",
        "data:image/png;base64,abc": "is not base64",
        "": "must be data:image/png;base64",
    }.items():
        with pytest.raises(BadRequest, match=why):
            read_data_url(url)


def test_held_bytes_come_back_and_are_bounded() -> None:
    held = HeldBytes(100)
    with (
        held.hold(60),
        pytest.raises(NoRoom, match="hold 60 bytes and this one has 41"),
        held.hold(41),
    ):
        pass
    with held.hold(100):
        assert held.held == 100
    assert not held.held
