"""A group of two ranks on two GPUs, rows over NCCL, against the whole model on one of them.

    python -m tests.bench_expert_gpus

Greedy tokens of the tiny model, one process a GPU as Ray starts them; how long a step, a change of
placement and the exchange of rows of the real model's width take; and what becomes of a rank whose
peer dies inside an exchange.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from socket import socket
from threading import Event
from typing import Any, NoReturn

import numpy as np
import torch

from cluster.expert_placement import Placement
from cluster.messages import Address
from cluster.placement_file import GroupPlacement
from cluster.seat import Seat, listen
from engine.expert_collectives import join
from engine.expert_exchange import Exchange
from engine.expert_group import ExpertGroup
from kernels.accelerator import NVIDIA
from model.batch import Chunk, build_batch
from model.dense_cache import DenseCache
from model.device_weights import DeviceWeights
from model.state import state_fields
from model.transformer import Transformer
from tests.groups import tiny_spec, tiny_weights
from tests.tiny import make_prompt

HOST, SIZE = "127.0.0.1", 2
TOKENS, LENGTHS = 24, (5, 40, 17, 9)
WIDTH, CHOICES = 5120, 6  # of a row of the real model
TIMEOUT_S = 10.0  # of a call, when a peer has died in it
PATIENCE_S = 40.0  # with a rank, before it is killed
STUCK = "stuck"

_SPAWNING = multiprocessing.get_context("spawn")


def main() -> None:
    whole = _run(1, tokens, 0)[0]
    found = _run(SIZE, tokens, 2)
    for alone, shared in zip(whole["ids"], _woven([one["ids"] for one in found]), strict=True):
        assert alone == shared, (alone, shared)
    print(f"tokens of {len(LENGTHS)} requests are those of one GPU")
    for name, told in (("whole model", whole), ("ep 2, 2 redundant, 4 switches", found[0])):
        print(f"{name}: {told['step_ms']:.1f} ms a step; last switch: {told['switch']}")
    for told in _run(SIZE, exchange_times)[:1]:
        for rows, ms in told.items():
            print(f"{rows} rows a rank, {CHOICES} choices: {ms:.2f} ms there and back")
    alone, _ = _run(SIZE, one_dies)
    fate = (
        "had ended" if alone != STUCK else "had to be killed, as the head of its group would do it,"
    )
    print(f"a rank whose peer died inside an exchange {fate} after {PATIENCE_S:g} s at most")


def _woven(parts: list[list[list[int]]]) -> list[list[int]]:
    """Requests in their order again: rank r had r, r + 2, ..."""
    found: list[list[int]] = [[] for _ in LENGTHS]
    for rank, part in enumerate(parts):
        found[rank :: len(parts)] = part
    return found


def tokens(exchange: Exchange, extra: int) -> dict[str, Any]:
    """Greedy answers to this rank's share of the requests; experts move every sixth step."""
    spec = tiny_spec()
    experts = ExpertGroup.first(exchange, "group", spec, extra)
    weights = DeviceWeights(tiny_weights(), NVIDIA.device)
    model = Transformer(spec, weights, make_experts=experts.make_experts)
    ids = [make_prompt(one) for one in LENGTHS[exchange.index :: exchange.size]]
    done = [0] * len(ids)
    cache = DenseCache(state_fields(spec), len(ids))
    random, seconds = np.random.default_rng(0), []
    for step in range(TOKENS):
        if exchange.size > 1 and step % 6 == 5:
            _move(experts, step, random)
        chunks = [Chunk(one, at, len(one) - at) for one, at in zip(ids, done, strict=True)]
        batch = build_batch(
            chunks, image_token_id=spec.image_token_id, ngram=spec.engram_max_ngram_size
        )
        began = time.perf_counter()
        with experts.step(), torch.inference_mode():
            chosen = model.forward(batch, cache).argmax(1).tolist()
        seconds.append(time.perf_counter() - began)
        done = [len(one) for one in ids]
        ids = [[*one, token] for one, token in zip(ids, chosen, strict=True)]
    answers = [one[-TOKENS:] for one in ids]
    median = float(np.median(seconds[5:]))
    return {"ids": answers, "step_ms": 1e3 * median, "switch": experts.slots.last_switch}


def _move(experts: ExpertGroup, version: int, random: np.random.Generator) -> None:
    placed, ready = experts.slots.placed.placement, Event()
    table = np.stack([random.permutation(one.ravel()).reshape(one.shape) for one in placed.slots])
    experts.slots.on_prepared = ready.set
    experts.slots.offer(GroupPlacement("group", version, Placement(table, placed.experts)))
    assert ready.wait(60)
    experts.slots.switch(experts.slots.announce())
    experts.renew_tables()


def exchange_times(exchange: Exchange) -> dict[int, float]:
    """Milliseconds for rows of the real model's width, spread evenly, in bf16 and back."""
    found = {}
    for rows in (1, 16, 64, 256):
        each = max(rows * CHOICES // exchange.size, 1)
        sizes = np.full((exchange.size, exchange.size), each)
        mine = torch.zeros(each * exchange.size, WIDTH, dtype=torch.bfloat16, device="cuda")
        seconds = []
        for _ in range(30):
            torch.cuda.synchronize()
            began = time.perf_counter()
            exchange.combine(exchange.dispatch(mine, sizes), sizes)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
        found[rows] = 1e3 * float(np.median(seconds[10:]))
    return found


def one_dies(exchange: Exchange) -> NoReturn:
    """The last rank dies where the other already waits for its rows."""
    sizes = np.full((exchange.size, exchange.size), 4)
    rows = torch.zeros(8, WIDTH, device="cuda")
    exchange.combine(exchange.dispatch(rows, sizes), sizes)
    torch.cuda.synchronize()
    if exchange.index:
        os._exit(1)
    exchange.dispatch(rows, sizes)
    torch.cuda.synchronize()
    raise AssertionError("it went on without its peer")


def _run(size: int, script: Callable[..., Any], *args: Any) -> list[Any]:
    """What the script gives on each rank; None for one that has ended without."""
    with listen(HOST) as listener:
        address = Address(host=HOST, port=listener.getsockname()[1])
        started = []
        for index in range(size):
            os.environ["CUDA_VISIBLE_DEVICES"] = str(index)
            ours, theirs = _SPAWNING.Pipe(duplex=False)
            seat, given = Seat(index, size, address), None if index else listener
            process = _SPAWNING.Process(target=_live, args=(seat, given, theirs, script, args))
            process.start()
            theirs.close()
            started.append((process, ours))
    return [_result(*one) for one in started]


def _live(
    seat: Seat, listener: socket | None, pipe: Connection, script: Callable[..., Any], args: Any
) -> None:
    seat = seat if listener is None else seat.with_listener(listener)
    exchange = join(seat, NVIDIA, host=HOST, start_timeout_s=60, timeout_s=TIMEOUT_S)
    pipe.send(script(exchange, *args))
    exchange.close()


def _result(process: Any, pipe: Connection) -> Any:
    """None if it has died, STUCK if it neither did nor came to an end."""
    try:
        return pipe.recv() if pipe.poll(PATIENCE_S) else STUCK
    except EOFError:
        return None
    finally:
        process.join(1)
        process.kill()


if __name__ == "__main__":
    main()
