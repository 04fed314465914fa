"""What prefill and decode on two ranks cost one request, against one rank that does it all.

    python -m tests.bench_handoff [prompt tokens] [output tokens] [rounds] [packed | direct]

One rank a process, the tiny model; the rounds of both ways take turns, and the
quickest of each counts, because other work on the machine only ever adds.
"""

from __future__ import annotations

import asyncio
import sys
import time
from contextlib import ExitStack

from cluster.generation import Caller, Timeline
from cluster.messages import Address, Generate, Request, Role, Started, Tokens
from cluster.router import Router
from cluster.wire import Identity, Peers, new_incarnation
from tests.rank_process import RankProcess
from tests.tiny import SECRET, make_prompt, make_request, tiny_config, until


async def main(prompt: int, output: int, rounds: int, path: str) -> None:
    sizes = {"cell_bytes": 512 << 10, "ring_bytes": 16 << 20}
    config = tiny_config(transfer={"path": path, "transport": "nixl", **sizes})
    router = Router(config, SECRET)
    address = await router.start()

    async def find_router() -> Address | None:
        return address

    caller = Caller(config, SECRET, find_router)
    peers = Peers(Identity("caller", new_incarnation(), SECRET), config.wire)
    roles: tuple[Role, ...] = ("prefill", "decode")
    with ExitStack() as life:
        ranks = [life.enter_context(RankProcess(role, 0, config, address)) for role in roles]
        decode = [await asyncio.to_thread(rank.ready) for rank in ranks][1]
        await until(lambda: len(router.members()) == 2)
        request = make_request(make_prompt(prompt), max_tokens=output)

        async def colocated(request: Request) -> tuple[float, float]:
            begun, first = time.perf_counter(), 0.0
            async with await peers.open(decode, Generate(request=request, attempt=1)) as stream:
                async for message in stream:
                    assert isinstance(message, Started | Tokens), message
                    if not first and isinstance(message, Tokens):
                        first = time.perf_counter() - begun
            return first, time.perf_counter() - begun

        async def disaggregated(request: Request) -> tuple[float, float, float]:
            begun, timeline = time.perf_counter(), Timeline()
            async for _ in caller.generate(request, timeline):
                pass
            handed_over = timeline.last("handed_over")
            tail_s = handed_over.detail["tail_s"] if handed_over else 0.0
            return timeline.ttft_s or 0.0, time.perf_counter() - begun, tail_s

        one, two = [], []
        for _ in range(rounds + 1):
            one.append(await colocated(request))
            two.append(await disaggregated(request))
        del one[0], two[0]  # connecting, and the first touch of everything
        ttft, total = min(times[0] for times in one), min(times[1] for times in one)
        ttft_2, total_2 = min(times[0] for times in two), min(times[1] for times in two)
        tail = min(times[2] for times in two)
        print(f"{prompt} prompt and {output} output tokens, {path}, best of {rounds}")
        print(f"  colocated       first token {ttft * 1e3:7.1f} ms  all {total * 1e3:7.1f} ms")
        print(f"  disaggregated   first token {ttft_2 * 1e3:7.1f} ms  all {total_2 * 1e3:7.1f} ms")
        print(f"  ratio {total_2 / total:.3f}; last chunk to accepted {tail * 1e3:.1f} ms")
        await peers.close()
        await caller.close()
    await router.stop()


if __name__ == "__main__":
    prompt, output, rounds = (
        int(given) for given in (*sys.argv[1:4], *("128", "32", "5")[len(sys.argv) - 1 :])
    )
    asyncio.run(main(prompt, output, rounds, sys.argv[4] if len(sys.argv) > 4 else "packed"))
