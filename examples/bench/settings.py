"""What one run of the benchmark measures. Values, and what the environment says of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from cluster.environment_table import BY_NAME
from examples.bench.routing import Routing
from examples.bench.timing import Clock

Phase = Literal["decode", "prefill", "encoder"]
PromptMode = Literal["text", "image"]


@dataclass(frozen=True)
class Settings:
    """Lengths are in tokens, as they are run: already divided by `scale`."""

    tag: str
    requests: int  # of each rank, in a decode step
    context: int  # tokens of each request that the state holds before the step
    nextn: int  # draft tokens of each request
    acceptance: float  # of a draft token, for the converted figures
    prefill_tokens: int  # of a batch
    chunk_tokens: int  # of a step of the batch
    yoco_keep: int  # rows that a truncated prefill keeps; 0: no truncation
    prompt_mode: PromptMode
    image_size: int  # pixels of a side
    images: int  # of a batch of the encoder
    routing: Routing
    warmup: int
    steps: int
    scale: int
    clock: Clock = "wall"
    seed: int = 0

    @property
    def tau(self) -> float:
        """Tokens that a request gets of a step, at that acceptance."""
        return 1 + self.acceptance * self.nextn


def from_environment(environ: Mapping[str, str], name: str, default: int) -> int:
    """A DEEPINFER_* number by the table's rules. StartupError for another text."""
    text = environ.get(name)
    return default if text is None else int(BY_NAME[name].parse(text))


def routing_of(
    kind: str | None, ratio: float | None, groups: int, environ: Mapping[str, str]
) -> Routing:
    """What is asked for, else what DEEPINFER_FORCE_* say, else what the gate says."""
    forced = environ.get("DEEPINFER_FORCE_IMBALANCE_RATIO")
    if kind is None and ratio is None and forced is not None:
        ratio = float(BY_NAME["DEEPINFER_FORCE_IMBALANCE_RATIO"].parse(forced)) or None
    balance = environ.get("DEEPINFER_FORCE_LOAD_BALANCE", "")
    if kind is None and ratio is None and BY_NAME["DEEPINFER_FORCE_LOAD_BALANCE"].parse(balance):
        kind = "balanced"
    if ratio is not None and kind not in (None, "skewed"):
        raise ValueError(f"--imbalance {ratio} is for --routing skewed, not {kind}")
    if ratio is not None or kind == "skewed":
        return Routing("skewed", 1.8 if ratio is None else ratio, groups)
    return Routing("balanced" if kind == "balanced" else "natural")
