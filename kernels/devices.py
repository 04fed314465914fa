"""What torch sees of this machine's accelerators, for those who must not import it.

python -m kernels.devices

Prints one JSON object: torch's version, the CUDA version it was built for, and each device's
name and memory in bytes.
"""

from __future__ import annotations

import json

import torch


def devices() -> dict[str, object]:
    """Takes no memory on them: properties only."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    properties = [torch.cuda.get_device_properties(index) for index in range(count)]
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "devices": [{"name": one.name, "bytes": one.total_memory} for one in properties],
    }


if __name__ == "__main__":
    print(json.dumps(devices()))
