"""The decode rank of the protocol's model: reservations, and its end of a push."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.faults.protocol_world import (
    PUSHES,
    Leg,
    Push,
    Rules,
    Violated,
    World,
    replaced,
)


class DecodeSide:
    rules: Rules
    ends: bool

    def _decode(self, w: World, leg: Leg) -> Iterator[tuple[str, World]]:
        def become(new: Leg | None) -> World:
            return w._replace(legs=replaced(w.legs, leg, new))

        if leg.state == "over":
            if not leg.said or w.caller.leg != leg.id:
                yield "decode leaves", become(None)
            return
        if leg.heard:
            message, rest = leg.heard[0], leg._replace(heard=leg.heard[1:])
            if message == ("reserve",):
                if w.memory and leg.whole:
                    if rest.heard:  # whoever waits in turn still hears its caller go
                        yield "decode hears that it waits in vain", become(None)
                    return
                if w.memory:
                    full = rest._replace(state="over", said=(("no room",),))
                    yield "no room", become(full)
                    return
                granted = rest._replace(
                    state="granted", reservation=leg.id, said=(("reserved", leg.id),)
                )
                if any(push.attached and push.flying for push in w.pushes):
                    raise Violated("memory was granted while its last writer may write")
                yield "decode grants", become(granted)._replace(memory=leg.id)
            else:
                yield "decode hears its caller go", self._release(become(None), leg)
        elif leg.state == "accepted":
            if self.ends and not leg.whole:
                if w.preempted > w.faults:  # a loss may take the word of the first one with it
                    raise Violated("it was preempted again, and nothing was lost since")
                given = leg._replace(state="over", said=(*leg.said, ("preempted",)))
                after = self._release(become(given), leg)
                yield "decode preempts it", after._replace(preempted=w.preempted + 1)
            done = leg._replace(state="over", said=(*leg.said, ("rest",)))
            yield "decode answers", self._release(become(done), leg)

    def _release(self, w: World, leg: Leg) -> World:
        """The caller's side needs the memory no more."""
        if not leg.reservation or w.memory != leg.reservation:
            return w
        for push in w.pushes:
            if push.reservation == leg.reservation and push.attached:
                told = push._replace(said=(*push.said, ("cancel",)))
                w = w._replace(pushes=replaced(w.pushes, push, told))
                if self.rules.quarantine:
                    return w._replace(quarantined=True)
        return w._replace(memory=0)

    def _receive(self, w: World, push: Push) -> Iterator[tuple[str, World]]:
        """Decode's end of a push hears the next message."""
        if not push.heard:
            return
        message, rest = push.heard[0], push._replace(heard=push.heard[1:])
        legs = [leg for leg in w.legs if leg.reservation == push.reservation]
        leg = next((leg for leg in legs if leg.state == "granted"), None)

        def become(new: Push | None) -> World:
            return w._replace(pushes=replaced(w.pushes, push, new))

        def say(*words: Any, **changes: Any) -> World:
            return become(rest._replace(said=(*push.said, words), **changes))

        match message:
            case ("open", _):
                free = leg is not None and not any(other.attached for other in w.pushes)
                if free:
                    yield "decode opens", say("opened", attached=True)
                else:
                    yield "decode refuses", say("rejected")
            case ("cancelled",):
                yield "decode is free of it", self._detached(become(None), push)
            case _ if leg is None or not push.attached:
                yield "decode ignores it", become(rest)
            case ("pushed", number):
                filled = leg._replace(blocks=(*leg.blocks, w.cell))
                after = say("unpacked")._replace(legs=replaced(w.legs, leg, filled))
                yield f"decode unpacks {number}", after
            case ("commit",):
                right = tuple((push.reservation, number) for number in range(PUSHES))
                if self.rules.digests and leg.blocks != right:
                    failed = leg._replace(said=(*leg.said, ("failed",)), state="over")
                    after = say("rejected")._replace(legs=replaced(w.legs, leg, failed))
                    yield "decode rejects", self._release(after, leg)
                    return
                if leg.blocks != right or w.memory != push.reservation:
                    raise Violated(f"decode continues {leg.blocks}, which nobody has promised")
                taken = leg._replace(state="accepted")
                after = say("accepted", attached=False)
                yield "decode accepts", after._replace(legs=replaced(w.legs, leg, taken))

    def _detached(self, w: World, push: Push) -> World:
        """No write of that push counts any more: by the writer's word, or because it is lost."""
        if not push.attached:
            return w
        for leg in w.legs:
            if leg.reservation == push.reservation and leg.state == "granted":
                over = leg._replace(state="over", said=(*leg.said, ("lost",)))
                w = w._replace(legs=replaced(w.legs, leg, over))
                return w._replace(memory=0) if w.memory == push.reservation else w
        if w.quarantined and w.memory == push.reservation:
            return w._replace(memory=0, quarantined=False)
        return w
