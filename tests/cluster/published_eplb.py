"""The published expert balancing (EPLB), written from its description: the peer to be beaten.

Knows nothing of the product. Three steps: pack expert groups on nodes, copy hot experts inside
each node, pack the copies on the ranks of the node; each packing is longest-first on the lightest
bin that still has room, with equally many items a bin. It is stateless: it never sees where the
experts are now. `replicate` gives one more copy at a time to the expert with the largest load a
copy. Loads are held in tensors and packed item by item, as in the published form; `packing`
chooses the same algorithm over plain floats, several times as fast, so that both can be timed.

Terms here: a node has several ranks (GPUs), a physical expert is one slot of a rank.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Packing = Callable[[Floats, int], tuple[Ints, Ints]]


def pack_tensors(weights: Floats, bins: int) -> tuple[Ints, Ints]:
    """Bin and place within the bin of each item [L, N], for weights [L, N]; N / bins a bin."""
    loads = torch.from_numpy(weights)
    room = loads.shape[1] // bins
    bin_of = torch.zeros(loads.shape, dtype=torch.int64)
    place_of = torch.zeros_like(bin_of)
    if room == 1:  # nothing to choose
        bin_of[:] = torch.arange(bins)
        return bin_of.numpy(), place_of.numpy()
    for layer, order in enumerate(loads.sort(dim=-1, descending=True, stable=True).indices):
        filled: list[torch.Tensor | float] = [0.0] * bins
        items = [0] * bins
        for item in order:
            lightest = min((b for b in range(bins) if items[b] < room), key=filled.__getitem__)
            bin_of[layer, item] = lightest
            place_of[layer, item] = items[lightest]
            filled[lightest] += loads[layer, item]
            items[lightest] += 1
    return bin_of.numpy(), place_of.numpy()


def pack_floats(weights: Floats, bins: int) -> tuple[Ints, Ints]:
    """The same over Python's own floats and lists."""
    room = weights.shape[1] // bins
    bin_of = np.zeros(weights.shape, dtype=np.int64)
    place_of = np.zeros_like(bin_of)
    if room == 1:
        bin_of[:] = np.arange(bins)
        return bin_of, place_of
    for layer, row in enumerate(weights):
        filled, items, open_bins = [0.0] * bins, [0] * bins, list(range(bins))
        values = row.tolist()
        for item in np.argsort(-row, kind="stable").tolist():
            lightest = min(open_bins, key=filled.__getitem__)
            bin_of[layer, item] = lightest
            place_of[layer, item] = items[lightest]
            filled[lightest] += values[item]
            items[lightest] += 1
            if items[lightest] == room:
                open_bins.remove(lightest)
    return bin_of, place_of


def replicate(weights: Floats, slots: int) -> tuple[Ints, Ints, Ints]:
    """Logical expert [L, slots], number of the copy [L, slots], and copies [L, N] of each."""
    layers, experts = weights.shape
    expert_of = np.tile(np.arange(slots), (layers, 1))
    copy_of = np.zeros((layers, slots), dtype=np.int64)
    copies = np.ones((layers, experts), dtype=np.int64)
    rows = np.arange(layers)
    for slot in range(experts, slots):
        hottest = (weights / copies).argmax(-1)
        expert_of[:, slot] = hottest
        copy_of[:, slot] = copies[rows, hottest]
        copies[rows, hottest] += 1
    return expert_of, copy_of, copies


def rebalance(
    weights: Floats,
    slots: int,
    ranks: int,
    *,
    groups: int = 1,
    nodes: int = 1,
    packing: Packing = pack_tensors,
) -> Ints:
    """Logical expert in each physical slot [L, slots], rank by rank, for loads [L, E]."""
    if groups % nodes:
        groups, nodes = 1, 1  # groups that do not divide by nodes are balanced as one
    layers, experts = weights.shape
    size = experts // groups
    node_slots = slots // nodes

    # 1. whole groups to nodes
    group_load = weights.reshape(layers, groups, size).sum(-1)
    node_of, place_of = packing(group_load, nodes)
    seat = (node_of * (groups // nodes) + place_of)[:, :, None] * size + np.arange(size)
    seat_of_expert = seat.reshape(layers, experts)
    expert_at_seat = np.argsort(seat_of_expert, axis=-1)

    # 2. copies inside each node
    seated = np.take_along_axis(weights, expert_at_seat, -1).reshape(layers * nodes, -1)
    expert_of, _, copies = replicate(seated, node_slots)

    # 3. copies to the node's ranks
    each = np.take_along_axis(seated / copies, expert_of, -1)
    rank_of, place = packing(each, ranks // nodes)
    slot_of = rank_of * (slots // ranks) + place
    placed = np.take_along_axis(expert_of, np.argsort(slot_of, axis=-1), -1)
    first = np.tile(np.arange(nodes) * (experts // nodes), layers)[:, None]
    return np.take_along_axis(expert_at_seat, (placed + first).reshape(layers, slots), -1)
