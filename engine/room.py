"""Memory for one step: leases grow as answers do; when no block is free, the youngest gives way.

Two kinds never give way: the oldest of those whose leases still grow, and whoever holds all that
he can ever need. So some answer always runs to its end, and what it held goes to the next. Knows
nothing of models, sockets, or of where a preempted request goes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.errors import NoRoom
from engine.request import Running, Settle, settled
from engine.schedule import Grant


@dataclass(frozen=True)
class Room:
    """What can run now. Grants that are missing wait until others give memory back."""

    grants: list[Grant]
    preempted: list[Running]  # their memory is with others already


def make_room(
    running: Sequence[Running], grants: Sequence[Grant], settle: Settle = settled
) -> Room:
    """Extends the leases of `grants` to what they will write, and takes others' memory for it.

    `running` are all requests of the engine in order of arrival, which is their rank here.
    Whoever gives way is settled first: once released, its blocks may go to anybody at once.
    """
    preempted: list[Running] = []
    ready = set()
    for grant in sorted(grants, key=lambda grant: grant.index):
        one = running[grant.index]
        while one not in preempted:
            try:
                one.lease.extend(grant.start + grant.count)
            except NoRoom:
                victim = _youngest([other for other in running if other not in preempted])
                if victim is None:
                    break
                settle([victim])
                victim.lease.release()
                preempted.append(victim)
            else:
                ready.add(grant.index)
                break
    return Room([grant for grant in grants if grant.index in ready], preempted)


def _youngest(running: Sequence[Running]) -> Running | None:
    """Of those that may be asked to give way; the one who needs the memory may be it."""
    growing = [one for one in running if one.grows]
    return growing[-1] if len(growing) > 1 else None
