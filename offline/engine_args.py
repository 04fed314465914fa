"""From the arguments of an LLM to the configuration of its ranks. Pure.

The names and most defaults are DeepInfer's; docs/guide.md says where they mean something else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from cluster.config import ClusterConfig, load_config, parse_config
from kv_transfer.layout import Layout
from model.spec import ModelSpec
from model.state import state_fields
from offline.parallel_sizes import ParallelSizes, parallel_sizes

Carrier = Literal["threads", "ray"]
"""What ranks are: threads of this process on one device, or Ray actors with a device each."""

CPU_STATE_BYTES = 128 << 20  # most that the blocks of one rank take on a CPU
DEFAULT_LENGTH = 4096  # positions of a request, unless the model has fewer
CHUNK_TOKENS = {"cpu": 128}  # a step of a prompt; longer ones gain nothing on a CPU
GPU_CHUNK_TOKENS = 8192
START_S = 1800.0  # for ranks to load
NEVER_S = 1e6  # a batch that waits for its turn is no fault

# DeepInfer's arguments that ask for what is always so here, or for nothing
_NO_EFFECT = (
    *("trust_remote_code", "revision", "tokenizer_revision", "disable_log_stats", "ignore_len"),
    *("chunked_prefill", "stop_preempted_request", "lookahead_tokens"),
)


@dataclass(frozen=True)
class EngineArgs:
    """ValueError for what cannot be, in one line."""

    served_model_name: str = "deepinfer-model"
    load_format: Literal["auto", "dummy"] = "auto"  # dummy: random weights
    seed: int = 0  # of random weights
    max_model_len: int | None = None
    expert_parallel_size: int = 1
    data_parallel_size: int = 0  # 0: derived
    context_parallel_size: int = 1
    gpu_memory_utilization: float = 0.9
    max_num_batched_tokens: int | None = None
    max_num_seqs: int = 256  # of each rank
    tokens_per_block: int = -1  # -1: 16, or 128 on a GPU
    disaggregated: bool = False  # prompts on ranks of their own
    prefill_groups: int = 1  # where disaggregated; each as large as a group that decodes
    ranks_as: Carrier = "threads"
    accelerator: Literal["auto", "cpu", "nvidia", "ascend"] = "auto"
    disable_eplb: bool = False

    def __post_init__(self) -> None:
        if self.load_format not in ("auto", "dummy"):
            raise ValueError(f"load_format is {self.load_format!r}; it must be auto or dummy")
        if self.ranks_as not in ("threads", "ray"):
            raise ValueError(f"ranks_as is {self.ranks_as!r}; it must be threads or ray")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(
                f"gpu_memory_utilization must be in (0, 1], not {self.gpu_memory_utilization}"
            )
        for name in ("max_num_seqs", "prefill_groups"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, not {getattr(self, name)}")
        _ = self.sizes

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> EngineArgs:
        """TypeError for a name that is none of these, with the nearest."""
        known = {field.name for field in fields(cls)}
        told = {key: value for key, value in arguments.items() if key not in _NO_EFFECT}
        for key in told:
            if key not in known:
                near = get_close_matches(key, [*known, *_NO_EFFECT], n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise TypeError(f"LLM has no argument {key!r}{hint}")
        return cls(**told)

    @property
    def sizes(self) -> ParallelSizes:
        return parallel_sizes(
            ep=self.expert_parallel_size,
            dp=self.data_parallel_size,
            cp=self.context_parallel_size,
        )


def engine_config(
    folder: Path,
    args: EngineArgs,
    *,
    device: Literal["cpu", "nvidia", "ascend"],
    state_bytes: int,
    environ: Mapping[str, str] | None = None,
) -> ClusterConfig:
    """What the environment says, and over it what the arguments say.

    `state_bytes`: most that one rank's blocks may take. ValueError for lengths that the model
    does not have, or that do not fit.
    """
    spec = ModelSpec.load(folder)
    length = args.max_model_len or min(DEFAULT_LENGTH, spec.max_position_embeddings)
    if length > spec.max_position_embeddings:
        raise ValueError(
            f"max_model_len {length}: {folder.name} has {spec.max_position_embeddings} positions"
        )
    block_tokens = _block_tokens(args, device)
    num_blocks = _num_blocks(spec, block_tokens, length, args.max_num_seqs, state_bytes)
    engine = {
        "max_length": length,
        "num_blocks": num_blocks,
        "num_slots": args.max_num_seqs,
        "max_rows": args.max_num_seqs,
        "max_waiting": 1 << 30,
        "chunk_tokens": args.max_num_batched_tokens
        or CHUNK_TOKENS.get(device, max(length, GPU_CHUNK_TOKENS)),
    }
    sizes, apart = args.sizes, args.disaggregated
    pool = {
        "accelerator": device,
        "gpus": float(device != "cpu"),
        "engine": engine,
        "ranks": sizes.group_ranks,
    }
    prefill = {"groups": args.prefill_groups if apart else 0, "cp": sizes.cp, "vision": True}
    decode = {"groups": sizes.groups, "cp": 1 if apart else sizes.cp, "vision": not apart}
    transport = "local" if args.ranks_as == "threads" else "nixl"
    overlay: dict[str, Any] = {
        "name": "offline",
        "model": {
            "path": str(folder),
            "served_name": args.served_model_name,
            "weights": "random" if args.load_format == "dummy" else "checkpoint",
            "seed": args.seed,
            "block_tokens": block_tokens,
        },
        "prefill": pool | prefill,
        "decode": pool | decode,
        "router": {"colocated": not apart, "report_s": 0.2, "retry_after_s": 0.1},
        "experts": {"disable_eplb": args.disable_eplb},
        "transfer": {"transport": transport},
        "generation": {
            "max_attempts": 1,
            "reserve_timeout_s": NEVER_S,
            "recovery_wait_s": 10.0,
            "step_timeout_s": NEVER_S,
        },
        "wire": {"t_detect_s": 60.0},
        "life": {"start_timeout_s": START_S},
    }
    return parse_config(_over(load_config(None, (), environ).model_dump(), overlay))


def _block_tokens(args: EngineArgs, device: str) -> int:
    if args.tokens_per_block != -1:
        return args.tokens_per_block
    return 16 if device == "cpu" else 128


def _num_blocks(spec: ModelSpec, block_tokens: int, length: int, requests: int, nbytes: int) -> int:
    """Enough for all requests at their full length, or what memory allows."""
    block_bytes = Layout(state_fields(spec), block_tokens).block_bytes
    of_one = -(-length // block_tokens)
    affordable = nbytes // block_bytes
    if affordable < of_one:
        raise ValueError(
            f"max_model_len {length} takes {of_one * block_bytes} bytes of state a request; "
            f"{nbytes} are there: lower it, or raise gpu_memory_utilization"
        )
    return min(of_one * requests, affordable)


def _over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = _over(old, value) if isinstance(old, Mapping) else value
    return merged
