"""WORLD_SIZE, RANK and the visible cards."""

from __future__ import annotations

import pytest

from cluster.errors import StartupError
from offline.machines import machines


@pytest.mark.parametrize(
    ("environ", "there", "ep_size"),
    [
        ({}, 0, 1),
        ({}, 4, 4),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}, 0, 8),
        ({"CUDA_VISIBLE_DEVICES": "2, 3"}, 8, 2),
        ({"CUDA_VISIBLE_DEVICES": "GPU-1f,GPU-2e"}, 8, 2),
        ({"CUDA_VISIBLE_DEVICES": ""}, 0, 1),
        ({"ASCEND_RT_VISIBLE_DEVICES": "0,1"}, 8, 2),
        ({"WORLD_SIZE": "2", "RANK": "1", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}, 8, 8),
    ],
)
def test_ep_size_is_machines_times_visible_cards(
    environ: dict[str, str], there: int, ep_size: int
) -> None:
    assert machines(environ, cards_there=there).ep_size == ep_size


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"WORLD_SIZE": "two"}, r"^WORLD_SIZE: 'two' is no whole number$"),
        ({"WORLD_SIZE": "0"}, r"^WORLD_SIZE: 0 machines cannot be"),
        ({"RANK": "1"}, r"^RANK: 1 is no machine of WORLD_SIZE 1: 0 to 0$"),
        ({"WORLD_SIZE": "2", "RANK": "-1"}, r"^RANK: -1 is no machine"),
        ({"CUDA_VISIBLE_DEVICES": "0,0"}, r"^CUDA_VISIBLE_DEVICES: '0,0' lists a device twice$"),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2"}, r"lists 3 devices where this machine has 2$"),
        (
            {"CUDA_VISIBLE_DEVICES": "0", "ASCEND_RT_VISIBLE_DEVICES": "1"},
            r"^ASCEND_RT_VISIBLE_DEVICES: '1' must be equal to CUDA_VISIBLE_DEVICES",
        ),
    ],
)
def test_what_cannot_be_names_the_variable(environ: dict[str, str], said: str) -> None:
    with pytest.raises(StartupError, match=said):
        machines(environ, cards_there=2)
