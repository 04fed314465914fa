"""How fast the engine is on four layers of the real model's shape: python -m engine.bench_slice

Random weights and request state, all on one device. Each decode step is compared with the sum of
its ops' floors: bytes over the rate of a copy, operations over that of a bf16 product, both
measured in the same run. A table says for each op what it took and what its floor is; --trace keeps
what it was made from. `--tiny` goes the same way with small shapes on a CPU, where no figure says
anything about a GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from engine.slice import table
from engine.slice.measures import REAL, TINY, Bar, Bench, Decode, Sizes, Table, bars


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if not options.tiny and not torch.cuda.is_available():
        print("engine.bench_slice: torch sees no GPU here; --tiny runs anywhere", file=sys.stderr)
        return 1
    device = torch.device("cpu") if options.tiny else torch.device("cuda", 0)
    with torch.inference_mode(), tempfile.TemporaryDirectory() as scratch:
        found = measure(_sizes(options), device, options, options.trace or Path(scratch))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return 0


def measure(
    sizes: Sizes, device: torch.device, options: argparse.Namespace, traces: Path
) -> dict[str, Any]:
    """Prints as it goes; what it returns is for a file."""
    bench = Bench(
        sizes, device, tiny=options.tiny, fp8=options.activations == "fp8", seed=options.seed
    )
    rates = bench.rates
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(
        f"{name}: BW {rates.bytes_per_s / 1e12:.2f} TB/s, PEAK "
        f"{rates.operations_per_s / 1e12:.0f} TF/s, link {rates.link_bytes_per_s / 1e9:.0f} GB/s"
    )
    decodes = []
    for context in sizes.contexts:
        for requests in sizes.requests:
            whole = context == sizes.contexts[0]
            decodes.append(bench.decode(requests, context, whole=whole))
            print(_line(decodes[-1]), flush=True)
    served = [
        bench.served(requests, context)
        for requests in sizes.requests
        for context in sizes.contexts[:1]
    ]
    for one in served:
        print(
            f"served, {one.requests:3} rows after {one.context:6}: step {one.wall:8.1f} us, "
            f"its graph {one.device:8.1f}, host busy {one.host:7.1f}"
        )
    tables: dict[str, Table] = {}
    for requests, context in (
        (sizes.requests[0], sizes.contexts[0]),
        (sizes.requests[-1], sizes.contexts[-1]),
    ):
        title = f"decode, {requests} rows after {context}"
        tables[title] = bench.decode_table(requests, context, traces / f"decode-{requests}.json")
        _show(title, tables[title])
    prefill = None
    if sizes.prompt:
        title = f"prefill, the first {sizes.chunk} rows"
        tables[title] = bench.prefill_table(traces / "prefill.json")
        _show(title, tables[title])
        prefill = bench.prefill()
        print(
            f"prefill of {prefill.tokens} tokens: {prefill.whole / 1e3:.2f} ms, of what is needed "
            f"{prefill.needed / 1e3:.2f}, truncated {prefill.truncated / 1e3:.2f}"
        )
    asked = bars(decodes, served, prefill)
    print("\n".join(["", *map(_bar, asked)]))
    return {
        "device": name,
        "rates": asdict(rates),
        "decode": [asdict(one) for one in decodes],
        "served": [asdict(one) for one in served],
        "prefill": asdict(prefill) if prefill else None,
        "tables": {title: [asdict(line) for line in one.lines] for title, one in tables.items()},
        "bars": [asdict(bar) for bar in asked],
    }


def _show(title: str, found: Table) -> None:
    print(f"\n{title}")
    print("\n".join(table.text(table.by_op(found.lines))))
    print("\n".join(table.text(table.by_layer(found.lines))[1:]))
    print("\n".join(table.by_kernel(found.ran)), flush=True)
    for line in table.missing(found.lines):
        print(f"nothing ran in layer {line.layer} as {line.op!r}", file=sys.stderr)


def _line(one: Decode) -> str:
    line = (
        f"decode, {one.requests:3} rows after {one.context:6}: step {one.replayed:8.1f} us, floors "
        f"{one.floor:7.1f}, ratio {one.floor / one.replayed:5.2f}"
    )
    if one.launched is None:
        return line
    parts = ", ".join(f"{taken:.0f} in {parts}" for parts, taken in one.by_parts.items())
    return f"{line}; launched {one.launched:8.1f}; attention's parts: {parts}"


def _bar(bar: Bar) -> str:
    sign = "at most" if bar.at_most else "at least"
    missed = "" if bar.met else "   missed"
    return f"{bar.name:64} {bar.ratio:7.3f}   {sign} {bar.asked:.2f}{missed}"


def _sizes(options: argparse.Namespace) -> Sizes:
    sizes = TINY if options.tiny else REAL
    if options.requests:
        sizes = replace(sizes, requests=tuple(options.requests))
    if options.contexts:
        sizes = replace(sizes, contexts=tuple(options.contexts))
    return sizes if options.prompt is None else replace(sizes, prompt=options.prompt)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="engine.bench_slice",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--tiny", action="store_true", help="small shapes on the CPU; all other defaults change")
    add("--trace", type=Path, metavar="DIR", help="keep Chrome traces of steps here")
    add("--json", type=Path, metavar="FILE", help="write all figures here, too")
    add(
        "--requests",
        type=int,
        nargs="+",
        metavar="N",
        help=f"rows of a decode step; default {_listed(REAL.requests)}",
    )
    add(
        "--contexts",
        type=int,
        nargs="+",
        metavar="N",
        help=f"positions before a decode row; default {_listed(REAL.contexts)}",
    )
    add(
        "--prompt",
        type=int,
        metavar="N",
        help=f"tokens of the prefill, default {REAL.prompt}; 0: none",
    )
    add(
        "--activations",
        choices=("exact", "fp8"),
        default="exact",
        help="see model/options.py; default exact",
    )
    add("--seed", type=int, default=0, metavar="N", help="of weights and state; default 0")
    return parser


def _listed(numbers: Sequence[int]) -> str:
    return " ".join(map(str, numbers))


if __name__ == "__main__":
    sys.exit(main())
