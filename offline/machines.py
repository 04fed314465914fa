"""Which part of how many machines this process is, as the environment says. Pure.

WORLD_SIZE machines, this one is number RANK, and of its cards those that the platform's own
variable lists. A CPU counts as one card, unless the variable lists more: then there are as many
ranks, so that a command for eight cards can be tried where there are none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cluster.errors import StartupError

CUDA, ASCEND = "CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Machines:
    count: int
    rank: int  # of this machine
    cards: int  # visible ones of each

    @property
    def ep_size(self) -> int:
        return self.count * self.cards


def machines(environ: Mapping[str, str], *, cards_there: int) -> Machines:
    """`cards_there`: cards of this machine; 0 if it computes on its CPU.

    StartupError names the variable that cannot be.
    """
    count = _number(environ, "WORLD_SIZE", 1)
    rank = _number(environ, "RANK", 0)
    if count < 1:
        raise StartupError(f"WORLD_SIZE: {count} machines cannot be; it must be 1 or more")
    if not 0 <= rank < count:
        raise StartupError(f"RANK: {rank} is no machine of WORLD_SIZE {count}: 0 to {count - 1}")
    listed = _listed(environ)
    if listed is None:
        return Machines(count, rank, max(1, cards_there))
    if cards_there and len(listed) > cards_there:
        raise StartupError(
            f"{CUDA}: lists {len(listed)} devices where this machine has {cards_there}"
        )
    return Machines(count, rank, max(1, len(listed)))


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, "")
    try:
        return int(text) if text else default
    except ValueError:
        raise StartupError(f"{name}: {text!r} is no whole number") from None


def _listed(environ: Mapping[str, str]) -> list[str] | None:
    """Entries of the list; None where nothing is said."""
    text = environ.get(CUDA)
    other = environ.get(ASCEND)
    if text is not None and other is not None and other != text:
        raise StartupError(f"{ASCEND}: {other!r} must be equal to {CUDA}, which is {text!r}")
    text = other if text is None else text
    if text is None:
        return None
    listed = [entry.strip() for entry in text.split(",") if entry.strip()]
    if len(set(listed)) < len(listed):
        raise StartupError(f"{CUDA}: {text!r} lists a device twice")
    return listed
