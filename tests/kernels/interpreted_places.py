"""Kernels of places and turns against their references on random positions:

TRITON_INTERPRET=1 python -m tests.kernels.interpreted_places
"""

from __future__ import annotations

import itertools

import torch

from kernels.ops.joined import position_addresses, position_turns, window_addresses
from kernels.ops.joined.position_addresses import Rule
from kernels.ops.joined.window_addresses import WindowAddresses
from kernels.ops.row_addresses import Records

OWNERS = 7
RULES: tuple[Rule, ...] = ("completed", "before", "open")


def compare(device: torch.device) -> None:
    """Raises AssertionError where they differ."""
    torch.manual_seed(0)
    for count in (1, 5, 33, 130):
        addresses(count, device)
        windows(count, device)
        turns(count, device)


def some(count: int, below: int, device: torch.device, least: int = 0) -> torch.Tensor:
    return torch.randint(least, below, (count,), device=device)


def addresses(count: int, device: torch.device) -> None:
    starts, owners = some(OWNERS, 50, device), some(count, OWNERS, device)
    positions = some(count, 60, device, -1)
    positions[::3] = starts[owners[::3]]
    table = some(OWNERS * 5, 90, device).view(OWNERS, 5)
    sizes = (Records(16, 4096, 288), Records(1, 1000, 64), Records(3, 49728, 68))
    for records, rule, ratio in itertools.product(sizes, RULES, (1, 2)):
        found = torch.empty_like(positions)
        given = (positions, owners, starts, table, records, rule, ratio)
        position_addresses._launch(*given, found)
        assert torch.equal(found, position_addresses.reference(*given))


def windows(count: int, device: torch.device) -> None:
    owners, positions = some(count, OWNERS, device), some(count, 300, device, -1)
    floors, rings = some(OWNERS, 200, device), some(OWNERS, 50, device)
    for window, slack, keeps_all in itertools.product((5, 16, 128), (0, 3), (True, False)):
        records = Records(window + slack, 70000, 528)
        given = (positions, owners, floors, rings, records, window)
        found = WindowAddresses(torch.empty_like(positions), positions.new_empty(count, window))
        window_addresses._launch(*given, keeps_all, found)
        expected = window_addresses.reference(*given, keeps_all=keeps_all)
        assert torch.equal(found.own_T, expected.own_T)
        assert torch.equal(found.seen_TW, expected.seen_TW)


def turns(count: int, device: torch.device) -> None:
    positions = some(count, 1 << 20, device, -1)
    frequencies = torch.rand(3, 16, dtype=torch.float64, device=device)
    found = torch.empty(3, count, 16, 2, device=device)
    position_turns._launch(positions, frequencies, (0, 0, 1), found)
    expected = position_turns.reference(positions, frequencies, (0, 0, 1))
    assert (torch.view_as_complex(found) - expected).abs().max() < 1e-6


if __name__ == "__main__":
    compare(torch.device("cpu"))
    print("ok")
