"""Expert placement against the published algorithm: `python -m tests.bench_placement [--plot SVG]`.

40 layers of 384 experts on 64 ranks with 8 slots each, made-up drifting traffic
(tests/expert_traces.py). Each placement is decided on the windows so far and scored on the next
one. Times are processor time of one thread, all in this process.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cluster.expert_placement import Placement, first_placement, place
from cluster.replica_dispatch import assign_by_key, quotas, token_keys
from tests.cluster.published_eplb import Packing, pack_floats, pack_tensors, rebalance
from tests.expert_traces import Trace, Traffic
from tests.line_plot import Line, Plot

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

TRAFFIC = Traffic()
RANKS, SLOTS = 64, 8
ALL_SLOTS = TRAFFIC.layers * RANKS * SLOTS
HISTORY = 12  # windows that `place` sees
MOVED_SHARE = 0.09  # of the slots, at most, at each rebalance
TOKENS_A_RANK = 64


@dataclass
class Run:
    """One way to place, over one trace: window by window."""

    imbalance: list[float] = field(default_factory=list)  # of the next window, mean of layers
    moved: list[float] = field(default_factory=list)  # share of the slots; the first has none
    seconds: list[float] = field(default_factory=list)


Placer = Callable[[Ints, Placement | None], Placement]


def published(packing: Packing, newest: float = 1.0) -> Placer:
    def placer(windows: Ints, previous: Placement | None) -> Placement:
        loads = windows[0].astype(np.float64)
        for window in windows[1:]:
            loads = newest * window + (1 - newest) * loads
        slots = rebalance(loads, RANKS * SLOTS, RANKS, packing=packing)
        return Placement(slots.reshape(TRAFFIC.layers, RANKS, SLOTS), TRAFFIC.experts)

    return placer


def ours(history: int, share: float) -> Placer:
    def placer(windows: Ints, previous: Placement | None) -> Placement:
        return place(
            windows[-history:],
            ranks=RANKS,
            slots_per_rank=SLOTS,
            previous=previous,
            most_moves=int(share * ALL_SLOTS),
        )

    return placer


def never(windows: Ints, previous: Placement | None) -> Placement:
    return previous or first_placement(TRAFFIC.layers, TRAFFIC.experts, RANKS, SLOTS)


PLACERS: dict[str, Placer] = {
    "published, last window": published(pack_floats),
    "published, smoothed": published(pack_floats, newest=0.8),
    "ours": ours(HISTORY, MOVED_SHARE),
    "ours, half the moves": ours(HISTORY, MOVED_SHARE / 2),
    "ours, last window only": ours(1, MOVED_SHARE),
    "ours, moves unlimited": ours(HISTORY, 1.0),
    "experts in order": never,
}


def run(placer: Placer, loads: Ints) -> Run:
    result, previous = Run(), None
    for window in range(1, len(loads)):
        begun = time.process_time()
        placement = placer(loads[:window], previous)
        result.seconds.append(time.process_time() - begun)
        if previous is not None:
            result.moved.append(placement.moves_from(previous).sum() / ALL_SLOTS)
        result.imbalance.append(float(placement.imbalance(loads[window]).mean()))
        previous = placement
    return result


def compare(seeds: range) -> dict[str, list[Run]]:
    traces = [Trace(TRAFFIC, seed).loads for seed in seeds]
    runs = {name: [run(placer, loads) for loads in traces] for name, placer in PLACERS.items()}
    peer = runs["published, last window"]
    print(f"{'':24}{'next-window imbalance':>24}{'ratio':>8}{'worst':>8}{'moved':>8}{'ratio':>8}")
    for name, ran in runs.items():
        imbalance = [float(np.mean(one.imbalance)) for one in ran]
        ratios = [
            mine / np.mean(other.imbalance) for mine, other in zip(imbalance, peer, strict=True)
        ]
        moved = np.mean([one.moved for one in ran])
        print(
            f"{name:24}{np.mean(imbalance):24.3f}{np.mean(ratios):8.3f}{max(ratios):8.3f}"
            f"{moved:8.1%}{moved / np.mean([one.moved for one in peer]):8.3f}"
        )
    return runs


def times(runs: dict[str, list[Run]]) -> None:
    """Cold is the first placement of a trace, warm any later one; medians."""
    loads = Trace(TRAFFIC, 0).loads
    tensors = []
    for window in range(3):
        begun = time.process_time()
        published(pack_tensors)(loads[window : window + 1], None)
        tensors.append(time.process_time() - begun)
    peers = {
        "published, as published (tensors)": float(np.median(tensors)),
        "published, plain floats": float(
            np.median([one.seconds for one in runs["published, last window"]])
        ),
    }
    cold = float(np.median([one.seconds[0] for one in runs["ours"]]))
    warm = float(np.median([one.seconds[1:] for one in runs["ours"]]))
    print(f"\nsolve: ours cold {cold * 1e3:.1f} ms, warm {warm * 1e3:.1f} ms")
    for name, seconds in peers.items():
        print(
            f"  {name:34}{seconds * 1e3:8.0f} ms: {seconds / cold:6.0f} x cold, "
            f"{seconds / warm:6.1f} x warm"
        )


def dispatch(seed: int = 0) -> None:
    """Busiest rank over mean in single steps, on the placement made for their window."""
    draw = np.random.default_rng(seed)
    trace = Trace(TRAFFIC, seed)
    placement = place(trace.loads[-HISTORY:], ranks=RANKS, slots_per_rank=SLOTS)
    experts = trace.step(TOKENS_A_RANK * RANKS)  # [L, T, K]
    counts = np.stack([np.bincount(layer.ravel(), minlength=384) for layer in experts])
    keys = token_keys(seed, np.arange(experts.shape[1]))

    def imbalance(of_rank: Floats | Ints) -> float:
        return float((of_rank.max(-1) / of_rank.mean(-1)).mean())

    def by_keys(token_key: npt.NDArray[np.uint64]) -> float:
        slot = np.stack(
            [assign_by_key(e, s, token_key) for e, s in zip(experts, placement.slots, strict=True)]
        )
        of_rank = [np.bincount(layer.ravel() // SLOTS, minlength=RANKS) for layer in slot]
        return imbalance(np.stack(of_rank))

    begun = time.process_time()
    filled = quotas(counts, placement)
    all_layers = time.process_time() - begun
    one = Placement(placement.slots[:1], placement.experts)
    begun = time.process_time()
    quotas(counts[:1], one)
    one_layer = time.process_time() - begun
    print(f"\ndispatch, {TOKENS_A_RANK} tokens a rank, busiest rank over mean")
    print(
        f"  random copy        {by_keys(draw.integers(0, 2**63, len(keys)).astype(np.uint64)):.3f}"
    )
    print(f"  by key (invariant) {by_keys(keys):.3f}")
    print(f"  even split         {imbalance(placement.rank_loads(counts)):.3f}")
    print(f"  quotas             {imbalance(filled.sum(-1)):.3f}")
    print(
        f"  quotas of {TRAFFIC.layers} layers at once {all_layers * 1e3:.1f} ms, "
        f"of one {one_layer * 1e3:.2f} ms"
    )


def plot(runs: dict[str, list[Run]], path: Path) -> None:
    """Imbalance over windows, mean of the traces."""
    drawn = {
        "experts in order": ("no balancing", "#999999"),
        "published, last window": ("published EPLB, every slot free to move", "#e07b00"),
        "ours": (f"Tandem, at most {MOVED_SHARE:.0%} of the slots moved", "#1f6fb4"),
    }
    Plot(
        title=f"384 experts in 512 slots on 64 ranks, {len(runs['ours'])} drifting traces",
        x_label="window (each placed with the windows before it)",
        y_label="busiest rank / mean rank, mean of 40 layers",
        lines=[
            Line(label, np.mean([one.imbalance for one in runs[name]], axis=0).tolist(), color)
            for name, (label, color) in drawn.items()
        ],
        first=1,
        lowest=1.0,
        marked=None
        if TRAFFIC.upset is None
        else (TRAFFIC.upset, "the rarest kind of traffic becomes the commonest"),
    ).write(path)
    print(f"\n{path}: {path.stat().st_size / 1024:.0f} KiB", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--traces", type=int, default=5, help="seeds 0 and up (5)")
    parser.add_argument("--plot", type=Path, help="write an SVG")
    options = parser.parse_args()
    runs = compare(range(options.traces))
    times(runs)
    dispatch()
    if options.plot:
        plot(runs, options.plot)


if __name__ == "__main__":
    main()
