"""Whole numbers on a command line: types for argparse. Knows nothing of what is counted."""

from __future__ import annotations

import argparse


def positive(text: str) -> int:
    """ArgumentTypeError for anything but 1, 2, 3..."""
    return _from(1, text)


def count(text: str) -> int:
    """ArgumentTypeError for anything but 0, 1, 2..."""
    return _from(0, text)


def _from(least: int, text: str) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"must be a whole number from {least} on, not {text!r}")
    return int(text)
