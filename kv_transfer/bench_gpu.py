"""How quick is request state moved between two GPUs, against the copy engine in the same run?

    python -m kv_transfer.bench_gpu [--out FILE] [--longest 1048576] [--parts NAME ...]

Two processes, a GPU each (or one GPU for both, which the title says): peer copy by the copy
engine, rows pushed and pulled by kernel into shuffled blocks, pages, packed pushes and pages over
NIXL, what pushing costs a prefill beside it, and digests. Each part stands alone: one that fails
is named, and the others still run. Prints one table; the JSON is written after every part.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from cluster.messages import Span
from kernels.ops.kv_push import kv_push
from kernels.push_table import Pieces, PushTable, row_formats, tabulate
from kv_transfer import cuda_driver
from kv_transfer.bench_bars import bars
from kv_transfer.bench_gpu_packed import PackedRequest
from kv_transfer.bench_gpu_side import BLOCK_TOKENS, GpuSide, serve, timing_event
from kv_transfer.plan import pack_into_pushes
from kv_transfer.reach import Move, Moves
from kv_transfer.row_pieces import between
from model.spec import ModelSpec
from model.state import PerToken, StateField, state_fields

_MODEL = Path(__file__).parents[1] / "deploy" / "models" / "deepseek-v41-flash"
_LENGTHS = (8 << 10, 32 << 10, 128 << 10, 1 << 20)
_PROGRAMS = (8, 16, 24, 32, 64, 132)
_PAGES = (1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10)
_PAGE_ROW = 1024  # a page is moved as rows of this many bytes
_RING_BYTES = 256 << 20
_PRODUCTS = 24  # of 8192 x 8192 x 8192, about 37 ms: much less than a chunk of 8 K positions
_WAIT_S = 120.0


class _Peer:
    """The receiving process, called by the names of GpuSide's methods."""

    def __init__(self, fields: tuple[StateField, ...], longest: int, gpu: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=serve, args=(theirs, fields, longest, _RING_BYTES, gpu), daemon=True
        )
        self._process.start()
        theirs.close()

    def ask(self, method: str, *arguments: Any) -> Any:
        self.tell(method, *arguments)
        return self.answer()

    def tell(self, method: str, *arguments: Any) -> None:
        self.pipe.send((method, arguments))

    def answer(self) -> Any:
        if not self.pipe.poll(_WAIT_S):
            raise RuntimeError(f"the receiving process has said nothing for {_WAIT_S:.0f} s")
        answer, failure = self.pipe.recv()
        if failure:
            raise RuntimeError(f"in the receiving process:\n{failure}")
        return answer

    def answered(self) -> bool:
        return self.pipe.poll()

    def close(self) -> None:
        self.pipe.close()
        self._process.join(20)
        if self._process.is_alive():
            self._process.kill()


