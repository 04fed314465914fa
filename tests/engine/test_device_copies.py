"""Values on their way: what arrives is what was there, whatever happens to the tensor later."""

from __future__ import annotations

import pytest
import torch

from engine.device_copies import Arriving, Milestone, to_device


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_what_arrives_is_what_the_tensor_was(device: str) -> None:
    values = to_device([3, 1, 4], torch.int64, device)
    arriving = Arriving(values)
    values.add_(10)
    again = Arriving(values[1:])
    values.zero_()
    assert arriving.wait().tolist() == [3, 1, 4]
    assert again.wait().tolist() == [11, 14]
    assert arriving.wait().tolist() == [3, 1, 4]
    assert arriving.wait().device.type == "cpu"


@pytest.mark.gpu
def test_a_milestone_is_reached_when_the_work_before_it_is_done() -> None:
    device = torch.device("cuda")
    one = torch.ones(1 << 20, device=device)
    for _ in range(100):
        one = one.cumsum(0) / torch.arange(1, len(one) + 1, device=device)
    mark = Milestone(device)
    mark.wait()
    assert torch.cuda.current_stream().query()
    mark.wait()
