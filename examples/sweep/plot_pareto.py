"""Draws the curves of sweeps: throughput of a GPU against what one user gets, a colour a tag.

    python examples/sweep/plot_pareto.py decode --folder sweeps --out docs/pictures/decode

writes decode.png and decode.svg. A filled point is on the Pareto front of its tag, an empty one
is beaten by another in both directions. Needs matplotlib: pip install 'tandem-serve[plots]'.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # a script's own folder is first on the path; the root belongs there
    sys.path[0] = str(Path(__file__).resolve().parent.parent.parent)

try:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
except ModuleNotFoundError as missing:
    if __name__ != "__main__":
        raise
    sys.exit(f"plot_pareto.py: {missing.name} is missing; pip install 'tandem-serve[plots]'")

from examples.sweep.points import AXES, Axes, BadPoint, curves, front, places

# Okabe and Ito's colours, which people with any colour vision tell apart
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
WIDTH, HEIGHT, DPI = 6.4, 4.4, 110
ROOM = 1.15  # of the axes beyond the last point, for its number


def plot(phase: str, folder: Path, out: Path) -> list[Path]:
    """The files written: `out`.png and `out`.svg. BadPoint if there is nothing to draw."""
    axes, tags = AXES[phase], curves(phase, folder)
    if not tags:
        raise BadPoint(f"{folder} has no point of a {phase} sweep")
    if len(tags) > len(COLOURS):
        raise BadPoint(f"{len(tags)} tags are more than the {len(COLOURS)} colours; move some away")
    figure, chart = pyplot.subplots(figsize=(WIDTH, HEIGHT), layout="constrained")
    for colour, (tag, points) in zip(COLOURS, tags.items(), strict=False):
        _draw(chart, f"{tag} ({_about(points[0])})", points, axes, colour)
    shown = [place for points in tags.values() for place in places(points, axes)]
    chart.set_xlim(0, ROOM * max(one.x for one in shown))
    chart.set_ylim(0, ROOM * max(one.y for one in shown))
    chart.set_xlabel(axes.x_label)
    on_cpu = all(point["device"] == "CPU" for points in tags.values() for point in points)
    chart.set_ylabel(axes.y_label.replace("GPU", "CPU rank") if on_cpu else axes.y_label)
    chart.set_title(f"{phase}; at each point: {axes.batch.replace('_', ' ')}", fontsize=10)
    chart.grid(alpha=0.3)
    figure.legend(loc="outside lower center", fontsize=8)
    out.parent.mkdir(parents=True, exist_ok=True)
    files = [out.with_suffix(suffix) for suffix in (".png", ".svg")]
    for file in files:
        figure.savefig(file, dpi=DPI)
    pyplot.close(figure)
    return files


def _draw(
    chart: Any, label: str, points: Sequence[dict[str, Any]], axes: Axes, colour: str
) -> None:
    found = places(points, axes)
    best = front(found, axes)
    chart.plot(
        [one.x for one in best], [one.y for one in best], color=colour, marker="o", label=label
    )
    beaten = [one for one in found if one not in best]
    chart.plot(
        [one.x for one in beaten],
        [one.y for one in beaten],
        color=colour,
        marker="o",
        markerfacecolor="white",
        linestyle="none",
    )
    for one in found:
        chart.annotate(
            str(one.batch),
            (one.x, one.y),
            textcoords="offset points",
            xytext=(6, 5),
            fontsize=8,
            color=colour,
        )


def _about(point: dict[str, Any]) -> str:
    """What the numbers hold for."""
    parts = [point["model"], point["device"]]
    if point["clock"] == "cpu":
        parts.append("processor time")
    if point["ranks"] > 1:
        parts.append(f"{point['ranks']} ranks")
    if point["phase"] == "encoder":
        return ", ".join([*parts, f"{point['image_size']} px"])
    parts.append(f"{point['context']} tokens")
    if point["phase"] == "decode" and point["nextn"]:
        parts.append(f"nextn {point['nextn']}, tau {point['tau']:g}")
    return ", ".join(parts)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="plot_pareto.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("phase", choices=tuple(AXES))
    parser.add_argument("--folder", type=Path, default=Path("sweeps"), help="(default: sweeps)")
    parser.add_argument("--out", type=Path, help="without suffix (default: FOLDER/PHASE)")
    options = parser.parse_args(arguments)
    try:
        files = plot(options.phase, options.folder, options.out or options.folder / options.phase)
    except (BadPoint, OSError) as error:
        print(f"plot_pareto.py: {error}", file=sys.stderr)
        return 2
    for file in files:
        print(file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
