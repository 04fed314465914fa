"""Chooses ranks. Pure: load snapshots in, a choice out, or why there is none; it calls nobody.

Pools are small, so all their ranks are in view. Ties go to the lower name, so that equal inputs
give equal choices wherever this runs: in the router, in a caller whose router is away, in a
simulator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from cluster.config import RouterSection
from cluster.membership import Roster, blocks_of, blocks_to_decode
from cluster.messages import Endpoint, Load, Member, NoWorkers, Role, Route, Routed


def decide(
    roster: Roster, route: Route, settings: RouterSection
) -> tuple[Routed | NoWorkers, Roster]:
    """The choice, and the roster with the request charged to the chosen ranks."""
    colocated = settings.colocated or route.colocated
    answer = choose(
        roster,
        route,
        colocated=colocated,
        local_tokens=settings.local_prefill_tokens,
        retry_after_s=settings.retry_after_s,
    )
    return answer, roster.charge(route, answer) if isinstance(answer, Routed) else roster


def choose(
    roster: Roster,
    route: Route,
    *,
    colocated: bool,
    retry_after_s: float,
    local_tokens: int = 0,
) -> Routed | NoWorkers:
    """The prefill rank with the fewest queued tokens and the decode rank with the fewest requests.

    Ranks with room come before full ones; a full one is still a choice, because only the rank
    itself knows when it will have room. `colocated`: a decode rank alone does it all. So does one
    with room for it at once when the prompt is short: at most `local_tokens`, those that it has
    still to run included.
    """
    prefill: Endpoint | None = None
    if not colocated and not route.decode_only:
        near = _near(roster, route, local_tokens)
        if near is not None:
            return Routed(prefill=None, decode=near)
        prefill = _first("prefill", roster, route, _room_to_prefill)
        if prefill is None:
            return NoWorkers(
                message=_why_not("prefill", roster, route), retry_after_s=retry_after_s
            )
    decode = _first("decode", roster, route, _room_to_decode, shown=colocated)
    if decode is None:
        message = _why_not("decode", roster, route, shown=colocated)
        return NoWorkers(message=message, retry_after_s=retry_after_s)
    return Routed(prefill=prefill, decode=decode)


def _first(
    role: Role,
    roster: Roster,
    route: Route,
    has_room: Callable[[Load, Route], bool],
    *,
    shown: bool = True,
) -> Endpoint | None:
    """Of those who may take it the first with room, else the first."""
    full: Endpoint | None = None
    for member in _willing(role, roster, route, shown=shown):
        if has_room(member.load, route):
            return member.endpoint
        full = full or member.endpoint
    return full


def _near(roster: Roster, route: Route, local_tokens: int) -> Endpoint | None:
    """The decode rank that may run this prompt itself."""
    for member in _willing("decode", roster, route) if route.length <= local_tokens else ():
        queued = member.load.waiting_tokens + route.length
        if queued <= local_tokens and _room_to_decode(member.load, route):
            return member.endpoint
    return None


def _willing(role: Role, roster: Roster, route: Route, *, shown: bool = True) -> Iterator[Member]:
    """Those who may take it, the least work first; `shown`: they run the prompt and its images."""
    for member in _leading(role, roster):
        lost = member.endpoint.incarnation in route.avoid
        blind = shown and _is_blind(member, route)
        if not (member.draining or lost or blind or _too_long(member, route)):
            yield member


def _leading(role: Role, roster: Roster) -> Iterator[Member]:
    return (member for member in roster.pool(role) if not member.follows)


def _room_to_prefill(load: Load, route: Route) -> bool:
    return load.free_blocks >= blocks_of(route.length, load)


def _room_to_decode(load: Load, route: Route) -> bool:
    return load.free_slots > 0 and load.free_blocks >= blocks_to_decode(route, load)


def _too_long(member: Member, route: Route) -> bool:
    return route.longest > member.load.max_length > 0


def _is_blind(member: Member, route: Route) -> bool:
    return route.images and member.load.images is None


def _why_not(role: Role, roster: Roster, route: Route, *, shown: bool = True) -> str:
    pool = list(_leading(role, roster))
    if not pool:
        return f"no {role} worker is up"
    reasons = []
    draining = sum(member.draining for member in pool)
    lost = sum(member.endpoint.incarnation in route.avoid for member in pool)
    blind = sum(shown and _is_blind(member, route) for member in pool)
    short = [member.load.max_length for member in pool if _too_long(member, route)]
    if draining:
        reasons.append(f"{draining} draining")
    if lost:
        reasons.append(f"{lost} avoided by this request")
    if blind:
        reasons.append(f"{blind} without a vision encoder for its images")
    if short:
        reasons.append(
            f"{len(short)} for at most {max(short)} tokens where {route.longest} are asked"
        )
    return f"no {role} worker can take it: {len(pool)} up, of these {', '.join(reasons)}"
