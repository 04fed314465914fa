"""What a rank computes in, by its device and the configuration."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cluster.config import ClusterConfig, parse_config
from cluster.errors import StartupError
from engine.memory_plan import form_of
from engine.rank_start import dtype_of
from kernels.accelerator import ASCEND, CPU, NVIDIA, Accelerator


def configured(dtype: str, **prefill: Any) -> ClusterConfig:
    return parse_config({"model": {"dtype": dtype}, "prefill": {"gpus": 1.0, **prefill}})


def of(config: ClusterConfig, accelerator: Accelerator) -> torch.dtype:
    return dtype_of("prefill/0", config, config.prefill, accelerator)


def test_left_to_itself_a_rank_computes_in_bf16_on_nvidia_gpus_alone() -> None:
    config = configured("auto")
    assert of(config, NVIDIA) == torch.bfloat16
    assert of(config, CPU) == of(config, ASCEND) == torch.float32


def test_float32_is_to_be_had_everywhere() -> None:
    config = configured("float32")
    assert {of(config, one) for one in (NVIDIA, CPU, ASCEND)} == {torch.float32}


def test_bf16_elsewhere_is_refused_with_the_reason_and_the_way_out() -> None:
    with pytest.raises(StartupError, match=r"needs an NVIDIA GPU, and this rank computes on cpu"):
        of(configured("bfloat16"), CPU)
    together = configured("bfloat16", ranks=2, cp=2)
    with pytest.raises(StartupError, match=r"cp 2\) do it in float32; set it to auto or float32"):
        of(together, NVIDIA)


def test_ranks_that_run_prompts_together_compute_in_float32() -> None:
    assert of(configured("auto", ranks=2, cp=2), NVIDIA) == torch.float32


@pytest.mark.parametrize("dtype", ["auto", "float32"])
@pytest.mark.parametrize("pool", [{}, {"ranks": 2, "cp": 2}])
def test_the_planner_counts_weights_as_the_rank_keeps_them(dtype: str, pool: Any) -> None:
    config = configured(dtype, **pool)
    kept = of(config, NVIDIA) == torch.bfloat16
    assert (form_of(config, config.prefill) == "stored") == kept
    on_cpus = configured(dtype, **pool, accelerator="cpu")
    assert form_of(on_cpus, on_cpus.prefill) == "float32"
