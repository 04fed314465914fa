"""The one configuration tree: defaults, a TOML file, environment, flags. Frozen; goes in whole.

Each component takes its own section. What is learned at run time is never written back.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from cluster.environment import given, toml_value
from cluster.errors import StartupError


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelSection(Section):
    """Which model: a folder with config.json, tokenizer.json and, unless random, the weights."""

    path: str = "deploy/models/tiny"
    served_name: str = "tandem-tiny"
    weights: Literal["checkpoint", "random"] = "random"
    seed: int = 0  # of random weights
    block_tokens: int = Field(default=16, ge=2)  # even: no compressor pair straddles a block
    # Prefill truncation: rows of a prompt before its last `keep_tokens` end at the last KV source
    # (compact) or are unseen behind it (mask, to check compact). About half a prefill; an
    # approximation that V4.1 was trained with.
    truncation: Literal["off", "mask", "compact"] = "off"
    keep_tokens: int = Field(default=140, ge=1)
    # What ranks compute in. "bfloat16": on weights and request state as they are stored, NVIDIA
    # GPUs only. "float32": on their values, anywhere. "auto": bfloat16 where it can be.
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"

    @property
    def kept(self) -> int:
        """Rows at a prompt's end that go through all layers; 0: all do."""
        return 0 if self.truncation == "off" else self.keep_tokens

    @model_validator(mode="after")
    def _even(self) -> ModelSection:
        if self.block_tokens % 2:
            raise ValueError("block_tokens must be even: ratio-2 rows pair two positions")
        return self


class EngineSection(Section):
    """Sizes of one rank's engine and its memory."""

    threads: int = Field(default=1, ge=1)  # 1: with more, CPU results depend on the batch
    max_length: int = Field(default=2048, ge=2)  # longest prompt + output, in tokens
    num_blocks: int = Field(default=512, ge=1)
    num_slots: int = Field(default=16, ge=1)  # requests that can hold state at once
    chunk_tokens: int = Field(default=128, ge=1)  # prompt tokens of one step
    # The same, of a step that running answers share: 32 beside 8 answers take 1.5 times as long as
    # the answers alone, 128 2.2 times (tiny model, one core).
    beside_tokens: int = Field(default=32, ge=1)
    max_rows: int = Field(default=64, ge=1)  # decode rows of one step
    max_waiting: int = Field(default=1024, ge=1)  # requests that wait for blocks; more are refused
    # Part of max_tokens for which a decode rank holds memory from the start. 1: no answer is ever
    # preempted, and state is small enough for that (890 B a token). Less: more answers fit that
    # end early; when blocks run out, the youngest is preempted and prefilled again.
    output_reserved: float = Field(default=1.0, ge=0, le=1)
    # "auto": answers' rows are replayed as CUDA graphs where the model works in place (model.dtype)
    # on an NVIDIA GPU, and the rank has all its experts. "off": launched, as everywhere else.
    graphs: Literal["auto", "off"] = "auto"
    graph_interval: int = Field(default=8, ge=1)  # rows of graphs are multiples of it, or fewer
    # There too, the next step of answers is begun before the tokens of this one are known.
    run_ahead: bool = True


