"""Do bytes really move between two processes of this machine, and how quickly?

    python -m kv_transfer.path_check [--mib 16] [--rounds 5]

Prints one JSON object: the path, the backends that NIXL brings, bytes, GB/s of writes through
the transport and of memcpy in the same run. What arrived is compared byte by byte. Exit status 1,
and one line on stderr, where the path does not work.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from statistics import median

import torch

from cluster.errors import ClusterError, TransferError
from kv_transfer.open_transport import open_transport

PEER_LIMIT_S = 30.0  # for the other process to answer; it starts an agent in half a second


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mib", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    try:
        print(json.dumps(try_path(options.mib << 20, options.rounds)))
    except (ClusterError, EOFError) as error:
        print(error or "the receiving process has ended early", file=sys.stderr)
        return 1
    return 0


def try_path(nbytes: int, rounds: int) -> dict[str, object]:
    """Raises TransferError or StartupError where bytes do not move, or arrive differently."""
    torch.set_num_threads(1)
    context = multiprocessing.get_context("fork")  # torch is imported, no agent exists yet
    pipe, theirs = context.Pipe()
    process = context.Process(target=_receive, args=(theirs, nbytes), daemon=True)
    process.start()
    theirs.close()  # so that its death ends our waiting
    try:
        return _send(pipe, nbytes, rounds)
    finally:
        pipe.close()
        process.join(PEER_LIMIT_S)


def _send(pipe: Connection, nbytes: int, rounds: int) -> dict[str, object]:
    source = torch.randint(256, (nbytes,), dtype=torch.uint8)
    copy = torch.zeros_like(source)
    transport = open_transport("nixl", "sender")
    try:
        transport.register(source, source_only=True)
        peer = transport.add_peer(_answer(pipe))
        transport.write(peer, source, 0)  # the first write wires up the pair
        write_s = _median_s(lambda: transport.write(peer, source, 0), rounds)
        pipe.send_bytes(b"written")
        if _answer(pipe) != source.numpy().tobytes():
            raise TransferError(f"{transport.path}: the bytes that arrived are not those sent")
        path = transport.path
    finally:
        transport.close()
    from kv_transfer.nixl_transport import available_backends  # it is imported by now

    memcpy_s = _median_s(lambda: copy.copy_(source), rounds)
    return {
        "path": path,
        "backends": available_backends(),
        "bytes": nbytes,
        "gb_per_s": round(nbytes / write_s / 1e9, 2),
        "memcpy_gb_per_s": round(nbytes / memcpy_s / 1e9, 2),
    }


def _receive(pipe: Connection, nbytes: int) -> None:
    ring = torch.zeros(nbytes, dtype=torch.uint8)
    try:
        transport = open_transport("nixl", "receiver")
    except ClusterError as error:
        print(error, file=sys.stderr)
        return
    try:
        transport.register(ring)
        pipe.send_bytes(transport.metadata())
        pipe.recv_bytes()
        pipe.send_bytes(ring.numpy().tobytes())
    except (EOFError, OSError):
        return  # the sender has given up, and says why
    finally:
        transport.close()


def _answer(pipe: Connection) -> bytes:
    if not pipe.poll(PEER_LIMIT_S):
        raise TransferError(f"the receiving process has said nothing for {PEER_LIMIT_S:.0f} s")
    return pipe.recv_bytes()


def _median_s(step: Callable[[], object], rounds: int) -> float:
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    return median(seconds)


if __name__ == "__main__":
    sys.exit(main())
