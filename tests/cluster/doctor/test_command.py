"""The run of checks: bounded, told as it goes, an exit status; and real ones on this machine."""

from __future__ import annotations

import argparse
import json
import re
import threading
from pathlib import Path

import pytest

from cluster.config import ClusterConfig
from cluster.doctor.checks import checks
from cluster.doctor.command import add_doctor, report
from cluster.doctor.finding import Check, Finding, run_checks
from cluster.doctor.probe import probe
from cluster.errors import StartupError

GOOD = Finding("good", "ok", "is well")
BAD = Finding("bad", "fail", "is not", "mend it")


def test_a_check_that_hangs_or_breaks_fails_and_the_next_one_goes_on() -> None:
    never = threading.Event()

    def hang() -> Finding:
        never.wait()
        return GOOD

    def broken() -> Finding:
        raise RuntimeError("our own mistake")

    asked = [Check("slow", hang), Check("broken", broken), Check("good", lambda: GOOD)]
    slow, broke, good = run_checks(asked, limit_s=0.05)
    never.set()
    assert (slow.level, broke.level, good) == ("fail", "fail", GOOD)
    assert slow.what == "no answer within 0.05 s"
    assert "RuntimeError: our own mistake" in broke.what


def test_any_failure_is_the_exit_status_and_warnings_are_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    warned = Finding("odd", "warn", "is odd", "look")
    assert report(iter([GOOD, warned]), as_json=False) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "2 checks, 1 warnings; nothing failed"
    assert report(iter([GOOD, BAD]), as_json=False) == 1
    assert capsys.readouterr().out.splitlines()[1:3] == [
        "fail  bad            is not",
        "                     -> mend it",
    ]


def test_json_has_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    assert report(iter([BAD]), as_json=True) == 1
    assert json.loads(capsys.readouterr().out) == [
        {"name": "bad", "level": "fail", "what": "is not", "next": "mend it"}
    ]


def test_quick_checks_of_this_machine_all_answer() -> None:
    quick = [one for one in checks(ClusterConfig()) if one.name not in ("GPUs", "transfer path")]
    found = list(run_checks(quick))
    assert [one.name for one in found] == [one.name for one in quick]
    assert not [one for one in found if "the check broke" in one.what]


def test_a_probe_that_takes_too_long_ends_with_all_it_started(tmp_path: Path) -> None:
    (tmp_path / "sleeper.py").write_text(
        "import os, pathlib, time\n"
        "if child := os.fork():\n"
        "    pathlib.Path(os.environ['NOTE']).write_text(str(child))\n"
        "time.sleep(600)\n"
    )
    note = tmp_path / "pid"
    variables = {"PYTHONPATH": str(tmp_path), "NOTE": str(note)}
    with pytest.raises(StartupError, match="sleeper has not ended within 3 s"):
        probe("sleeper", limit_s=3.0, variables=variables)
    state = Path(f"/proc/{note.read_text()}/stat")
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_probe_that_fails_is_told_in_its_last_words(tmp_path: Path) -> None:
    (tmp_path / "complainer.py").write_text("raise SystemExit('no such thing')\n")
    with pytest.raises(StartupError, match=r"^no such thing$"):
        probe("complainer", limit_s=10.0, variables={"PYTHONPATH": str(tmp_path)})


@pytest.mark.rank
def test_the_whole_command_moves_bytes_between_two_processes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    parser = argparse.ArgumentParser()
    add_doctor(parser.add_subparsers())
    options = parser.parse_args(["doctor", "--json", "--limit", "60"])
    options.run(options)
    found = {one["name"]: one for one in json.loads(capsys.readouterr().out)}
    assert found["transfer path"]["level"] in ("ok", "warn"), found["transfer path"]
    assert "nixl/UCX, DRAM: 17 MB at" in found["transfer path"]["what"]
    assert "UCX" in found["transfer path"]["what"]
    assert re.search("between CPUs|direct", found["transfer path"]["what"])
    assert found["GPUs"]["level"] != "fail"


@pytest.mark.rank
def test_a_transport_list_that_cannot_work_is_a_failure_not_a_hang(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("UCX_TLS", "posix,self")
    monkeypatch.setenv("UCX_LOG_LEVEL", "fatal")
    path = next(one for one in checks(ClusterConfig(), 60.0) if one.name == "transfer path")
    (found,) = run_checks([path], 60.0)
    assert found.level == "fail"
    assert "no bytes move" in found.what
