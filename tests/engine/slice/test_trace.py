"""What ran is found again in a trace, with its layer, op and backend."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import record_function

from engine.slice.floors import Cost, Rates
from engine.slice.table import by_layer, by_op, lines, missing, place_of, text
from engine.slice.trace import Ran, main, read, record


def event(category: str, name: str, start: float, length: float, **extra: Any) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "ts": start,
        "dur": length,
        "tid": 1,
        "args": {},
        **extra,
    }


GPU_TRACE = [
    event("user_annotation", "layer 2", 0, 100),
    event("user_annotation", "attention", 10, 20),
    event("cuda_runtime", "cudaLaunchKernel", 12, 3, args={"correlation": 7}),
    event("cuda_driver", "cuLaunchKernelEx", 50, 3, args={"correlation": 8}),
    event("cuda_runtime", "cudaMemcpyAsync", 200, 3, args={"correlation": 9}),
    # what a GPU does comes later, in its own order
    event("gpu_memcpy", "Memcpy HtoD", 900, 1, tid=7, args={"correlation": 9}),
    event("kernel", "nvjet_tst_64x8", 500, 40, tid=7, args={"correlation": 8}),
    event("kernel", "_attend", 400, 30, tid=7, args={"correlation": 7}),
]


@pytest.fixture
def gpu_trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": GPU_TRACE}), encoding="utf-8")
    return path


def test_a_kernel_belongs_to_the_ranges_around_its_launch(gpu_trace: Path) -> None:
    assert read(gpu_trace) == [
        Ran("_attend", 30, ("layer 2", "attention")),
        Ran("nvjet_tst_64x8", 40, ("layer 2",)),
        Ran("Memcpy HtoD", 1, ()),
    ]


@pytest.mark.parametrize(
    ("kernel", "backend"),
    [
        ("_attend", "triton"),
        ("score", "triton"),
        ("nvjet_tst_128x64", "cublas"),
        ("void cutlass::Kernel2<cutlass_80_tensorop>", "cublas"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::AddFunctor>", "torch"),
        ("void (anonymous namespace)::elementwise_kernel<int>", "torch"),
        ("Memcpy HtoD (Pinned -> Device)", "copy"),
    ],
)
def test_a_kernels_name_says_who_made_it(kernel: str, backend: str) -> None:
    assert Ran(kernel, 1, ()).backend == backend


def test_on_a_cpu_a_range_has_its_time_without_that_of_ranges_inside(tmp_path: Path) -> None:
    def step() -> None:
        with record_function("layer 0"):
            with record_function("attention"):
                torch.randn(200, 200) @ torch.randn(200, 200)
            torch.ones(4)

    record(step, torch.device("cpu"), tmp_path / "trace.json")
    ran = read(tmp_path / "trace.json")
    assert [one.ranges for one in ran] == [("layer 0",), ("layer 0", "attention")]
    assert all(one.microseconds > 0 for one in ran)


def test_a_table_has_each_op_beside_its_floor(gpu_trace: Path) -> None:
    rates = Rates(1e6, 1e6, 1e6)  # a byte, or an operation, a microsecond
    costs = [
        Cost(2, "attention", "rows", 10, 20),
        Cost(2, "attention", "more", 4),
        Cost(3, "experts", "weights", 8),
    ]
    found = lines(read(gpu_trace), costs, rates)
    attention = found[0]
    assert (attention.layer, attention.op, attention.floor) == (2, "attention", 24)
    assert attention.ratio == 0.8
    assert [line.op for line in missing(found)] == ["experts"]
    layers = {line.layer: line.microseconds for line in by_layer(found)}
    assert layers == {2: 70, None: 1, 3: 0}
    assert by_op(found)[0].op == "(between ops)"  # 40 us over nothing: the largest gap
    assert len(text(found)) == len(found) + 1


def test_the_innermost_name_is_the_op() -> None:
    assert place_of(("layer 12", "index", "scores")) == (12, "scores")
    assert place_of(("embed",)) == (None, "embed")


def test_the_reader_prints_the_longest_first(
    gpu_trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(gpu_trace), "--most", "2"]) == 0
    total, first, second = capsys.readouterr().out.splitlines()
    assert "71.0 us in 3" in total
    assert "[cublas] layer 2" in first
    assert "[triton] layer 2 / attention: _attend" in second
