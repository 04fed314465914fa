"""The prefill rank of the protocol's model: a prompt, and its end of a push."""

from __future__ import annotations

from collections.abc import Iterator

from tests.faults.protocol_world import PUSHES, Job, Push, Rules, World, replaced


class PrefillSide:
    rules: Rules

    def _prefill(self, w: World, job: Job) -> Iterator[tuple[str, World]]:
        def become(new: Job) -> World:
            return w._replace(jobs=replaced(w.jobs, job, new))

        pushing = any(push.job == job.id for push in w.pushes)
        if job.leaving:
            if not pushing and not job.said:
                yield "prefill frees", w._replace(jobs=replaced(w.jobs, job, None))
            elif job.said and w.caller.job != job.id:
                yield "nobody hears", become(job._replace(said=()))
            return
        if job.heard:
            message, rest = job.heard[0], job._replace(heard=job.heard[1:])
            match message:
                case ("prefill",):
                    yield "prefill takes it", become(rest)
                case ("push to", reservation):
                    yield "prefill hears a place", become(rest._replace(place=reservation))
                case _:  # its caller has gone
                    after = self._give_up(become(rest._replace(leaving=True)), job.id, "")
                    yield "prefill hears its caller go", after
            return
        if not job.leased:
            if not any(other.leased for other in w.jobs):
                yield (
                    "prefill starts",
                    become(job._replace(leased=True, said=(*job.said, ("started",)))),
                )
            return
        if not job.computed:
            yield (
                "prefill is done",
                become(job._replace(computed=True, said=(*job.said, ("first",)))),
            )
        if job.place and not pushing:
            push = Push(job.id, job.place, (("open", job.place),))
            yield "push opens", become(job._replace(place=0))._replace(pushes=(*w.pushes, push))

    def _give_up(self, w: World, job: int, then: str) -> World:
        for push in w.pushes:
            if push.job == job and not push.giving_up:
                w = w._replace(
                    pushes=replaced(w.pushes, push, push._replace(giving_up=then or "quietly"))
                )
        return w

    def _push(self, w: World, push: Push) -> Iterator[tuple[str, World]]:
        def become(new: Push | None) -> World:
            return w._replace(pushes=replaced(w.pushes, push, new))

        (job,) = [job for job in w.jobs if job.id == push.job]
        tag = (push.reservation, push.sent)
        if push.flying:
            landed = become(
                push._replace(
                    flying=False,
                    sent=push.sent + 1,
                    heard=(*push.heard, ("pushed", push.sent)),
                )
            )
            yield "write lands", landed._replace(cell=tag)
        elif push.giving_up and ("cancelled",) not in push.heard:
            yield (
                "prefill says that it stops",
                become(push._replace(heard=(*push.heard, ("cancelled",)))),
            )
        elif push.giving_up:
            pass  # decode's end is not over
        elif push.said:
            message, rest = push.said[0], push._replace(said=push.said[1:])
            match message:
                case ("opened",):
                    yield "prefill may write", become(rest._replace(opened=True))
                case ("unpacked",):
                    yield "prefill has credit", become(rest._replace(credit=True))
                case ("accepted",):
                    over = job._replace(
                        said=(*job.said, ("handed over", push.reservation), ("bye",)), leaving=True
                    )
                    yield "handed over", become(None)._replace(jobs=replaced(w.jobs, job, over))
                case ("rejected",) if push.opened:
                    over = job._replace(said=(*job.said, ("failed",)), leaving=True)
                    after = become(rest._replace(giving_up="quietly"))
                    yield "prefill is rejected", after._replace(jobs=replaced(w.jobs, job, over))
                case _:  # cancelled, or the reservation is no more
                    yield (
                        "prefill gives the place up",
                        self._not_there(
                            become(rest._replace(giving_up="said")), push.job, push.reservation
                        ),
                    )
        elif push.opened and push.credit and push.sent < PUSHES:
            yield "write", become(push._replace(flying=True, credit=False))
        elif push.sent == PUSHES and push.credit and job.computed and not push.committed:
            yield "commit", become(push._replace(committed=True, heard=(*push.heard, ("commit",))))

    def _not_there(self, w: World, job_id: int, reservation: int) -> World:
        for job in w.jobs:
            if job.id == job_id and not job.leaving and self.rules.push_failed:
                told = job._replace(said=(*job.said, ("push failed", reservation)))
                w = w._replace(jobs=replaced(w.jobs, job, told))
        return w
