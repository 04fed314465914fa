"""Sweeps: a point is measured once, whatever interrupts; and what their plots show."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cluster.progress_bar import ProgressBar
from examples.sweep import sweep as sweeping
from examples.sweep.points import AXES, BadPoint, Place, curves, front
from examples.sweep.sweep import Failed, Plan, pending, plan_of, sweep

DECODE = ["decode", "ce-128k", "131072", "3", "0.75"]


class Machine:
    """Measures nothing; each step takes a millisecond and one more for every 16 requests."""

    def __init__(self, *, breaks_at: int | None = None, error: type[BaseException] = Failed):
        self.asked: list[int] = []
        self._breaks_at, self._error = breaks_at, error

    def __call__(self, options: Sequence[str]) -> dict[str, Any]:
        batch = int(options[-1])
        self.asked.append(batch)
        if batch == self._breaks_at:
            raise self._error("out of memory")
        step_s = (1 + batch / 16) / 1e3
        return {
            "phase": "decode",
            "model": "mini",
            "device": "CPU",
            "ranks": 1,
            "clock": "wall",
            "requests": batch,
            "context": 2048,
            "nextn": 3,
            "tau": 3.25,
            "tokens_per_s_user": 3.25 / step_s,
            "tokens_per_s_gpu": batch * 3.25 / step_s,
        }


def _plan(folder: Path, arguments: Sequence[str] = DECODE, **environ: str) -> Plan:
    return plan_of(arguments, {"SWEEP_OUT": str(folder), **environ})


def _bar() -> ProgressBar:
    return ProgressBar(6, io.StringIO())


@pytest.mark.parametrize(
    ("arguments", "batches", "asked"),
    [
        (DECODE, (8, 16, 32, 64, 128, 256), "--context_length 131072 --nextn 3 --acceptance 0.75"),
        (["prefill", "pe", "131072"], (4096, 8192, 16384, 32768, 65536), "--context_length 131072"),
        (["encoder", "ve-800"], (1, 2, 4, 8, 16), "--image_size 800"),
    ],
)
def test_the_guides_ranges(
    arguments: list[str], batches: tuple[int, ...], asked: str, tmp_path: Path
) -> None:
    plan = _plan(tmp_path, arguments)
    assert plan.batches == batches
    assert asked in " ".join(plan.asked)
    assert plan.options(batches[0])[-1] == str(batches[0])


def test_variables_give_a_small_model_a_range_of_its_own(tmp_path: Path) -> None:
    plan = _plan(tmp_path, SWEEP_CONCURRENCY="4 1 4", SWEEP_SCALE="64", SWEEP_OPTIONS="--steps 3")
    assert plan.batches == (1, 4)
    assert " ".join(plan.asked).endswith("--scale 64 --steps 3")


@pytest.mark.parametrize(
    ("arguments", "environ", "said"),
    [
        (["decode", "t"], {}, "decode needs CONTEXT"),
        (["decode", "a/b", "5"], {}, "TAG names a folder"),
        (["decode", "..", "5"], {}, "TAG names a folder"),
        (DECODE, {"SWEEP_CONCURRENCY": "8 many"}, "^SWEEP_CONCURRENCY: '8 many'"),
        (DECODE, {"SWEEP_CONCURRENCY": "8 0"}, "must list numbers from 1 on"),
        (DECODE, {"SWEEP_CONCURRENCY": " "}, "must list numbers from 1 on"),
    ],
)
def test_what_cannot_be(
    arguments: list[str], environ: dict[str, str], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=said):
        _plan(tmp_path, arguments, **environ)


def test_an_interrupted_sweep_goes_on_and_measures_nothing_twice(tmp_path: Path) -> None:
    plan = _plan(tmp_path)
    first = Machine(breaks_at=64, error=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        sweep(plan, first, _bar())
    assert pending(plan) == [64, 128, 256]
    second = Machine()
    assert sweep(plan, second, _bar()) == []
    assert second.asked == [64, 128, 256]
    points = curves("decode", tmp_path)["ce-128k"]
    assert [point["requests"] for point in points] == list(plan.batches)
    assert sweep(plan, third := Machine(), _bar()) == []
    assert third.asked == []


def test_an_interruption_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SWEEP_OUT", str(tmp_path))
    monkeypatch.setattr(sweeping, "run_benchmark", Machine(breaks_at=8, error=KeyboardInterrupt))
    assert sweeping.main(DECODE) == 130
    assert capsys.readouterr().err == (
        "sweep.py: interrupted; the same command goes on from here\n"
    )


def test_half_a_file_counts_as_none(tmp_path: Path) -> None:
    plan = _plan(tmp_path)
    file = plan.file(8).with_suffix(".part")
    file.parent.mkdir(parents=True)
    file.write_text('{"asked": [')
    assert pending(plan)[0] == 8
    plan.file(8).write_text("{")
    with pytest.raises(BadPoint, match="is no point of a sweep"):
        pending(plan)


def test_a_point_that_fails_is_told_and_tried_again_later(tmp_path: Path) -> None:
    plan = _plan(tmp_path)
    failures = sweep(plan, Machine(breaks_at=256), _bar())
    assert failures == ["decode 256: out of memory"]
    assert pending(plan) == [256]


def test_another_setting_needs_another_tag(tmp_path: Path) -> None:
    sweep(_plan(tmp_path), Machine(), _bar())
    with pytest.raises(BadPoint, match=r"--nextn 3 .*, not .*--nextn 0 .*another TAG"):
        pending(_plan(tmp_path, DECODE[:3]))


@pytest.mark.full  # another process imports torch
def test_the_command_measures_for_real_and_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    settings = {
        "SWEEP_OUT": str(tmp_path),
        "SWEEP_IMAGES": "2",
        "SWEEP_MODEL": "tandem-tiny",
        "SWEEP_OPTIONS": "--steps 1 --warmup 0",
        "DEEPINFER_ACCELERATOR": "cpu",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    assert sweeping.main(["encoder", "ve-224", "224"]) == 0
    assert [Path(line).name for line in capsys.readouterr().out.splitlines()] == [
        "encoder.png",
        "encoder.svg",
    ]
    points = curves("encoder", tmp_path)["ve-224"]
    assert [point["images"] for point in points] == [2]
    assert points[0]["latency_s"] > 0


def test_the_front_is_what_no_point_beats() -> None:
    axes = AXES["decode"]
    best = [Place(10, 100, 1), Place(8, 200, 2), Place(3, 300, 4)]
    beaten = [Place(8, 150, 3), Place(2, 300, 5), Place(2, 250, 6)]
    assert front([*beaten, *best], axes) == best[::-1]
    late = AXES["prefill"]
    assert front([Place(1, 10, 1), Place(2, 9, 2), Place(2, 11, 3)], late) == [
        Place(1, 10, 1),
        Place(2, 11, 3),
    ]
    same = [Place(1, 1, 1), Place(1, 1, 2)]
    assert front(same, axes) == same


def test_a_plot_has_labels_with_units_a_colour_a_tag_and_the_batch_at_each_point(
    tmp_path: Path,
) -> None:
    pytest.importorskip("matplotlib")
    from examples.sweep.plot_pareto import COLOURS, plot

    for tag in ("ep8-a", "ep8-b"):
        sweep(_plan(tmp_path, ["decode", tag, *DECODE[2:]]), Machine(), _bar())
    png, svg = plot("decode", tmp_path, tmp_path / "out" / "decode")
    assert png.read_bytes().startswith(b"\x89PNG")
    drawn = svg.read_text()
    for text in (
        "output speed of one user [tokens/s]",
        "output throughput [tokens/s/CPU rank]",
        "ep8-a (mini, CPU, 2048 tokens, nextn 3, tau 3.25)",
        "ep8-b (mini",
        *(str(batch) for batch in (8, 16, 32, 64, 128, 256)),
    ):
        assert f"<!-- {text}" in drawn
    for colour in COLOURS[:2]:
        assert colour.lower() in drawn
    assert COLOURS[2].lower() not in drawn


def test_a_sweep_is_measured_though_another_ones_file_cannot_be_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "decode-000001.json").write_text("{")
    monkeypatch.setenv("SWEEP_OUT", str(tmp_path))
    monkeypatch.setattr(sweeping, "run_benchmark", Machine())
    assert sweeping.main(DECODE) == 0
    assert "no plot: " in capsys.readouterr().err.splitlines()[-1]


def test_nothing_to_draw_is_said(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from examples.sweep.plot_pareto import main

    assert main(["decode", "--folder", str(tmp_path)]) == 2


def test_a_benchmark_that_fails_says_its_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "benchmark.py"
    program.write_text("import sys\nprint('noise', file=sys.stderr)\nsys.exit('no room')\n")
    monkeypatch.setattr(sweeping, "BENCHMARK", program)
    with pytest.raises(Failed, match=r"^no room$"):
        sweeping.run_benchmark(["--steps", "1"])
    program.write_text(f"print('table'); print({json.dumps(json.dumps({'phase': 'decode'}))})")
    assert sweeping.run_benchmark([]) == {"phase": "decode"}


def test_a_missing_matplotlib_is_one_line_that_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "matplotlib.py").write_text("raise ModuleNotFoundError(name='matplotlib')\n")
    script = Path(__file__).parents[2] / "examples" / "sweep" / "plot_pareto.py"
    told = subprocess.run(
        [sys.executable, str(script), "decode"],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert told.returncode == 1
    assert told.stderr == (
        "plot_pareto.py: matplotlib is missing; pip install 'tandem-serve[plots]'\n"
    )