class PoolSection(Section):
    """One pool: how many groups, ranks in each, and what a rank asks of Ray."""

    groups: int = Field(default=1, ge=0)
    ranks: int = Field(default=1, ge=1)
    # Ranks of a group that share its experts: all (0), or none (1: each holds the whole model).
    # Attention is data-parallel either way, so a group of N ranks is ep N x dp N.
    ep: int = Field(default=0, ge=0)
    # Ranks that run each prompt together (context parallelism). The first of each so many takes
    # requests, the others compute with it; so a group of N ranks is dp N / cp.
    cp: int = Field(default=1, ge=1)
    # Copies of busy experts, a layer: at least so many, and more until all divide by the ranks
    extra_experts: int = Field(default=0, ge=0)
    rank: str  # "package.module:Class", imported in the rank's process
    cpus: float = Field(default=0.25, ge=0)
    gpus: float = Field(default=0.0, ge=0)
    # Load the vision encoder, if the model has one. Who runs a prompt needs it for its images.
    vision: bool = False
    # "auto": what the rank sees of the GPUs that it is given, else the CPU
    accelerator: Literal["auto", "cpu", "nvidia", "ascend"] = "auto"
    engine: EngineSection = EngineSection()

    @property
    def shares_experts(self) -> bool:
        """Whether the ranks of a group make their steps together."""
        return self.ranks > 1 and self.ep != 1

    @model_validator(mode="after")
    def _whole_groups(self) -> PoolSection:
        if self.ep not in (0, 1, self.ranks):
            raise ValueError(
                f"ep {self.ep} with ranks {self.ranks}: a group shares its experts as a whole; for "
                f"{self.ranks} ranks a group in parts of {self.ep} have more groups of {self.ep} "
                "ranks each"
            )
        if self.ranks % self.cp:
            raise ValueError(f"cp {self.cp} does not divide the {self.ranks} ranks of a group")
        if self.cp > 1 and not self.shares_experts:
            raise ValueError(f"cp {self.cp} needs ranks that step together: ep must not be 1")
        return self


class TransferSection(Section):
    # "auto": from blocks to blocks where two GPUs can reach each other's memory, with a warning and
    # packed where not; packed between CPUs. The other two allow one way only.
    path: Literal["auto", "direct", "packed"] = "auto"
    transport: Literal["nixl", "local"] = "nixl"  # of the packed path; local: within one process
    ring_bytes: int = Field(default=16 << 20, ge=4096)
    cell_bytes: int = Field(default=512 << 10, ge=1024)
    cells: int = Field(default=4, ge=1)  # of one reservation
    write_bytes: int = Field(default=1 << 20, ge=4096)  # one write blocks its thread; keep it short


class WireSection(Section):
    host: str = "127.0.0.1"  # sockets bind to it and announce it; "auto": as Ray's nodes know it
    heartbeat_s: float = Field(default=0.5, gt=0)
    t_detect_s: float = Field(default=5.0, gt=0)  # silence that means a peer is lost
    connect_timeout_s: float = Field(default=5.0, gt=0)
    max_frame_bytes: int = Field(default=64 << 20, ge=1 << 20)
    cut_bytes: int = Field(default=1 << 20, ge=1024)  # larger frames are sent in pieces
    queue_messages: int = Field(default=4096, ge=1)  # unread ones that break a stream off


class RouterSection(Section):
    report_s: float = Field(default=0.5, gt=0)  # how often a rank reports its load
    retry_after_s: float = Field(default=1.0, gt=0)
    colocated: bool = False  # send whole requests to decode ranks
    # Prompts of at most so many tokens are run by a decode rank that has room, without a handoff.
    # 0: none. What a handoff costs against a few rows more in a step depends on the hardware.
    local_prefill_tokens: int = Field(default=0, ge=0)


class ExpertsSection(Section):
    """Which rank of a group holds which experts: measured, and changed while requests run."""

    disable_eplb: bool = False  # every group keeps the placement that it has
    report_s: float = Field(default=5.0, gt=0)  # how often a rank reports its experts' tokens
    window_steps: int = Field(default=1000, ge=1)  # of a group, between two decisions
    windows: int = Field(default=12, ge=1)  # that a decision looks back
    most_moved_share: float = Field(default=0.09, ge=0, le=1)  # of a group's slots, at one time
    answer_timeout_s: float = Field(default=60.0, gt=0)  # after it a given placement is given up
    # The gate: tokens saved on the busiest rank against weights to fetch. One token through one
    # expert is 71 MFLOP at 400 TFLOP/s, and 15.5 KB there and back; one mxfp4 expert 18.8 MB.
    seconds_a_token: float = Field(default=0.5e-6, ge=0)
    expert_bytes: int = Field(default=18_800_640, ge=1)
    bytes_a_second: float = Field(default=45e9, gt=0)  # of one rank's link
    placement_file: str = ""  # on the router's machine: given to every group once, and kept
    save_file: str = ""  # there too: what groups have, and what new groups begin with
    show_detail: bool = False  # log a table of the layers at each decision


