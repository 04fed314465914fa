"""What the ranks of a group do in tests of exchanges, as threads or as processes."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from socket import socket
from typing import Any

import numpy as np
import torch

from cluster.errors import StartupError
from cluster.messages import Address
from cluster.seat import Seat, listen
from engine.expert_collectives import join
from engine.expert_exchange import (
    Exchange,
    GroupLost,
    Header,
    LocalExchange,
    local_exchanges,
)
from kernels.accelerator import CPU

HOST = "127.0.0.1"
Script = Callable[..., Any]

_FORKING = multiprocessing.get_context("forkserver")
_FORKING.set_forkserver_preload([__name__])


def in_threads(size: int, script: Script, *args: Any) -> list[Any]:
    """What script(exchange, *args) gives on each rank."""
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda one: script(one, *args), local_exchanges(size, timeout_s=20)))


def in_processes(size: int, script: Script, *args: Any) -> list[Any]:
    """The same over gloo; None for a rank that has died."""
    listener = listen(HOST)
    address = Address(host=HOST, port=listener.getsockname()[1])
    ranks = []
    for index in range(size):
        ours, theirs = _FORKING.Pipe(duplex=False)
        given = listener if index == 0 else None
        process = _FORKING.Process(
            target=_live,
            args=(Seat(index, size, address), given, theirs, script, args),
            daemon=True,
        )
        process.start()
        theirs.close()
        ranks.append((process, ours))
    listener.close()
    return [_result(*rank) for rank in ranks]


def _live(
    seat: Seat, listener: socket | None, pipe: Connection, script: Script, args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    seat = seat if listener is None else seat.with_listener(listener)
    pipe.send(script(join(seat, CPU, host=HOST, start_timeout_s=20, timeout_s=20), *args))


def _result(process: Any, pipe: Connection) -> Any:
    try:
        return pipe.recv()
    except EOFError:
        return None
    finally:
        process.kill()
        process.join()


# ------------------------------------------------------------------ scripts


def numbers(exchange: Exchange) -> tuple[tuple[Header, ...], list[list[int]]]:
    here = exchange.index
    headers = exchange.agree(Header(rows=here, version=5, digest=1 << 40, leaving=here % 2))
    return headers, exchange.share_counts(np.array([here, 10 * here])).tolist()


def there_and_back(exchange: Exchange, sizes: list[list[int]]) -> tuple[list[float], list[float]]:
    """Each row is 100 times its rank and its number; what comes back is one more."""
    table = np.array(sizes)
    mine = 100.0 * exchange.index + torch.arange(float(table[exchange.index].sum()))
    came = exchange.dispatch(mine.unsqueeze(1), table)
    return came.flatten().tolist(), exchange.combine(came + 1, table).flatten().tolist()


def waits_for_all(exchange: Exchange) -> str:
    """The last is up when the first two have waited in vain."""
    last = exchange.index == exchange.size - 1
    said = ""
    if not last:
        try:
            exchange.all_up(0.0)
        except StartupError as error:
            said = str(error)
    exchange.agree(Header())
    exchange.all_up(20)
    exchange.agree(Header())  # the first rank's process keeps what the others look at
    return said


def rests_and_rings(exchange: Exchange, times: int) -> int:
    """The ranks take turns in ringing, some of them before others have come to rest."""
    heard = 0
    for turn in range(times):
        ears = threading.Event()
        exchange.rest(ears.set)
        if exchange.index == turn % exchange.size:
            exchange.ring()
        heard += ears.wait(20)
        exchange.agree(Header())
    return heard


def one_goes(exchange: Exchange, doing: str) -> float:
    """The last rank goes without a word; how long the others wait for it before they know."""
    if exchange.index == exchange.size - 1:
        exchange.agree(Header())
        if not isinstance(exchange, LocalExchange):
            os._exit(1)
        exchange.close()
        return 0.0
    began = time.monotonic()
    try:
        exchange.agree(Header())
        if doing == "agree":
            exchange.agree(Header())
        else:
            exchange.dispatch(torch.zeros(exchange.size, 3), np.ones((exchange.size,) * 2, int))
    except GroupLost:
        return time.monotonic() - began
    raise AssertionError("it went on without the others")
