"""What prefill and decode on two ranks cost one request, against one rank that does it all.

    python -m tests.bench_handoff [prompt tokens] [output tokens] [rounds] [packed | direct] [gpu]

One rank a process, the tiny model; the rounds of both ways take turns, and the
quickest of each counts, because other work on the machine only ever adds. With "gpu" each rank
has a GPU of its own, if there are two, and only the handoff is measured.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch

from cluster.config import ClusterConfig
from cluster.generation import Caller, Timeline
from cluster.messages import Address, Generate, Request, Role, Started, Tokens
from cluster.router import Router
from cluster.wire import Identity, Peers, new_incarnation
from tests.rank_process import RankProcess
from tests.tiny import MODEL, SECRET, make_prompt, make_request, tiny_config, until

LONGEST = 12288  # positions on a GPU


async def main(prompt: int, output: int, rounds: int, path: str, gpu: bool = False) -> None:
    with TemporaryDirectory() as folder:
        config = _gpu_config(path, Path(folder)) if gpu else tiny_config(transfer=_transfer(path))
        await _measure(config, prompt, output, rounds, path, gpu)


def _transfer(path: str, cell_bytes: int = 512 << 10) -> dict[str, object]:
    sizes = {"cell_bytes": cell_bytes, "ring_bytes": 32 * cell_bytes}
    return {"path": path, "transport": "nixl", **sizes}


def _gpu_config(path: str, folder: Path) -> ClusterConfig:
    """The tiny model, made longer: a folder with its files."""
    raw = json.loads((MODEL / "config.json").read_text(encoding="utf-8"))
    raw["text_config"]["max_position_embeddings"] = LONGEST
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    shutil.copy(MODEL / "tokenizer.json", folder)
    engine = {"num_blocks": 1024, "num_slots": 8, "chunk_tokens": 2048, "max_length": LONGEST}
    pool = {"accelerator": "nvidia", "gpus": 1.0, "engine": engine}
    return tiny_config(
        model={"path": str(folder)},
        prefill=pool,
        decode=pool,
        transfer=_transfer(path, 8 << 20),
        wire={"heartbeat_s": 0.2, "t_detect_s": 10.0},
    )


async def _measure(
    config: ClusterConfig, prompt: int, output: int, rounds: int, path: str, gpu: bool
) -> None:
    router = Router(config, SECRET)
    address = await router.start()

    async def find_router() -> Address | None:
        return address

    caller = Caller(config, SECRET, find_router)
    peers = Peers(Identity("caller", new_incarnation(), SECRET), config.wire)
    roles: tuple[Role, ...] = ("prefill", "decode")
    with ExitStack() as life:
        ranks = [
            life.enter_context(RankProcess(role, 0, config, address, environ=environ, timed=True))
            for role, environ in zip(roles, _environs(gpu), strict=True)
        ]
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
            if not gpu:
                one.append(await colocated(request))
            two.append(await disaggregated(request))
        del one[:1], two[0]  # connecting, and the first touch of everything
        ttft_2, total_2 = min(times[0] for times in two), min(times[1] for times in two)
        tail = min(times[2] for times in two)
        print(f"{prompt} prompt and {output} output tokens, {path}, best of {rounds}")
        if one:
            ttft, total = min(times[0] for times in one), min(times[1] for times in one)
            print(f"  colocated       first token {ttft * 1e3:7.1f} ms  all {total * 1e3:7.1f} ms")
            print(f"  ratio of all    {total_2 / total:.3f}")
        print(f"  disaggregated   first token {ttft_2 * 1e3:7.1f} ms  all {total_2 * 1e3:7.1f} ms")
        print(f"  last chunk to accepted {tail * 1e3:.1f} ms")
        sent, heard = [await asyncio.to_thread(rank.times) for rank in ranks]
        steps = [heard[number] - sent[number // 2] for number in range(1, len(heard), 2)][1:]
        heard_s = [heard[number] - sent[number // 2] for number in range(0, len(heard), 2)][1:]
        print(
            f"  commit to decode's first step {median(steps) * 1e3:.2f} ms (best "
            f"{min(steps) * 1e3:.2f}), of which until it is heard {median(heard_s) * 1e3:.2f}"
        )
        await peers.close()
        await caller.close()
    await router.stop()


def _environs(gpu: bool) -> list[dict[str, str] | None]:
    """Of the prefill and of the decode rank."""
    if not gpu:
        return [None, None]
    last = str(torch.cuda.device_count() - 1)
    return [{"CUDA_VISIBLE_DEVICES": number} for number in ("0", last)]


if __name__ == "__main__":
    prompt, output, rounds = (
        int(given) for given in (*sys.argv[1:4], *("128", "32", "5")[len(sys.argv) - 1 :])
    )
    path = sys.argv[4] if len(sys.argv) > 4 else "packed"
    asyncio.run(main(prompt, output, rounds, path, gpu=sys.argv[5:] == ["gpu"]))
