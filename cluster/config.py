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


class PoolSection(Section):
    """One pool: how many groups, ranks in each, and what a rank asks of Ray."""

    groups: int = Field(default=1, ge=0)
    ranks: int = Field(default=1, ge=1)
    rank: str  # "package.module:Class", imported in the rank's process
    cpus: float = Field(default=0.25, ge=0)
    gpus: float = Field(default=0.0, ge=0)
    # "auto": what the rank sees of the GPUs that it is given, else the CPU
    accelerator: Literal["auto", "cpu", "nvidia", "ascend"] = "auto"
    engine: EngineSection = EngineSection()


class TransferSection(Section):
    transport: Literal["auto", "nixl", "host", "local"] = "nixl"
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


class GenerationSection(Section):
    max_attempts: int = Field(default=3, ge=1)
    reserve_timeout_s: float = Field(default=30.0, gt=0)
    recovery_wait_s: float = Field(default=60.0, ge=0)  # how long a request outlives a whole pool
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
    prefill: PoolSection = PoolSection(rank="prefill_worker.worker:PrefillRank")
    decode: PoolSection = PoolSection(rank="decode_worker.worker:DecodeRank")
    transfer: TransferSection = TransferSection()
    wire: WireSection = WireSection()
    router: RouterSection = RouterSection()
    generation: GenerationSection = GenerationSection()
    http: HttpSection = HttpSection()
    life: LifeSection = LifeSection()
    log: LogSection = LogSection()
    autoscale: AutoscaleSection = AutoscaleSection()

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
