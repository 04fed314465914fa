"""The exchange between processes: torch.distributed, with the backend of the accelerator.

Headers and counts always travel by gloo, on the host; rows by gloo, NCCL or HCCL. The first rank
keeps the store at which the others meet; a key of it wakes a group at rest. Neither that store nor
these libraries ask a peer who it is: they listen on `wire.host` or its interface only.
Knows nothing of experts, placements or requests.
"""

from __future__ import annotations

import fcntl
import os
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from cluster.errors import StartupError
from cluster.replica_dispatch import Ints
from cluster.seat import Seat
from engine.expert_exchange import GroupLost, Header
from kernels.accelerator import Accelerator

SIOCGIFADDR = 0x8915  # Linux: the address of an interface
LISTEN = timedelta(days=20)  # torch counts milliseconds in 32 bits
# In the store, of the last rests; a listener is a thread that wakes within milliseconds of a rest.
KEPT_RINGS = 4096
UP_PAUSE_S = 0.05  # between two looks whether all have loaded, which takes seconds to minutes


def join(
    seat: Seat,
    accelerator: Accelerator,
    *,
    host: str,
    start_timeout_s: float,
    timeout_s: float,
) -> TorchExchange:
    """Meets the other ranks; blocks until all are there. This one listens at `host`.

    Raises StartupError when they are not there within `start_timeout_s`. `timeout_s` bounds every
    call later on, so it must be longer than the longest step.
    """
    if (interface := interface_of(host)) is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    patience, timeout = timedelta(seconds=start_timeout_s), timedelta(seconds=timeout_s)
    where = f"{seat.address.host}:{seat.address.port}"
    try:
        store = TCPStore(
            seat.address.host,
            seat.address.port,
            is_master=seat.index == 0,
            timeout=patience,
            wait_for_workers=False,
            master_listen_fd=seat.listener if seat.index == 0 else None,
        )
        ears = TCPStore(seat.address.host, seat.address.port, timeout=patience)
        rows = accelerator.collectives
        dist.init_process_group(
            "gloo" if rows == "gloo" else f"cpu:gloo,{accelerator.device_type}:{rows}",
            store=PrefixStore("group", store),
            rank=seat.index,
            world_size=seat.size,
            timeout=timeout,
        )
    except (RuntimeError, ValueError, OSError) as error:
        raise StartupError(
            f"rank {seat.index} of {seat.size} has not met the others at {where} within "
            f"{start_timeout_s:g} s: {error}"
        ) from error
    return TorchExchange(seat, store, ears, timeout)


def interface_of(host: str) -> str | None:
    """Name of this machine's network interface with that address; None if there is none."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        wanted = socket.inet_aton(socket.gethostbyname(host))
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no address
                request = struct.pack("256s", name.encode()[:15])
                if fcntl.ioctl(asked.fileno(), SIOCGIFADDR, request)[20:24] == wanted:
                    return name
    return None


class TorchCollectives:
    """Of the ranks of one group of torch.distributed's; None: its default group."""

    def __init__(self, index: int, size: int, group: dist.ProcessGroup | None = None) -> None:
        self.index, self.size, self._group = index, size, group

    def share_counts(self, counts_E: Ints) -> Ints:
        told = torch.empty((self.size, *counts_E.shape), dtype=torch.int64)
        mine = torch.from_numpy(np.ascontiguousarray(counts_E))
        with self._lost("waits for the others' numbers"):
            dist.all_gather(list(told.unbind()), mine, group=self._group)
        found: Ints = told.numpy()
        return found

    def dispatch(self, rows: Tensor, sizes: Ints) -> Tensor:
        return self._all_to_all(rows, sizes)

    def combine(self, rows: Tensor, sizes: Ints) -> Tensor:
        return self._all_to_all(rows, sizes.T)

    def _all_to_all(self, rows: Tensor, sizes: Ints) -> Tensor:
        """Known to all alike: where nothing would leave its rank, nobody calls."""
        if sizes.sum() == sizes.trace():
            return rows
        sent, received = sizes[self.index].tolist(), sizes[:, self.index].tolist()
        arrived = rows.new_empty((sum(received), *rows.shape[1:]))
        with self._lost("exchanges rows"):
            dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=self._group)
        return arrived

    @contextmanager
    def _lost(self, doing: str) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, ValueError) as error:
            raise GroupLost(f"rank {self.index} of {self.size} {doing}: {error}") from error


class TorchExchange(TorchCollectives):
    """One a process: torch.distributed's default group."""

    def __init__(self, seat: Seat, store: TCPStore, ears: TCPStore, timeout: timedelta) -> None:
        """`ears` is a second connection to `store`: waiting keeps one busy; `timeout`: calls'."""
        super().__init__(seat.index, seat.size)
        self._timeout = timeout
        self._store, self._ears = store, ears
        self._rests = 0
        self._awaited: queue.Queue[tuple[int, Callable[[], None]] | None] = queue.Queue()
        self._closed = False
        self._listener = threading.Thread(target=self._listen, name="group listener", daemon=True)
        self._listener.start()

    def all_up(self, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        try:
            self._store.set(_up(self.index), "up")
            while missing := [r for r in range(self.size) if not self._store.check([_up(r)])]:
                if self._closed or time.monotonic() > deadline:
                    raise StartupError(
                        f"rank {self.index} of {self.size} waited {limit_s:g} s for rank "
                        f"{', '.join(map(str, missing))} to be ready"
                    )
                time.sleep(UP_PAUSE_S)
        except RuntimeError as error:  # the store is the first rank's
            raise StartupError(
                f"rank {self.index} of {self.size} lost its group: {error}"
            ) from error

    def agree(self, header: Header) -> tuple[Header, ...]:
        told = self.share_counts(np.array(header, np.int64))
        return tuple(Header(*one) for one in told.tolist())

    def part(self, size: int) -> TorchCollectives:
        with self._lost("meets its neighbours"):
            groups = [
                dist.new_group(list(range(first, first + size)), timeout=self._timeout)
                for first in range(0, self.size, size)
            ]
        return TorchCollectives(self.index % size, size, groups[self.index // size])

    def rest(self, heard: Callable[[], None]) -> None:
        self._awaited.put((self._rests, heard))
        self._rests += 1

    def ring(self) -> None:
        last = self._rests - 1
        with self._lost("rings the others"):
            self._store.set(_ring(last), "rung")
            if last >= KEPT_RINGS:
                self._store.delete_key(_ring(last - KEPT_RINGS))

    def close(self) -> None:
        """The connections end; on a device, what is under way there is given up as well."""
        if self._closed:
            return
        self._closed = True
        self._awaited.put(None)
        with suppress(GroupLost):  # whoever is at rest turns once more, and finds the group gone
            self.ring()
        if dist.is_initialized():
            dist.destroy_process_group()

    # ---------------------------------------------------------------- in the listener's thread

    def _listen(self) -> None:
        while (awaited := self._awaited.get()) is not None:
            while self._awaited.qsize() and (newer := self._awaited.get()) is not None:
                awaited = newer
            rest, heard = awaited
            self._until_rung(rest)
            heard()

    def _until_rung(self, rest: int) -> None:
        """A store that has gone rings too: the next call tells why."""
        with suppress(RuntimeError):
            while not self._ears.check([_ring(rest)]):
                self._ears.wait([_ring(rest)], LISTEN)


def _up(rank: int) -> str:
    return f"up/{rank}"


def _ring(rest: int) -> str:
    return f"ring/{rest}"
