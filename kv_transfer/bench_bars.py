"""What the GPU transfer benchmark has to reach, beside what it found. Pure: rows in, lines out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]


def bars(rows: Sequence[Row]) -> list[str]:
    """A line for each bar; of parts that did not run there are none."""
    lines = [f"{'bar':72}{'measured':>12}{'bar':>9}"]
    for what, found, bar, at_least in _compared(rows):
        met = found >= bar if at_least else found <= bar
        sign = ">=" if at_least else "<="
        lines.append(f"{what:72}{found:12.4g} {sign}{bar:6g}  {'met' if met else 'MISSED'}")
    return lines


def _compared(rows: Sequence[Row]) -> Iterator[tuple[str, float, float, bool]]:
    known = {(row["part"], row["case"]): row for row in rows}
    for way in ("push", "pull"):
        if row := known.get((f"direct {way}", "128 K, 32 programs")):
            yield (
                f"direct {way}, 128 K, 32 programs, digests: of peer copy",
                row["of_copy"],
                0.92,
                True,
            )
            yield f"direct {way}: share of digests", row["digest_share"], 0.05, False
    pages = known.get(("direct pages", "16 KiB, 32 programs"))
    slow = known.get(("nixl pages", "16 KiB"))
    if pages and slow:
        times = pages["gb_per_s"] / slow["gb_per_s"]
        yield "direct pages of 16 KiB: times NIXL, a descriptor each", times, 50, True
    together = [row for row in rows if row["part"] == "nixl together"]
    if together:
        best = max(row["of_copy"] for row in together)
        yield "several NIXL writes of 256 MiB in all: of peer copy", best, 0.90, True
    for length in ("128 K", "1 M"):
        found = [row for row in rows if row["part"] == "packed" and row["case"].startswith(length)]
        if found:
            row = max(found, key=lambda row: row["of_copy"])
            yield (
                f"packed, {length}, its writes alone: of peer copy",
                row["writes_of_copy"],
                0.90,
                True,
            )
            yield f"packed, {length}, to the last digest: of peer copy", row["of_copy"], 0.90, True
            yield (
                f"packed, {length}, to the last digest: of its writes",
                row["of_writes"],
                0.90,
                True,
            )
            yield f"packed, {length}: share of digests", row["digest_share"], 0.10, False
    last = known.get(("last push", "8 K request in one push"))
    there = known.get(("digest there", "8 K, 32 programs"))
    if last and there:
        yield (
            "last push of 8 K and its digest there, device, us",
            last["us"] + there["us"],
            120,
            False,
        )
    planned = known.get(("last push", "digest there, wall, planned before"))
    if last and planned:
        yield "last push of 8 K, planned before: wall, us", last["planned_wall_us"], 200, False
        yield "its digest there, planned before: wall, us", planned["us"], 200, False
    for row in rows:
        if row["part"] == "prefill" and row["case"] == "a push of 8 K, 32 programs":
            yield (
                "products beside a push of 8 K, 32 programs: slower by",
                row["slower"],
                0.03,
                False,
            )