class GenerationSection(Section):
    max_attempts: int = Field(default=3, ge=1)
    reserve_timeout_s: float = Field(default=30.0, gt=0)
    recovery_wait_s: float = Field(default=60.0, ge=0)  # how long a request outlives a whole pool
    new_request_wait_s: float = Field(default=3.0, ge=0)  # the same of one that nobody has begun
    step_timeout_s: float = Field(default=120.0, gt=0)  # longest silence of a live worker


class HttpSection(Section):
    host: str = "127.0.0.1"
    port: int = Field(default=8100, ge=1, le=65535)
    proxy_port: int = Field(default=0, ge=0, le=65535)  # of Serve's own proxy; 0: no proxy
    max_body_bytes: int = Field(default=4 << 20, ge=1024)
    head_timeout_s: float = Field(default=30.0, gt=0)  # for request line and headers
    body_timeout_s: float = Field(default=30.0, gt=0)
    max_concurrent: int = Field(default=256, ge=1)  # answers that one server makes at a time
    stall_timeout_s: float = Field(default=60.0, gt=0)  # a stream that nobody reads any more
    keep_alive_s: float = Field(default=75.0, gt=0)  # longer than clients keep idle connections
    api_keys_file: str = ""  # one key a line, on the ingress's machine; "": no keys are asked for


class ImagesSection(Section):
    """What of images is taken; how large one is to the model, its own config.json says."""

    max_images: int = Field(default=8, ge=0)  # of one request
    max_file_bytes: int = Field(default=16 << 20, ge=1024)
    max_pixels: int = Field(default=36_000_000, ge=1)  # of a file, before anything is decoded
    request_bytes: int = Field(default=48 << 20, ge=1024)  # one request's pixels as the model's
    held_bytes: int = Field(default=1 << 30, ge=1024)  # of all requests of one server or rank


class LifeSection(Section):
    start_timeout_s: float = Field(default=60.0, gt=0)
    drain_timeout_s: float = Field(default=30.0, ge=0)
    health_period_s: float = Field(default=1.0, gt=0)
    stuck_after_s: float = Field(default=60.0, gt=0)


class LogSection(Section):
    level: Literal["debug", "info", "warning", "error"] = "info"  # of our own modules


class AutoscalePool(Section):
    """How many groups one pool may have, and what one group shall carry; 0: does not count."""

    min_groups: int = Field(default=1, ge=1)
    max_groups: int = Field(default=4, ge=1)
    requests: float = Field(default=0.0, ge=0)  # running or waiting, a group
    waiting_tokens: float = Field(default=0.0, ge=0)  # not yet computed, a group
    used_blocks: float = Field(default=0.0, ge=0, le=1)  # fraction of a group's blocks

    @model_validator(mode="after")
    def _some_range(self) -> AutoscalePool:
        if self.max_groups < self.min_groups:
            raise ValueError(f"max_groups {self.max_groups} is less than min_groups")
        return self


class AutoscaleSection(Section):
    """Serve decides how many groups there are. Then nobody else can: `tandem scale` refuses."""

    enabled: bool = False
    up_delay_s: float = Field(default=10.0, ge=0)  # how long it must be wanted
    down_delay_s: float = Field(default=120.0, ge=0)
    slack: float = Field(default=0.2, ge=0, lt=1)  # below the targets, before a group is dropped
    prefill: AutoscalePool = AutoscalePool(waiting_tokens=8192)
    decode: AutoscalePool = AutoscalePool(requests=32, used_blocks=0.8)


