"""The benchmark goes its whole way on a CPU, and no op is missing from its table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from engine.bench_slice import main
from engine.slice.measures import Bar
from engine.slice.trace import read


def test_every_op_stands_in_the_table_beside_its_floor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--tiny", "--requests", "1", "2", "--contexts", "90"]
    assert main([*arguments, "--json", str(tmp_path / "all.json"), "--trace", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "all.json").read_text(encoding="utf-8"))
    assert [(one["requests"], one["context"]) for one in found["decode"]] == [(1, 90), (2, 90)]
    assert len(found["tables"]) == 3
    for lines in found["tables"].values():
        assert all(line["kernels"] for line in lines if line["floor"])
        assert all(line["floor"] for line in lines if line["kernels"] and "(" not in line["op"])
        assert {line["layer"] for line in lines} == {None, 0, 1, 2, 3}
    assert {bar["name"].split(": ")[1] for bar in found["bars"]} == {
        "floors / step",
        "launched / replayed",
        "device waits for host",
        "attention cut alike / fastest",
        "whole / truncated",
    }
    assert "layer 3: all" in capsys.readouterr().out


def test_traces_name_layers_and_ops(tmp_path: Path) -> None:
    sizes = ["--requests", "2", "--contexts", "33", "--prompt", "48"]
    main(["--tiny", *sizes, "--trace", str(tmp_path)])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["decode-2.json", "prefill.json"]
    for path in tmp_path.iterdir():
        ranges = {one.ranges for one in read(path)}
        assert ("layer 2", "index") in ranges
        assert ("layer 3", "attention") in ranges
        assert ("logits",) in ranges


def test_without_a_gpu_it_says_what_runs_anywhere(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([]) == 1
    assert "--tiny" in capsys.readouterr().err


def test_a_bar_is_met_from_its_own_side() -> None:
    assert Bar("", 0.5, 0.45).met
    assert not Bar("", 0.4, 0.45).met
    assert Bar("", 0.04, 0.05, at_most=True).met
    assert not Bar("", 0.06, 0.05, at_most=True).met