class Bench:
    def __init__(self, fields: tuple[StateField, ...], longest: int) -> None:
        self.gpus = torch.cuda.device_count()
        self.peer = _Peer(fields, longest, gpu=min(1, self.gpus - 1))
        self.side = GpuSide("sender", fields, longest, _RING_BYTES)
        self.lengths = [length for length in _LENGTHS if length <= longest]
        self.id = self.side.transport.add_peer(self.peer.ask("metadata"))
        self.areas = self.side.transport.offered(self.id)
        self.there = self.side.stands(self.areas, self.peer.ask("tables"))
        self.ring = self.areas[2].address
        self.rows: list[dict[str, Any]] = []
        self._copied: dict[int, float] = {}

    def add(self, part: str, case: str, nbytes: int, seconds: float, **more: Any) -> None:
        """One row: `of copy` is the copy engine's time for as many bytes over this one's."""
        row = {"part": part, "case": case, "bytes": nbytes, "us": round(seconds * 1e6, 1)}
        if nbytes:
            row["gb_per_s"] = round(nbytes / seconds / 1e9, 2)
            row["of_copy"] = round(self.copy_s(nbytes) / seconds, 3)
        self.rows.append({**row, **more})

    def copy_s(self, nbytes: int) -> float:
        """The copy engine, one run of bytes into the peer's memory."""
        if nbytes not in self._copied:
            source, target = self.side.blocks.data_ptr(), self.areas[0].address
            stream = self.side.stream.cuda_stream
            most = min(nbytes, self.areas[0].nbytes)  # a state is its blocks and some rings
            seconds = self.side.device_s(lambda: cuda_driver.copy(target, source, most, stream))
            self._copied[nbytes] = seconds * nbytes / most
        return self._copied[nbytes]

    # ---------------------------------------------------------------- parts

    def right(self) -> None:
        """Every row arrives, and both sides and the CPU agree on the digests."""
        length = self.lengths[0] - 1  # odd: tails too
        self.peer.ask("clear")
        spans = self.side.spans(length)
        pieces = between(spans, self.side.stands(), self.there)
        ours = self.side.transport.push(self.id, pieces, len(spans))
        theirs, _ = self.peer.ask("hash_state", length)
        if ours != theirs:
            raise RuntimeError("digests differ")
        self.add("right", f"{len(spans)} digests equal on both sides", 0, 0.0)

    def copy(self) -> None:
        for nbytes in (1 << 20, 16 << 20, 256 << 20):
            self.add("peer copy", f"{nbytes >> 20} MiB", nbytes, self.copy_s(nbytes))
        for length in self.lengths:
            nbytes = self.side.layout.state_bytes(length)
            self.add("peer copy", _tokens(length), nbytes, self.copy_s(nbytes))

    def direct(self) -> None:
        for length in self.lengths:
            spans = self.side.spans(length)
            ours = self.side.stands()
            for way, pieces in (
                ("push", between(spans, ours, self.there)),
                ("pull", between(spans, self.there, ours)),
            ):
                table = self.side.table(pieces)
                for programs in _PROGRAMS:
                    plain = self.side.push_s(table, len(spans), programs, hashed=False)
                    hashed = self.side.push_s(table, len(spans), programs)
                    self.add(
                        f"direct {way}", f"{_tokens(length)}, {programs} programs",
                        table.nbytes, hashed, us_without_digest=round(plain * 1e6, 1),
                        digest_share=round(hashed / plain - 1, 3),
                    )  # fmt: skip

    def receiver(self) -> None:
        """Digests from the blocks, on the device that received them."""
        for length in self.lengths:
            nbytes = self.side.layout.state_bytes(length)
            for programs in (32, 132):
                seconds = self.peer.ask("hash_device_s", length, programs)
                self.add("digest there", f"{_tokens(length)}, {programs} programs", nbytes, seconds)

    def host(self) -> None:
        """Wall time of what a rank does, host work and waiting included."""
        last = self.side.spans(self.lengths[0] - 1)
        per_token = {f.name for f in self.side.fields if isinstance(f.growth, PerToken)}
        ends = [span for span in last if span.field not in per_token]
        for name, spans in (("8 K request in one push", last), ("its rings and tails", ends)):
            pieces = between(spans, self.side.stands(), self.there)
            nbytes = int((pieces.rows * pieces.row_bytes).sum())
            table = self.side.table(pieces)
            device = self.side.push_s(table, len(spans), 32)

            def push(spans: list[Span] = spans) -> object:
                found = between(spans, self.side.stands(), self.there)
                return self.side.transport.push(self.id, found, len(spans))

            def plan(spans: list[Span] = spans) -> object:
                return between(spans, self.side.stands(), self.there)

            moves = self.side.reach.plan([Move(pieces)], len(spans))

            def make(moves: Moves = moves) -> object:
                moves.start(0)
                return moves.digests()

            more = {
                f"{what}_us": round(_wall_s(work) * 1e6, 1)
                for what, work in (("wall", push), ("plan", plan), ("planned_wall", make))
            }
            self.add("last push", name, nbytes, device, **more)
        walls = [self.peer.ask("hash_state", self.lengths[0])[1] for _ in range(7)]
        self.add("last push", "digest there, wall", 0, median(walls))
        planned = self.peer.ask("planned_hash_s", self.lengths[0])
        self.add("last push", "digest there, wall, planned before", 0, planned)
        asked = _wall_s(partial(self.peer.ask, "tables"))
        self.add("last push", "a word and its answer between the processes", 0, asked)

    def prefill(self) -> None:
        """Matrix products beside pushes: all the time, and one push for 24 products.

        In turns with products beside as many pushes of nothing: a device that has just rested is
        quicker by more than what is to be measured.
        """
        left = torch.randn(8192, 8192, device=self.side.device, dtype=torch.bfloat16)
        large, small = (
            self.side.table(between(spans, self.side.stands(), self.there))
            for spans in (self.side.spans(self.lengths[-1]), self.side.spans(self.lengths[0]))
        )
        nothing = self.side.table(between([], self.side.stands(), self.there))
        found = torch.zeros(64, dtype=torch.int64, device=self.side.device)
        done = torch.zeros(1, dtype=torch.int64, device=self.side.device)

        def seconds(table: PushTable, pushes: int, programs: int) -> float:
            torch.cuda.synchronize()
            with torch.cuda.stream(self.side.stream):
                for _ in range(pushes):
                    kv_push(table, found, done, programs)
            start, stop = timing_event(), timing_event()
            start.record()
            for _ in range(_PRODUCTS):
                left @ left
            stop.record()
            stop.synchronize()
            return float(start.elapsed_time(stop)) / 1e3

        seconds(nothing, 1, 8)
        for name, table, pushes in (
            ("pushing all the time", large, 40),
            ("a push of 8 K", small, 1),
        ):
            for programs in (8, 16, 32, 132):
                pairs = [
                    [seconds(some, pushes, programs) for some in (nothing, table)] for _ in range(7)
                ]
                alone, beside = (median(column) for column in zip(*pairs, strict=True))
                self.add(
                    "prefill", f"{name}, {programs} programs", 0, beside,
                    alone_us=round(alone * 1e6), slower=round(beside / alone - 1, 4),
                )  # fmt: skip

    def pages(self) -> None:
        for page in _PAGES:
            rows = min(page // _PAGE_ROW, 32)
            count = self.side.ring.numel() // page
            order = np.random.default_rng(page).permutation(count).astype(np.int64)
            starts = np.arange(count, dtype=np.int64)
            parts = np.arange(0, page, rows * _PAGE_ROW)
            source = (starts[:, None] * page + parts).reshape(-1) + self.side.ring.data_ptr()
            target = (order[:, None] * page + parts).reshape(-1) + self.ring
            one = np.ones_like(source)
            pieces = Pieces(source, target, one * rows, one, one * 0, one * _PAGE_ROW)
            table = tabulate(pieces, row_formats([_PAGE_ROW])).to(self.side.device)
            for programs in (16, 32, 132):
                seconds = self.side.push_s(table, 1, programs, hashed=False)
                self.add(
                    "direct pages", f"{page >> 10} KiB, {programs} programs", table.nbytes, seconds
                )

    def nixl(self) -> None:
        nixl = self.side.nixl()
        peer = nixl.add_peer(self.peer.ask("nixl_metadata"))
        ring = self.side.ring
        for mib in (16, 32, 64, 128, 256):
            seconds = _wall_s(partial(nixl.write, peer, ring[: mib << 20], 0))
            self.add("nixl write", f"{mib} MiB", mib << 20, seconds)
            parts = [(begin, ring[begin : begin + (mib << 20)])
                     for begin in range(0, ring.numel(), mib << 20)]  # fmt: skip

            writes = [nixl.prepare_write(peer, part, begin) for begin, part in parts]

            def together(writes: list[Any] = writes) -> None:
                for one in writes:
                    one.start()
                while not all(one.done() for one in writes):
                    pass

            seconds = _wall_s(together)
            self.add("nixl together", f"{len(parts)} x {mib} MiB", ring.numel(), seconds)
            for one in writes:
                one.close()
        for page in _PAGES:
            count = min(4096, ring.numel() // page)
            order = np.random.default_rng(page).permutation(count).tolist()
            source = ring[: count * page]
            seconds = _wall_s(partial(nixl.write_pages, peer, source, page, order), rounds=3)
            self.add("nixl pages", f"{page >> 10} KiB", count * page, seconds)

    def packed(self) -> None:
        """Pack, write, unpack and both digests, as planned when a request was admitted."""
        nixl = self.side.nixl()
        peer = nixl.add_peer(self.peer.ask("nixl_metadata"))
        for length in self.lengths:
            nbytes = self.side.layout.state_bytes(length)
            for mib in (8, 16, 32):
                pushes = pack_into_pushes(self.side.spans(length), self.side.layout, mib << 20)
                found = {}
                for hashed in (False, True):
                    request = PackedRequest(
                        self.side, pushes, mib << 20, partial(nixl.prepare_write, peer), self.peer,
                        hashed=hashed,
                    )  # fmt: skip
                    alone, found[hashed] = _wall_s(request.write_all), _wall_s(request.hand_over)
                    request.close()
                self.add(
                    "packed", f"{_tokens(length)}, {len(pushes)} x {mib} MiB", nbytes, found[True],
                    writes_us=round(alone * 1e6, 1),
                    writes_of_copy=round(self.copy_s(nbytes) / alone, 3),
                    of_writes=round(alone / found[True], 3),
                    digest_share=round(found[True] / found[False] - 1, 3),
                )  # fmt: skip

    def close(self) -> None:
        self.peer.close()
        self.side.close()


def _wall_s(work: Callable[[], object], rounds: int = 7) -> float:
    work()
    found = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return median(found)


def _tokens(length: int) -> str:
    return f"{length >> 10} K" if length < 1 << 20 else f"{length >> 20} M"


def report(bench: Bench) -> str:
    name = torch.cuda.get_device_name()
    lines = [f"{bench.gpus} x {name}, torch {torch.__version__}, blocks of {BLOCK_TOKENS}"]
    lines.append(f"{'part':14}{'case':46}{'MB':>9}{'us':>11}{'GB/s':>9}{'of copy':>9}  more")
    for row in bench.rows:
        known = ("part", "case", "bytes", "us", "gb_per_s", "of_copy")
        more = ", ".join(f"{key} {value}" for key, value in row.items() if key not in known)
        lines.append(
            f"{row['part']:14}{row['case']:46}{row['bytes'] / 1e6:9.2f}{row['us']:11.1f}"
            f"{row.get('gb_per_s', ''):>9}{row.get('of_copy', ''):>9}  {more}"
        )
    return "\n".join([*lines, "", *bars(bench.rows)])


PARTS = (
    "right", "copy", "direct", "receiver", "host", "nixl", "packed", "pages", "prefill",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=_MODEL, help="folder with config.json")
    parser.add_argument("--longest", type=int, default=_LENGTHS[-1])
    parser.add_argument("--out", type=Path, help="JSON of all rows")
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=PARTS)
    options = parser.parse_args()
    bench = Bench(state_fields(ModelSpec.load(options.model)), options.longest)
    for part in options.parts:
        began = time.perf_counter()
        try:
            getattr(bench, part)()
        except Exception:
            print(f"{part} failed:\n{traceback.format_exc()}", flush=True)
        print(f"{part}: {time.perf_counter() - began:.1f} s", flush=True)
        if options.out:
            options.out.write_text(json.dumps({"gpus": bench.gpus, "rows": bench.rows}))
    print(report(bench), flush=True)
    bench.close()


if __name__ == "__main__":
    main()