class ClusterConfig(Section):
    name: str = Field(default="tandem", pattern=r"^[a-z][a-z0-9_-]{0,31}$")
    model: ModelSection = ModelSection()
    prefill: PoolSection = PoolSection(rank="prefill_worker.worker:PrefillRank", vision=True)
    decode: PoolSection = PoolSection(rank="decode_worker.worker:DecodeRank")
    transfer: TransferSection = TransferSection()
    wire: WireSection = WireSection()
    router: RouterSection = RouterSection()
    experts: ExpertsSection = ExpertsSection()
    generation: GenerationSection = GenerationSection()
    http: HttpSection = HttpSection()
    images: ImagesSection = ImagesSection()
    life: LifeSection = LifeSection()
    log: LogSection = LogSection()
    autoscale: AutoscaleSection = AutoscaleSection()

    @model_validator(mode="after")
    def _frame_holds_the_images(self) -> ClusterConfig:
        if self.images.request_bytes >= self.wire.max_frame_bytes:
            raise ValueError(
                f"images.request_bytes {self.images.request_bytes} does not fit a frame with its "
                f"prompt: wire.max_frame_bytes is {self.wire.max_frame_bytes}"
            )
        return self

    @model_validator(mode="after")
    def _state_reaches_who_continues(self) -> ClusterConfig:
        if self.decode.cp > 1 and not self.router.colocated:
            raise ValueError(
                f"decode.cp {self.decode.cp}: state arrives at one rank, and the others would lack "
                "it; only a colocated decode pool (router.colocated) can run prompts together"
            )
        return self

    @model_validator(mode="after")
    def _ring_holds_a_reservation(self) -> ClusterConfig:
        one = self.transfer.cell_bytes * self.transfer.cells
        if one > self.transfer.ring_bytes:
            raise ValueError(
                f"transfer.ring_bytes {self.transfer.ring_bytes} is less than one reservation "
                f"needs: cell_bytes x cells = {one}"
            )
        return self


def load_config(
    path: str | Path | None,
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> ClusterConfig:
    """A TOML file, then what the environment says (cluster/environment.py; default: this
    process's), then `section.key=value` overrides (values in TOML syntax, or bare words).

    Raises StartupError that names the key, the value and what was expected.
    """
    tree: dict[str, Any] = {}
    if path is not None:
        try:
            tree = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, tomllib.TOMLDecodeError) as error:
            raise StartupError(f"cannot read the configuration {path}: {error}") from error
    for one in given(os.environ if environ is None else environ, setting_names()):
        _put(tree, one.setting, one.value, said=one.variable)
    for override in overrides:
        name, separator, text = override.partition("=")
        if not separator or not all(name.split(".")):
            raise StartupError(f"{override!r} is not section.key=value")
        _put(tree, name.strip(), toml_value(text), said=repr(override))
    return parse_config(tree)


def setting_names(section: type[BaseModel] = ClusterConfig, below: str = "") -> tuple[str, ...]:
    """Every setting as `section.key`, in the order of the tree."""
    names: list[str] = []
    for key, field in section.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            names += setting_names(inner, f"{below}{key}.")
        else:
            names.append(f"{below}{key}")
    return tuple(names)


def parse_config(tree: Mapping[str, Any]) -> ClusterConfig:
    defaults = ClusterConfig().model_dump()
    try:
        return ClusterConfig.model_validate(_merge(defaults, tree))
    except ValidationError as error:
        problems = [
            f"{'.'.join(str(part) for part in problem['loc']) or 'configuration'}: {problem['msg']}"
            for problem in error.errors()
        ]
        raise StartupError("configuration: " + "; ".join(problems)) from error


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        merged[key] = _merge(old, value) if both else value  # type: ignore[arg-type]
    return merged


def _put(tree: dict[str, Any], name: str, value: Any, *, said: str) -> None:
    *sections, key = name.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
        if not isinstance(tree, dict):
            raise StartupError(f"{said}: {section} is not a section")
    tree[key] = value
