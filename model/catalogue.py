"""Every tensor that a checkpoint of this architecture holds: logical names, kinds and shapes.

Derived from the config alone; nothing is read and nothing allocated. A quantised matrix is one
logical tensor, named without the `.weight` and `.scale` of the two tensors that store it.
Source: tensor names and shapes of the published DeepSeek-V4.1-Flash checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from model.spec import ModelSpec
from model.vision_spec import VisionSpec

Kind = Literal["bf16", "f32", "fp8", "fp8_rows", "fp4"]
"""fp8: e4m3, a ue8m0 scale per 32 x 32 block. fp8_rows: e4m3, a scale per 32 values of a row.
fp4: two e2m1 a byte, a scale per 32 values of a row. Matrices are [out, in]."""

ITEM_BYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1}
"""Bytes of one item, by safetensors type."""


class StoredSpec(NamedTuple):
    """What a file says of one stored tensor: safetensors type and shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return ITEM_BYTES[self.dtype] * math.prod(self.shape)


@dataclass(frozen=True)
class TensorSpec:
    kind: Kind
    shape: tuple[int, ...]

    @property
    def parameters(self) -> int:
        return math.prod(self.shape)

    def stored(self, name: str) -> dict[str, StoredSpec]:
        """The tensors that store this one in a file, by name: one, or a weight and its scale."""
        match self.kind:
            case "bf16" | "f32":
                return {name: StoredSpec(self.kind.upper(), self.shape)}
            case "fp8":
                weight, scale = StoredSpec("F8_E4M3", self.shape), tuple(map(_groups, self.shape))
            case "fp8_rows":
                out, size = self.shape
                weight, scale = StoredSpec("F8_E4M3", self.shape), (out, _groups(size))
            case "fp4":
                out, size = self.shape
                weight, scale = StoredSpec("I8", (out, size // 2)), (out, _groups(size))
        return {f"{name}.weight": weight, f"{name}.scale": StoredSpec("F8_E8M0", scale)}


def _groups(size: int) -> int:
    return -(-size // 32)


def _bf16(*shape: int) -> TensorSpec:
    return TensorSpec("bf16", shape)


def _f32(*shape: int) -> TensorSpec:
    return TensorSpec("f32", shape)


def _fp8(out: int, size: int) -> TensorSpec:
    return TensorSpec("fp8", (out, size))


def catalogue(spec: ModelSpec, vision: bool = True) -> dict[str, TensorSpec]:
    """All tensors by logical name; without `vision`, or a vision_config, those of text only."""
    width = spec.hidden_size
    tensors = {
        "embed.weight": _bf16(spec.vocab_size, width),
        "head.weight": _bf16(spec.vocab_size, width),
        "norm.weight": _bf16(width),
    }
    for layer in range(spec.num_hidden_layers):
        tensors |= _named(f"layers.{layer}.", _layer(spec, layer))
    for stage in spec.draft_stages:
        tensors |= _named(f"mtp.{stage}.", _draft_stage(spec, stage))
    if vision and spec.vision:
        tensors |= _vision(spec.vision, width)
    return tensors


def is_vision(name: str) -> bool:
    """Whether a tensor belongs to the group that a text-only checkpoint leaves out as a whole."""
    return name.startswith(("vision.", "aligner.", "image_"))


def _named(prefix: str, tensors: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    return {prefix + name: tensor for name, tensor in tensors.items()}


def _layer(spec: ModelSpec, layer: int) -> dict[str, TensorSpec]:
    tensors = _block(spec, spec.n_routed_experts)
    if layer in spec.kv_source_layer_ids:
        tensors |= _compressor(spec, spec.compress_ratios[layer])
    if layer in spec.index_source_layer_ids:
        queries = spec.index_n_heads * spec.index_head_dim
        tensors["attn.indexer.wq_b"] = _fp8(queries, spec.q_lora_rank)
        tensors["attn.indexer.weights_proj.weight"] = _bf16(spec.index_n_heads, spec.hidden_size)
    if layer in spec.engram_layer_ids:
        rows = spec.engram_num_embeddings[spec.engram_layer_ids.index(layer)]
        tensors |= _named("engram.", _engram(spec, rows))
    return tensors


def _block(spec: ModelSpec, experts: int) -> dict[str, TensorSpec]:
    """What every layer and every draft stage has: attention, experts, hyper-connections."""
    width, heads = spec.hidden_size, spec.num_attention_heads * spec.head_dim
    grouped, mixes = spec.o_groups * spec.o_lora_rank, spec.hc_mult * (spec.hc_mult + 2)
    tensors = {
        "attn_norm.weight": _bf16(width),
        "attn.wq_a": _fp8(spec.q_lora_rank, width),
        "attn.q_norm.weight": _bf16(spec.q_lora_rank),
        "attn.wq_b": _fp8(heads, spec.q_lora_rank),
        "attn.wkv": _fp8(spec.head_dim, width),
        "attn.kv_norm.weight": _bf16(spec.head_dim),
        "attn.attn_sink": _f32(spec.num_attention_heads),
        "attn.wo_a": _fp8(grouped, heads // spec.o_groups),
        "attn.wo_b": _fp8(width, grouped),
        "ffn_norm.weight": _bf16(width),
        "ffn.gate.weight": _bf16(experts, width),
        "ffn.gate.bias": _f32(experts),
        "ffn.gate.bias_vl": _f32(experts),
    }
    for sublayer in ("attn", "ffn"):
        tensors[f"hc_{sublayer}_fn"] = _f32(mixes, spec.hc_mult * width)
        tensors[f"hc_{sublayer}_base"] = _f32(mixes)
        tensors[f"hc_{sublayer}_scale"] = _f32(3)
    tensors |= _named("ffn.shared_experts.", _expert(spec, "fp8"))
    for expert in range(experts):
        tensors |= _named(f"ffn.experts.{expert}.", _expert(spec, "fp4"))
    return tensors


def _expert(spec: ModelSpec, kind: Kind) -> dict[str, TensorSpec]:
    up = TensorSpec(kind, (spec.moe_intermediate_size, spec.hidden_size))
    down = TensorSpec(kind, (spec.hidden_size, spec.moe_intermediate_size))
    return {"w1": up, "w2": down, "w3": up}


def _compressor(spec: ModelSpec, ratio: int) -> dict[str, TensorSpec]:
    """A KV source makes the global rows of its group of layers, and their index keys."""
    tensors = {
        "attn.compressor.wkv.weight": _bf16(spec.head_dim, spec.hidden_size),
        "attn.compressor.norm.weight": _bf16(spec.head_dim),
        "attn.indexer.wk.weight": _bf16(spec.index_head_dim, spec.head_dim),
        "attn.indexer.k_norm.weight": _bf16(spec.index_head_dim),
    }
    if ratio > 1:
        tensors["attn.compressor.wgate.weight"] = _bf16(spec.head_dim, spec.hidden_size)
    return tensors


def _engram(spec: ModelSpec, rows: int) -> dict[str, TensorSpec]:
    read = (spec.engram_max_ngram_size - 1) * spec.engram_n_heads * spec.engram_head_dim
    return {
        "embed": TensorSpec("fp8_rows", (rows, spec.engram_head_dim)),
        "wkv": _fp8((spec.hc_mult + 1) * spec.hidden_size, read),  # a key per stream, one value
        "q_weight": _bf16(spec.hc_mult, spec.hidden_size),
        "k_weight": _bf16(spec.hc_mult, spec.hidden_size),
    }


def _draft_stage(spec: ModelSpec, stage: int) -> dict[str, TensorSpec]:
    width, rank = spec.hidden_size, spec.dspark_markov_rank
    tensors = _block(spec, spec.dspark_n_routed_experts)
    if stage == spec.draft_stages[0]:
        tensors["main_proj"] = _fp8(width, len(spec.dspark_target_layer_ids) * width)
        tensors["main_norm.weight"] = _bf16(width)
    if stage == spec.draft_stages[-1]:
        tensors["norm.weight"] = _bf16(width)
        tensors["markov_head.embed.weight"] = _bf16(spec.vocab_size, rank)
        tensors["markov_head.head.weight"] = _bf16(spec.vocab_size, rank)
        tensors["confidence_head.proj.weight"] = _bf16(1, width + rank)
    return tensors


def _vision(spec: VisionSpec, text_width: int) -> dict[str, TensorSpec]:
    width, inner = spec.hidden_size, spec.intermediate_size
    tensors = {
        "vision.patch_embed.proj.weight": _bf16(width, 3 * spec.patch_size**2),
        "vision.patch_embed.proj.bias": _bf16(width),
    }
    for block in range(spec.num_hidden_layers):
        tensors |= _named(
            f"vision.blocks.{block}.",
            {
                "norm1.weight": _bf16(width),
                "attn.wqkv.weight": _bf16(3 * width, width),
                "attn.wqkv.bias": _bf16(3 * width),
                "attn.wo.weight": _bf16(width, width),
                "attn.wo.bias": _bf16(width),
                "norm2.weight": _bf16(width),
                "mlp.w1.weight": _bf16(2 * inner, width),  # gate, then up
                "mlp.w2.weight": _bf16(width, inner),
            },
        )
    tensors["vision.norm.weight"] = _bf16(width)
    tensors["aligner.w1.weight"] = _bf16(text_width, width * spec.downsample_ratio**2)
    tensors["aligner.w1.bias"] = _bf16(text_width)
    tensors["aligner.w2.weight"] = _bf16(text_width, text_width)
    tensors["aligner.w2.bias"] = _bf16(text_width)
    return tensors | {f"image_{part}": _bf16(text_width) for part in ("start", "end", "newline")}
