"""One measured point: what was run, how long it took, and the figures that follow. Pure.

A decode figure is there twice: as if every draft were accepted, 1 + nextn tokens of a
request-step, and at a given acceptance, tau = 1 + acceptance x nextn. Neither says what this
model's drafts are worth: that is the acceptance that a real load has.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from examples.bench.settings import Phase, Settings
from examples.bench.timing import Times


@dataclass(frozen=True)
class Ran:
    """Where and on what."""

    model: str
    weights: str
    accelerator: str
    device: str
    torch: str
    ranks: int  # that measured at the same time, each with `settings`
    world_size: int


def point(
    phase: Phase, settings: Settings, ran: Ran, times: Times, per_image: int
) -> dict[str, Any]:
    """Everything, for JSON; throughput is of one rank, which is one card.

    `per_image`: positions that an image takes; 0 without images.
    """
    match phase:
        case "decode":
            figures = _decode(settings, times.median)
        case "prefill":
            figures = _prefill(settings, times.median)
        case "encoder":
            figures = _encoder(settings, times.median, per_image)
    return {
        "phase": phase,
        "tag": settings.tag,
        **asdict(ran),
        "routing": str(settings.routing),
        "scale": settings.scale,
        "clock": settings.clock,
        "steps": times.steps,
        "step_ms": _ms(times.median),
        "best_ms": _ms(times.best),
        "worst_ms": _ms(times.worst),
        **figures,
    }


def _decode(settings: Settings, step_s: float) -> dict[str, Any]:
    rate = 1 / step_s
    return {
        "requests": settings.requests,
        "context": settings.context,
        "nextn": settings.nextn,
        "acceptance": settings.acceptance,
        "tau": settings.tau,
        "measured": _measured(settings.nextn),
        "full_tokens_per_s_gpu": settings.requests * (1 + settings.nextn) * rate,
        "full_tokens_per_s_user": (1 + settings.nextn) * rate,
        "tokens_per_s_gpu": settings.requests * settings.tau * rate,
        "tokens_per_s_user": settings.tau * rate,
    }


def _prefill(settings: Settings, step_s: float) -> dict[str, Any]:
    whole = max(1, settings.prefill_tokens // settings.context)
    tokens = min(settings.prefill_tokens, whole * settings.context)
    return {
        "batch_tokens": tokens,
        "context": settings.context,
        "chunk_tokens": settings.chunk_tokens,
        "yoco_keep": settings.yoco_keep,
        "prompt_mode": settings.prompt_mode,
        "latency_s": step_s,
        "tokens_per_s_gpu": tokens / step_s,
    }


def _encoder(settings: Settings, step_s: float, per_image: int) -> dict[str, Any]:
    return {
        "images": settings.images,
        "image_size": settings.image_size,
        "positions_an_image": per_image,
        "latency_s": step_s,
        "images_per_s_gpu": settings.images / step_s,
    }


def _measured(nextn: int) -> str:
    if not nextn:
        return "a step of one row a request"
    return f"a step that verifies {1 + nextn} rows a request, and one draft block"


def lines(points: Sequence[Mapping[str, Any]]) -> list[str]:
    """For people: one line a point."""
    return [_LINES[one["phase"]](one) for one in points]


def json_line(told: Mapping[str, Any]) -> str:
    return json.dumps({key: _rounded(value) for key, value in told.items()})


def _decode_line(one: Mapping[str, Any]) -> str:
    said = (
        f"decode   {one['requests']:>5} requests at {one['context']} tokens, nextn {one['nextn']}: "
        f"{one['step_ms']:.2f} ms a step, {one['full_tokens_per_s_gpu']:.1f} tokens/s a GPU, "
        f"{one['full_tokens_per_s_user']:.2f} a user"
    )
    if not one["nextn"]:
        return said
    return said + (
        f" at full acceptance; at {one['acceptance']:g} a draft (tau {one['tau']:g}) "
        f"{one['tokens_per_s_gpu']:.1f} and {one['tokens_per_s_user']:.2f}"
    )


def _prefill_line(one: Mapping[str, Any]) -> str:
    how = one["prompt_mode"] + (f", {one['yoco_keep']} rows kept" if one["yoco_keep"] else "")
    return (
        f"prefill  {one['batch_tokens']:>5} tokens, prompts of {one['context']} ({how}): "
        f"{one['latency_s'] * 1e3:.1f} ms, {one['tokens_per_s_gpu']:.1f} tokens/s a GPU"
    )


def _encoder_line(one: Mapping[str, Any]) -> str:
    return (
        f"encoder  {one['images']:>5} images of {one['image_size']} x {one['image_size']} "
        f"({one['positions_an_image']} positions): {one['latency_s'] * 1e3:.1f} ms, "
        f"{one['images_per_s_gpu']:.2f} images/s a GPU"
    )


_LINES = {"decode": _decode_line, "prefill": _prefill_line, "encoder": _encoder_line}


def _ms(seconds: float) -> float:
    return seconds * 1e3


def _rounded(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value
