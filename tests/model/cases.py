"""Small models and prompts that exercise every mechanism; what parity and golden tests run.

A case is a change to the tiny config, weights from a seed, a prompt, and how it is computed.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from model.options import ModelOptions
from model.spec import ModelSpec

TINY = Path(__file__).resolve().parents[2] / "deploy" / "models" / "tiny" / "config.json"

MICRO: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 128,
    "moe_intermediate_size": 64,
    "num_attention_heads": 4,
    "head_dim": 64,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 64,
    "o_lora_rank": 32,
    "o_groups": 2,
    "index_n_heads": 2,
    "index_head_dim": 32,
    "engram_compressed_vocab_size": 256,
    "n_routed_experts": 6,
    "dspark_n_routed_experts": 3,
    "dspark_noise_token_id": 254,
}
"""The tiny config's structure at a twentieth of its size."""
IMAGE = 253


def config(changes: dict[str, Any]) -> dict[str, Any]:
    """The tiny config with `changes` to its text part."""
    raw = copy.deepcopy(json.loads(TINY.read_text(encoding="utf-8")))
    raw["text_config"] |= changes
    raw["image_token_id"] = IMAGE
    return dict(raw)


def micro_config(**changes: Any) -> dict[str, Any]:
    """The small one, with `changes` to its text part."""
    return config({**MICRO, **changes})


DEFAULT = ModelOptions()


@dataclass(frozen=True)
class Case:
    name: str
    changes: dict[str, Any] = field(default_factory=dict)
    options: ModelOptions = DEFAULT
    length: int = 48  # > 32 compressed rows: both top-k and candidates have to choose
    keep: int | None = None  # rows of the prompt that go on after the cut
    images: tuple[int, ...] = ()
    embedded: bool = False  # image positions have embeddings of their own
    seed: int = 1
    micro: bool = True

    @property
    def raw(self) -> dict[str, Any]:
        return micro_config(**self.changes) if self.micro else config(self.changes)

    @property
    def spec(self) -> ModelSpec:
        return ModelSpec.from_dict(self.raw)

    @property
    def prompt(self) -> list[int]:
        ids = np.random.default_rng(self.seed).integers(3, 250, self.length)
        ids[list(self.images)] = IMAGE
        return [int(token) for token in ids]

    @property
    def embeddings(self) -> np.ndarray[Any, np.dtype[np.float64]] | None:
        """[length, D]"""
        if not self.embedded:
            return None
        noise = np.random.default_rng(self.seed + 1).standard_normal((self.length, 128))
        return noise.astype(np.float32).astype(np.float64)

    @property
    def window_start(self) -> int:
        return 0 if self.keep is None else max(0, self.length - self.keep)


NARROW = {
    "sliding_window": 5,
    "index_topk": 4,
    "candidate_topk_blocks": 2,
    "candidate_block_size": 4,
}
OTHER_LAYERS = {
    "num_hidden_layers": 8,
    "compress_ratios": [0, 2, 2, 2, 1, 1, 1, 1, 0, 0],
    "kv_source_layer_ids": [1, 3, 4],
    "index_source_layer_ids": [1, 3, 4, 6],
    "candidate_source_layer_id": 4,
    "engram_layer_ids": [0, 2],
    "num_nextn_predict_layers": 2,
    "dspark_target_layer_ids": [5, 7],
    "dspark_block_size": 3,
}
OTHER_SIZES = {
    "num_attention_heads": 8,
    "o_groups": 4,
    "hc_mult": 2,
    "hc_sinkhorn_iters": 3,
    "index_n_heads": 3,
    "n_routed_experts": 7,
    "num_experts_per_tok": 3,
    "engram_max_ngram_size": 3,
    "engram_n_heads": 3,
    "swiglu_limit": 2.0,
    "routed_scaling_factor": 2.5,
}
ONE_RATIO = {
    "num_hidden_layers": 5,
    "compress_ratios": [0, 1, 1, 1, 1, 0, 0, 0],
    "kv_source_layer_ids": [1],
    "index_source_layer_ids": [1, 3],
    "candidate_source_layer_id": 1,
    "engram_layer_ids": [1],
    "engram_num_embeddings": [3144],
    "dspark_target_layer_ids": [2, 3, 4],
    "sliding_window": 9,
}

# Seeds for which float32 puts no cached or rounded value on the other side of a rounding step.
CASES = (
    Case("micro"),
    Case("narrow", NARROW, seed=2),
    Case("other_layers", OTHER_LAYERS),
    Case("other_sizes", OTHER_SIZES, length=41),
    Case("one_ratio", ONE_RATIO),
    Case("images", images=(0, 7, 20, 21, 22, 40, 46), embedded=True),
    Case("image_ids", NARROW, images=(3, 30, 31), length=45, seed=5),
    Case("fp8", options=ModelOptions(activations="fp8"), length=40, seed=5),
    Case("fp8_wo_a", OTHER_LAYERS, ModelOptions(activations="fp8", wo_a="fp8"), 40, seed=2),
    Case("mask", options=ModelOptions(truncation="mask"), keep=21),
    Case("compact", options=ModelOptions(truncation="compact"), keep=21, images=(30, 41)),
    Case(
        "compact_full",
        NARROW,
        ModelOptions(truncation="compact", cut_window="full"),
        keep=8,
        seed=5,
    ),
    Case("short_keep", options=ModelOptions(truncation="compact"), keep=3),
)
TINY_CASE = Case("tiny", micro=False, length=75)
BY_NAME = {case.name: case for case in (*CASES, TINY_CASE)}
