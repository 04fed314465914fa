"""Arguments of an LLM, and the configuration of ranks that follows from them."""

from __future__ import annotations

from typing import Any

import pytest

from offline.engine_args import EngineArgs, engine_config
from offline.model_folder import SHIPPED

MINI = SHIPPED["tandem-mini"]


def _config(state_bytes: int = 1 << 24, environ: dict[str, str] | None = None, **told: Any) -> Any:
    args = EngineArgs.of(told)
    return engine_config(MINI, args, device="cpu", state_bytes=state_bytes, environ=environ or {})


def test_an_argument_that_is_none_is_refused_with_the_nearest() -> None:
    with pytest.raises(TypeError, match=r"'max_model_length'; did you mean 'max_model_len'\?"):
        EngineArgs.of({"max_model_length": 5})
    assert EngineArgs.of({"trust_remote_code": True, "chunked_prefill": True}) == EngineArgs()


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"load_format": "gguf"}, "load_format is 'gguf'"),
        ({"gpu_memory_utilization": 1.1}, "gpu_memory_utilization"),
        ({"max_num_seqs": 0}, "max_num_seqs must be 1"),
        ({"ranks_as": "pods"}, "ranks_as is 'pods'"),
        ({"expert_parallel_size": 6, "context_parallel_size": 4}, "--ep 6"),
    ],
)
def test_values_that_cannot_be(told: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        EngineArgs.of(told)


def test_sizes_reach_the_pools() -> None:
    config = _config(expert_parallel_size=2, data_parallel_size=4, max_num_seqs=3)
    assert (config.decode.groups, config.decode.ranks, config.prefill.groups) == (2, 2, 0)
    assert config.decode.shares_experts
    assert config.router.colocated
    assert config.decode.engine.max_length == 4096
    assert config.decode.engine.num_blocks == 3 * 4096 // 16
    alone = _config(data_parallel_size=4).decode
    assert (alone.groups, alone.ranks, alone.shares_experts) == (4, 1, False)


def test_prompts_are_spread_over_ranks_where_they_run() -> None:
    together = _config(context_parallel_size=2, expert_parallel_size=4)
    assert (together.decode.ranks, together.decode.cp) == (4, 2)
    apart = _config(context_parallel_size=2, disaggregated=True, prefill_groups=2)
    assert (apart.prefill.groups, apart.prefill.ranks, apart.prefill.cp) == (2, 2, 2)
    assert (apart.decode.groups, apart.decode.cp) == (1, 1)
    assert not apart.router.colocated


def test_experts_stay_where_they_are_if_asked() -> None:
    assert _config(disable_eplb=True).experts.disable_eplb
    assert not _config().experts.disable_eplb


def test_memory_bounds_the_blocks_and_must_hold_one_request() -> None:
    assert _config(max_num_seqs=256).decode.engine.num_blocks == (1 << 24) // (220 * 16)
    with pytest.raises(ValueError, match="max_model_len 32768 takes"):
        _config(1 << 20, max_model_len=32768)
    with pytest.raises(ValueError, match="max_model_len 40000: mini has 32768 positions"):
        _config(max_model_len=40000)


def test_variables_of_deepinfer_hold_for_an_offline_engine_too() -> None:
    environ = {"DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE": "compact"}
    assert _config(environ=environ).model.truncation == "compact"
    assert _config().model.truncation == "off"
