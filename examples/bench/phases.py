"""What each phase runs, step by step. A step is all that an engine does for its tokens, batch
building and sampling included, without scheduling and HTTP.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor

from examples.bench.settings import Settings
from examples.bench.subject import Subject
from model.batch import Chunk
from model.spec import ModelSpec
from model.vision import VisionEncoder

Step = Callable[[], object]


@contextmanager
def decode_steps(subject: Subject, settings: Settings) -> Iterator[Step]:
    """Each request: its newest token, and `nextn` drafts to be verified, in one forward; then, if
    there are any, the next drafts. Every step is made at the same length, as if all were taken
    back: `nextn` drafts cost the same whether they are accepted or not.
    """
    rows, length = 1 + settings.nextn, settings.context + 1 + settings.nextn
    ids = _ids(subject.spec, length)
    chunks = [Chunk(ids, settings.context, rows, logits="all")] * settings.requests
    anchors, lengths = [ids[-1]] * settings.requests, [length] * settings.requests
    with subject.requests(
        settings.requests, length, written=settings.context, slack=settings.nextn
    ) as cache:

        def step() -> None:
            _sampled(subject.model.forward(subject.batch(chunks), cache))
            if settings.nextn:
                subject.model.draft(anchors, lengths, cache).tokens.cpu()

        yield step


@contextmanager
def prefill_steps(subject: Subject, settings: Settings) -> Iterator[Step]:
    """A batch of `prefill_tokens`: the last ones of one prompt of `context` tokens, or several
    such prompts from their beginning. In steps of `chunk_tokens`, as an engine cuts it; the
    first token of each prompt is sampled. An image at a prompt's beginning is encoded, too.
    """
    context, batch = settings.context, settings.prefill_tokens
    prompts, start = max(1, batch // context), max(0, context - batch)
    ids, shown = _ids(subject.spec, context), subject.model.vision
    window_start = max(0, context - settings.yoco_keep) if settings.yoco_keep else 0
    pixels = None
    if settings.prompt_mode == "image":
        pixels = _pixels(side(subject, settings.image_size))
    with subject.requests(1, context, written=start, slack=0) as cache:

        def step() -> None:
            for _ in range(prompts):
                features = None if pixels is None else _encoded(shown, pixels)
                for first in range(start, context, settings.chunk_tokens):
                    count = min(settings.chunk_tokens, context - first)
                    chunk = _chunk(ids, first, count, context, window_start, features)
                    logits = subject.model.forward(subject.batch([chunk]), cache)
                _sampled(logits)

        yield step


@contextmanager
def encoder_steps(subject: Subject, settings: Settings) -> Iterator[Step]:
    """`images` images of one size, from pixels to what the language model is given."""
    pixels = _pixels(side(subject, settings.image_size))

    def step() -> None:
        for _ in range(settings.images):
            _encoded(subject.model.vision, pixels)

    yield step


def side(subject: Subject, size: int) -> int:
    """Pixels that the encoder is given of `size`: whole patches. ValueError without an encoder."""
    if subject.spec.vision is None:
        raise ValueError(
            f"{subject.name} has no vision encoder: config.json has no vision_config; "
            "--model_name tandem-tiny has one"
        )
    patch = subject.spec.vision.patch_size
    return -(-size // patch) * patch


def image_positions(subject: Subject, size: int) -> int:
    """That an image of `size` x `size` pixels takes in a prompt. ValueError as side(), and for
    one that takes too many."""
    pixels = side(subject, size)
    assert subject.spec.vision is not None  # side() has said otherwise
    return subject.spec.vision.grid(pixels, pixels).positions


def _chunk(
    ids: list[int],
    first: int,
    count: int,
    length: int,
    window_start: int,
    features_SD: Tensor | None,
) -> Chunk:
    """The image, if there is one, takes the first positions of the prompt."""
    logits: Literal["last", "none"] = "last" if first + count == length else "none"
    if features_SD is None:
        return Chunk(ids, first, count, window_start, logits=logits)
    images = frozenset(range(first, min(first + count, len(features_SD))))
    rows_CD = features_SD.new_zeros(count, features_SD.shape[1])
    rows_CD[: len(images)] = features_SD[first : first + len(images)]
    return Chunk(ids, first, count, window_start, logits, images, rows_CD)


def _encoded(vision: VisionEncoder | None, pixels_hw3: Tensor) -> Tensor:
    assert vision is not None  # side() has said otherwise
    return vision(pixels_hw3.to(vision.device))


def _sampled(logits_RV: Tensor) -> Tensor:
    return logits_RV.cpu().argmax(1)


def _ids(spec: ModelSpec, count: int) -> list[int]:
    pick = random.Random(0)
    return [pick.randrange(3, spec.image_token_id) for _ in range(count)]


def _pixels(size: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (size, size, 3), dtype=torch.uint8, generator=generator)
