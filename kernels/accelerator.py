"""Which kind of device a rank computes on, and what differs between the kinds.

Everything else goes through torch, whose device modules share one interface (streams, events,
memory). Knows no model, no engine, and no way to talk to other ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

Kind = Literal["cpu", "nvidia", "ascend"]
Choice = Literal["auto", "cpu", "nvidia", "ascend"]


@dataclass(frozen=True)
class Peak:
    """What a device can do at best; both are zero where it is not known."""

    bf16_flops: float  # a second, dense
    bytes_per_s: float  # of its memory


@dataclass(frozen=True)
class Accelerator:
    """One kind of device, and the names under which others know it.

    `ascend` needs the package torch_npu. It has not been run on such a device yet.
    """

    kind: Kind
    device_type: str  # torch's name
    collectives: str  # torch.distributed's backend
    memory: Literal["DRAM", "VRAM"]  # NIXL's name for its memory

    @property
    def device(self) -> torch.device:
        """The device of this process: the first that it is allowed to see."""
        return torch.device(self.device_type, 0) if self.kind != "cpu" else torch.device("cpu")

    @property
    def module(self) -> Any:
        """torch.cpu, torch.cuda or torch.npu: streams, events, synchronize, memory."""
        return torch.get_device_module(self.device_type)

    def synchronize(self) -> None:
        """Returns when all that was asked of the device so far is done."""
        self.module.synchronize()

    def free_bytes(self) -> int | None:
        """Memory of the device that nobody holds; None for a CPU, which shares it with all."""
        return None if self.kind == "cpu" else int(self.module.mem_get_info()[0])

    def peak(self) -> Peak:
        if self.kind == "cpu":
            return Peak(0.0, 0.0)
        name = str(self.module.get_device_name())
        return next((peak for part, peak in _PEAKS.items() if part in name), Peak(0.0, 0.0))


CPU = Accelerator("cpu", "cpu", "gloo", "DRAM")
NVIDIA = Accelerator("nvidia", "cuda", "nccl", "VRAM")
ASCEND = Accelerator("ascend", "npu", "hccl", "VRAM")

_PEAKS = {  # by a part of the device's name; from the vendors' data sheets
    "H200": Peak(989e12, 4.8e12),
    "H100": Peak(989e12, 3.35e12),
    "H20": Peak(148e12, 4.0e12),
    "B200": Peak(2250e12, 8.0e12),
}


def choose(choice: Choice) -> Accelerator:
    """The accelerator of that name; "auto": the first kind that this process can see.

    Raises ValueError if that kind is not there.
    """
    if choice == "auto":
        return next((one for one in (NVIDIA, ASCEND) if _is_there(one)), CPU)
    wanted = {"cpu": CPU, "nvidia": NVIDIA, "ascend": ASCEND}[choice]
    if wanted.kind != "cpu" and not _is_there(wanted):
        raise ValueError(
            f"accelerator {choice!r} was asked for, but torch {torch.__version__} sees no "
            f"{wanted.device_type} device in this process{_missing_package(wanted)}"
        )
    return wanted


def _is_there(accelerator: Accelerator) -> bool:
    if accelerator.kind == "ascend" and not _load_npu():
        return False
    return bool(accelerator.module.is_available() and accelerator.module.device_count())


def _load_npu() -> bool:
    """torch learns of the device type "npu" when its package is imported."""
    try:
        __import__("torch_npu")
    except ImportError:
        return False
    return True


def _missing_package(accelerator: Accelerator) -> str:
    missing = accelerator.kind == "ascend" and not _load_npu()
    return "; the package torch_npu is not installed" if missing else ""
