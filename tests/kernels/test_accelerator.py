"""Which device a rank gets, and what it is told when there is none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernels import accelerator
from kernels.accelerator import ASCEND, CPU, NVIDIA, Peak, choose


def devices(name: str, count: int) -> Any:
    """A device module as torch_npu and torch.cuda have it."""
    return SimpleNamespace(
        is_available=lambda: count > 0,
        device_count=lambda: count,
        get_device_name=lambda: name,
        mem_get_info=lambda: (60, 100),
    )


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The device modules of this process by device type; none has a device to begin with."""
    modules = {"cuda": devices("", 0), "npu": devices("", 0), "cpu": torch.cpu}
    monkeypatch.setattr(torch, "get_device_module", modules.__getitem__)
    monkeypatch.setattr(accelerator, "_load_npu", lambda: True)
    return modules


def test_without_devices_the_choice_is_the_cpu(seen: dict[str, Any]) -> None:
    assert choose("auto") is CPU
    assert choose("cpu").device == torch.device("cpu")
    assert CPU.free_bytes() is None
    assert CPU.peak() == Peak(0.0, 0.0)
    CPU.synchronize()


def test_the_first_kind_that_is_there_is_chosen(seen: dict[str, Any]) -> None:
    seen["npu"] = devices("Ascend910", 8)
    assert choose("auto") is ASCEND
    seen["cuda"] = devices("NVIDIA H200", 1)
    assert choose("auto") is NVIDIA
    assert choose("ascend") is ASCEND
    assert choose("cpu") is CPU


def test_a_kind_that_is_not_there_is_refused_by_name(
    seen: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"'nvidia' was asked for, but torch .* sees no cuda"):
        choose("nvidia")
    monkeypatch.setattr(accelerator, "_load_npu", lambda: False)
    with pytest.raises(ValueError, match=r"sees no npu device .*; the package torch_npu is not"):
        choose("ascend")


def test_a_device_tells_its_memory_and_its_limits(seen: dict[str, Any]) -> None:
    seen["cuda"] = devices("NVIDIA H200", 1)
    assert NVIDIA.free_bytes() == 60
    assert NVIDIA.peak() == Peak(989e12, 4.8e12)
    seen["cuda"] = devices("an unheard-of chip", 1)
    assert NVIDIA.peak() == Peak(0.0, 0.0)
    assert NVIDIA.device == torch.device("cuda", 0)


def test_collectives_and_memory_go_by_their_names() -> None:
    assert [one.collectives for one in (CPU, NVIDIA, ASCEND)] == ["gloo", "nccl", "hccl"]
    assert [one.memory for one in (CPU, NVIDIA, ASCEND)] == ["DRAM", "VRAM", "VRAM"]
