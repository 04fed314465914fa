"""What a config.json says: sizes, layer kinds, ids. Values only.

Key names are those of the published file; source: config.json of DeepSeek-V4.1-Flash.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from model.vision_spec import VisionSpec


@dataclass(frozen=True)
class ModelSpec:
    vocab_size: int
    hidden_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    swiglu_limit: float
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Mapping[str, Any]
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    routed_scaling_factor: float
    sliding_window: int
    compress_ratios: tuple[int, ...]  # per layer, then per draft stage
    compress_rope_theta: float
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int
    candidate_topk_blocks: int
    candidate_block_size: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    engram_layer_ids: tuple[int, ...]
    engram_num_embeddings: tuple[int, ...]
    engram_max_ngram_size: int
    engram_vocab_size: int
    engram_n_heads: int
    engram_head_dim: int
    engram_pad_token_id: int
    engram_compressed_vocab_size: int
    num_nextn_predict_layers: int
    dspark_block_size: int
    dspark_noise_token_id: int
    dspark_target_layer_ids: tuple[int, ...]
    dspark_markov_rank: int
    dspark_n_routed_experts: int
    dspark_num_experts_per_tok: int
    max_position_embeddings: int
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    image_token_id: int
    raw: Mapping[str, Any] = field(repr=False, compare=False)

    @classmethod
    def load(cls, folder: str | Path) -> ModelSpec:
        """From `folder`/config.json. Raises ValueError that names what is missing or unknown."""
        path = Path(folder) / "config.json"
        return cls.from_dict(json.loads(path.read_text(encoding="utf-8")))

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> ModelSpec:
        if "text_config" not in raw:
            raise ValueError("config.json has no text_config: not a DeepSeek-V4.1 model")
        known = {**raw["text_config"], "raw": raw}
        for key in ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id"):
            if key in raw:
                known[key] = raw[key]
        missing = sorted(f.name for f in fields(cls) if f.name not in known)
        if missing:
            raise ValueError(f"config.json lacks {', '.join(missing)}")
        values: dict[str, Any] = {f.name: known[f.name] for f in fields(cls)}
        for name, value in values.items():
            if isinstance(value, list):
                values[name] = tuple(value)
        spec = cls(**values)
        spec._check(known)
        return spec

    def _check(self, known: Mapping[str, Any]) -> None:
        """Refuse what the model code does not do, by key, found and expected value."""
        for key, expected in (
            ("scoring_func", "sqrtsoftplus"),
            ("topk_method", "noaux_tc"),
            ("norm_topk_prob", True),
            ("n_shared_experts", 1),
            ("num_key_value_heads", 1),
            ("attention_bias", False),
            ("tie_word_embeddings", False),
            ("hidden_act", "silu"),
        ):
            if known.get(key, expected) != expected:
                raise ValueError(f"{key} is {known[key]!r}; only {expected!r} is supported")
        ratios, layers = self.compress_ratios, self.num_hidden_layers
        if len(ratios) != layers + self.num_nextn_predict_layers:
            raise ValueError("compress_ratios needs one entry per layer and per draft stage")
        if not set(ratios) <= {0, 1, 2} or any(ratios[layers:]):
            raise ValueError("compress_ratios may hold 0, 1 and 2, and 0 for draft stages")
        if not set(self.kv_source_layer_ids) <= set(self.index_source_layer_ids):
            raise ValueError("every layer of kv_source_layer_ids must be an index source too")
        for layer in range(layers):
            if not ratios[layer]:
                continue
            if not self.kv_source_layer_ids or layer < min(self.kv_source_layer_ids):
                raise ValueError(f"layer {layer} has compressed rows but no KV source before it")
            if ratios[layer] != ratios[self.kv_source(layer)]:
                raise ValueError(f"layer {layer} and its KV source have different ratios")
        if len(self.engram_layer_ids) != len(self.engram_num_embeddings):
            raise ValueError("engram_num_embeddings needs one entry per Engram layer")
        _ = self.vision  # raises what is wrong with it

    @property
    def cut_layer(self) -> int:
        """The last KV source: layers after it make no global rows (prefill truncation)."""
        return max(self.kv_source_layer_ids)

    @property
    def draft_stages(self) -> range:
        return range(self.num_nextn_predict_layers)

    @cached_property
    def vision(self) -> VisionSpec | None:
        """What the vision encoder is; None: the model takes no images."""
        raw = self.raw.get("vision_config")
        return None if raw is None else VisionSpec.from_dict(raw)

    def kv_source(self, layer: int) -> int:
        return max(source for source in self.kv_source_layer_ids if source <= layer)

    def index_source(self, layer: int) -> int:
        return max(source for source in self.index_source_layer_ids if source <= layer)

    def rope_frequencies(self, ratio: int) -> list[float]:
        """Radians per position of each rotated pair; layers with compressed rows use YaRN."""
        size = self.qk_rope_head_dim
        if ratio == 0:
            return [self.rope_theta ** (-2.0 * i / size) for i in range(size // 2)]
        base, yarn = self.compress_rope_theta, self.rope_scaling

        def pair_turning(turns: float) -> float:
            wavelength = yarn["original_max_position_embeddings"] / (2 * math.pi * turns)
            return size * math.log(wavelength) / (2 * math.log(base))

        low = max(math.floor(pair_turning(yarn["beta_fast"])), 0)
        high = min(math.ceil(pair_turning(yarn["beta_slow"])), size - 1)
        frequencies = []
        for i in range(size // 2):
            plain = base ** (-2.0 * i / size)
            ramp = min(max((i - low) / max(high - low, 0.001), 0.0), 1.0)
            frequencies.append(plain / yarn["factor"] * ramp + plain * (1 - ramp))
        return frequencies

    @cached_property
    def fingerprint(self) -> str:
        """Equal for equal architectures; part of what two ranks compare when they connect."""
        text = json.dumps(self.raw.get("text_config"), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]
