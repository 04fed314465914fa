"""How large pictures are to a model: the published table, another implementation, all sizes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cluster.errors import StartupError
from cluster.image_rules import Canvas, ImageRules, load_image_rules
from model.spec import ModelSpec
from tests.pictures import MODELS, plain, rules

REAL, TINY = rules("deepseek-v41-flash"), rules("tiny")

# size, canvas, positions
PUBLISHED = (
    ((448, 336), (630, 476), 194),
    ((544, 544), (546, 546), 184),
    ((1024, 768), (1036, 770), 496),
    ((1344, 1344), (1302, 1302), 994),
    ((1920, 1080), (1708, 966), 968),
    ((3000, 4000), (1134, 1512), 1010),
    ((100, 3000), (112, 3010), 290),
    ((5000, 50), (5446, 56), 264),
    ((1, 1), (546, 546), 184),
)


@pytest.mark.parametrize(("size", "canvas", "positions"), PUBLISHED)
def test_canvas_and_positions_are_those_of_the_official_processor(
    size: tuple[int, int], canvas: tuple[int, int], positions: int
) -> None:
    assert REAL.canvas(*size) == canvas
    assert REAL.positions(Canvas(*canvas)) == positions


SIDES = st.integers(1, 20_000)


@given(SIDES, SIDES, st.sampled_from([REAL, TINY]))
@example(20_000, 1, REAL)
@example(1, 20_000, REAL)
@example(20_000, 1, TINY)
@example(1, 20_000, TINY)
def test_every_picture_fits_whatever_its_shape(width: int, height: int, rules: ImageRules) -> None:
    canvas = rules.canvas(width, height)
    assert canvas.width > 0
    assert canvas.height > 0
    assert not canvas.width % rules.patch_size
    assert not canvas.height % rules.patch_size
    assert 4 <= rules.positions(canvas) <= rules.max_image_tokens


@given(SIDES, SIDES)
def test_a_picture_keeps_its_shape_up_to_a_cell(width: int, height: int) -> None:
    canvas = REAL.canvas(width, height)
    if max(width, height) < 20 * min(width, height):  # others end as one row or one column
        scale = min(canvas.width / width, canvas.height / height)
        assert canvas.width - width * scale < REAL.cell
        assert canvas.height - height * scale < REAL.cell


@pytest.mark.parametrize("name", ["tiny", "deepseek-v41-flash"])
def test_the_model_counts_the_same_positions(name: str) -> None:
    found, vision = rules(name), ModelSpec.load(MODELS / name).vision
    assert vision is not None
    for size, _, _ in PUBLISHED:
        canvas = found.canvas(*size)
        assert vision.grid(canvas.height, canvas.width).positions == found.positions(canvas)


def test_the_official_recipe_makes_canvases_of_these_sizes() -> None:
    """Very thin pictures apart: it scales these up more than once, and WebP bounds its sides."""
    recipe = pytest.importorskip("deepseek_recipe")
    resolver = recipe.ImageResolver(recipe.ReqwestImageFetcher(), recipe.OpenCvImagePreprocessor())
    sizes = [(900, 300), (1300, 1250), (130, 800), (333, 777)]
    sources = [recipe.BytesImageSource(plain(*size)) for size in sizes]
    made = resolver.resolve(sources, recipe.ImageQuota())
    canvases = [REAL.canvas(*size) for size in sizes]
    assert [(one.width, one.height) for one in made.images] == canvases
    positions = sum(map(REAL.positions, canvases))
    assert made.image_token_adjustment() + len(sizes) == positions


def test_a_very_wide_picture_is_cut_to_the_widest_shape_that_the_model_knows() -> None:
    narrow = REAL.model_copy(update={"max_wh_ratio": 4.0})
    assert narrow.canvas(9000, 1000) == REAL.canvas(4000, 1000)
    assert narrow.canvas(1000, 9000) == REAL.canvas(1000, 9000)


def test_a_model_of_text_takes_no_images() -> None:
    assert load_image_rules(MODELS / "mini") is None


def test_a_config_that_lacks_a_size_is_named(tmp_path: Path) -> None:
    config = json.loads((MODELS / "tiny" / "config.json").read_text(encoding="utf-8"))
    del config["vision_config"]["patch_size"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(StartupError, match="patch_size"):
        load_image_rules(tmp_path)
