"""Do bytes really move between two processes of this machine, and how quickly?

    python -m kv_transfer.path_check [--mib 16] [--rounds 5]

Prints one JSON object: the packed path, the backends that NIXL brings, bytes, GB/s of writes
through the transport and of memcpy in the same run; and of the direct path its name and GB/s, or
why a pair of ranks of this machine could not take it. What arrived is compared byte by byte. Exit
status 1, and one line on stderr, where the packed path does not work.
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
from torch import Tensor

from cluster.errors import ClusterError, TransferError
from kv_transfer.open_transport import open_transport

PEER_LIMIT_S = 30.0  # for the other process to answer; it starts an agent in half a second


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mib", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    try:
        packed = try_path("nixl", options.mib << 20, options.rounds)
        print(json.dumps(packed | {"direct": try_direct(options.mib << 20, options.rounds)}))
    except (ClusterError, EOFError) as error:
        print(error or "the receiving process has ended early", file=sys.stderr)
        return 1
    return 0


def try_direct(nbytes: int, rounds: int) -> dict[str, object]:
    """Of the kind that ranks here would take: between GPUs if there are any, else between CPUs."""
    kind = "nvlink" if torch.cuda.device_count() else "host"
    try:
        return {"kind": kind} | try_path(kind, nbytes, rounds)
    except (ClusterError, EOFError) as error:
        return {"kind": kind, "why": str(error) or "the receiving process has ended early"}


def try_path(kind: str, nbytes: int, rounds: int) -> dict[str, object]:
    """Raises TransferError or StartupError where bytes do not move, or arrive differently."""
    torch.set_num_threads(1)
    context = multiprocessing.get_context("fork")  # torch is imported, no agent exists yet
    pipe, theirs = context.Pipe()
    process = context.Process(target=_receive, args=(theirs, kind, nbytes), daemon=True)
    process.start()
    theirs.close()  # so that its death ends our waiting
    try:
        return _send(pipe, kind, nbytes, rounds)
    finally:
        pipe.close()
        process.join(PEER_LIMIT_S)


def _send(pipe: Connection, kind: str, nbytes: int, rounds: int) -> dict[str, object]:
    metadata = _answer(pipe)  # first: a process that has met its GPU cannot be forked
    device = _device(kind, receiving=False)
    source = torch.randint(256, (nbytes,), dtype=torch.uint8).to(device)
    transport = open_transport(kind, "sender", device=device)
    try:
        transport.register(source, source_only=True)
        peer = transport.add_peer(metadata)
        transport.write(peer, source, 0)  # the first write wires up the pair
        write_s = _median_s(lambda: transport.write(peer, source, 0), rounds)
        pipe.send_bytes(b"written")
        if _answer(pipe) != source.cpu().numpy().tobytes():
            raise TransferError(f"{transport.path}: the bytes that arrived are not those sent")
        found = {"path": transport.path, "gb_per_s": round(nbytes / write_s / 1e9, 2)}
    finally:
        transport.close()
    return found | (_beside(source, rounds) if kind == "nixl" else {})


def _beside(source: Tensor, rounds: int) -> dict[str, object]:
    """What NIXL brings, and what the machine can do without it."""
    from kv_transfer.nixl_transport import available_backends  # it is imported by now

    copy = torch.zeros_like(source)
    memcpy_s = _median_s(lambda: copy.copy_(source), rounds)
    return {
        "backends": available_backends(),
        "bytes": source.numel(),
        "memcpy_gb_per_s": round(source.numel() / memcpy_s / 1e9, 2),
    }


def _receive(pipe: Connection, kind: str, nbytes: int) -> None:
    try:
        device = _device(kind, receiving=True)
        ring = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        transport = open_transport(kind, "receiver", device=device)
    except (ClusterError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return
    try:
        transport.register(ring)
        pipe.send_bytes(transport.metadata())
        pipe.recv_bytes()
        pipe.send_bytes(ring.cpu().numpy().tobytes())
    except ClusterError as error:
        print(error, file=sys.stderr)
    except (EOFError, OSError):
        return  # the sender has given up, and says why
    finally:
        transport.close()


def _device(kind: str, *, receiving: bool) -> torch.device:
    if kind != "nvlink":
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.device_count() - 1 if receiving else 0)


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
