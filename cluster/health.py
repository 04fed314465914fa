"""What a rank says of itself to the head of its group.

In a file of its own, and of plain values: the head's process is to know neither torch nor engines.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Health:
    """`stuck_s`: how long nothing has moved while something was to be done.

    Waiting for memory is not being stuck: what holds it ends by itself.
    """

    alive: bool
    pending: int
    steps: int
    stuck_s: float
