"""Four layers that stand for a real model of forty: its shapes, fewer of everything else.

Layer 0 sees its window alone; 1 makes ratio-2 rows, chooses among them, and has Engram before it;
2 makes ratio-1 rows, chooses, and is the candidate source and the cut; 3 reuses what 2 chose.
Half of the layers lie before the cut, as in the real model. Knows nothing of weights or devices.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from model.engram import engram_hashes
from model.spec import ModelSpec

REAL = Path(__file__).resolve().parents[2] / "deploy" / "models" / "deepseek-v41-flash"

_LAYERS: dict[str, Any] = {
    "num_hidden_layers": 4,
    "compress_ratios": [0, 2, 1, 1, 0],
    "kv_source_layer_ids": [1, 2],
    "index_source_layer_ids": [1, 2],
    "candidate_source_layer_id": 2,
    "engram_layer_ids": [1],
    "num_nextn_predict_layers": 1,  # of the drafter only what remembers rows takes part
    "dspark_target_layer_ids": [3],
    "dspark_n_routed_experts": 8,
    "dspark_num_experts_per_tok": 3,
}
_SHARE: dict[str, Any] = {
    "n_routed_experts": 32,  # of 384: one of twelve ranks
    # a tenth, as of the layers: otherwise the output projection would be half of a decode step
    "vocab_size": 12928,
    "engram_compressed_vocab_size": 12928,
    "engram_vocab_size": 100_000,  # for each of 24 hashes: 640 MB in all
}
_TINY: dict[str, Any] = {
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
    "index_topk": 16,
    "candidate_topk_blocks": 4,
    "sliding_window": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 256,
    "engram_compressed_vocab_size": 256,
    "engram_vocab_size": 100,
    "engram_n_heads": 2,
    "engram_head_dim": 32,
    "hc_sinkhorn_iters": 3,
}


def slice_spec(*, tiny: bool = False, engram: bool = True) -> ModelSpec:
    """The slice of DeepSeek-V4.1-Flash; `tiny`: of its kinds of layers in sizes for a CPU.

    Without `engram` the layers before the cut weigh what they do in the real model, which has it
    in two of twenty.
    """
    raw = json.loads((REAL / "config.json").read_text(encoding="utf-8"))
    text = raw["text_config"]
    text |= _LAYERS | _SHARE | (_TINY if tiny else {})
    raw["image_token_id"] = text["vocab_size"] - 1
    if not engram:
        text |= {"engram_layer_ids": [], "engram_num_embeddings": []}
        return ModelSpec.from_dict(raw)
    hashes = engram_hashes(ModelSpec.from_dict(_with_table(raw, 1)))
    rows = sum(int(hashing.primes_Oh.sum()) for hashing in hashes.values())
    return ModelSpec.from_dict(_with_table(raw, rows))


def _with_table(raw: dict[str, Any], rows: int) -> dict[str, Any]:
    changed = copy.deepcopy(raw)
    changed["text_config"]["engram_num_embeddings"] = [rows]
    return changed
