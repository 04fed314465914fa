"""A bar is met or missed by what was measured, and absent if nothing was."""

from __future__ import annotations

from typing import Any

from kv_transfer.bench_bars import bars


def push(of_copy: float, share: float) -> dict[str, Any]:
    return {
        "part": "direct push", "case": "128 K, 32 programs", "of_copy": of_copy,
        "digest_share": share,
    }  # fmt: skip


def test_only_what_was_measured_has_a_line() -> None:
    assert len(bars([])) == 1
    assert len(bars([push(0.93, 0.01)])) == 3


def test_a_bar_is_met_at_its_value_and_missed_below() -> None:
    assert [line.split()[-1] for line in bars([push(0.92, 0.05)])[1:]] == ["met", "met"]
    assert [line.split()[-1] for line in bars([push(0.912, 0.051)])[1:]] == ["MISSED", "MISSED"]


def test_pages_are_compared_with_descriptors_and_the_last_push_with_its_digest() -> None:
    rows = [
        {"part": "direct pages", "case": "16 KiB, 32 programs", "gb_per_s": 350.0},
        {"part": "nixl pages", "case": "16 KiB", "gb_per_s": 2.0},
        {"part": "last push", "case": "8 K request in one push", "us": 40.0},
        {"part": "digest there", "case": "8 K, 32 programs", "us": 90.0},
    ]
    pages, last = bars(rows)[1:]
    assert "175" in pages
    assert pages.endswith("  met")
    assert "130" in last
    assert last.endswith("MISSED")
