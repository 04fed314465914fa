"""Whether a process has ended is told by the kernel, also after its number is used again."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from cluster.errors import TransferError
from kv_transfer.process_life import Life, Watch, own_life

_TELL = "from kv_transfer.process_life import own_life as o; l = o(); print(l.pid, l.started)"


def start() -> tuple[subprocess.Popen[str], Life]:
    """A process that says who it is and then waits for its input to end."""
    process = subprocess.Popen(
        [sys.executable, "-c", f"{_TELL}; print(flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    pid, started = map(int, process.stdout.readline().split())
    return process, Life(own_life().host, pid, started)


def test_a_watch_sees_the_end() -> None:
    process, life = start()
    watch = Watch(life)
    assert not watch.has_ended
    process.kill()
    assert watch.wait(10)
    assert watch.has_ended
    process.communicate()
    watch.close()
    watch.close()


def test_a_life_that_has_ended_cannot_be_watched() -> None:
    process, life = start()
    process.kill()
    process.communicate()
    with pytest.raises(TransferError, match=f"process {life.pid} has ended"):
        Watch(life)


def test_another_process_of_the_same_number_is_not_it() -> None:
    with pytest.raises(TransferError, match="has ended"):
        Watch(replace(own_life(), started=own_life().started - 1))


def test_a_life_of_another_host_cannot_be_watched() -> None:
    life = replace(own_life(), host="elsewhere")
    assert not life.is_here
    with pytest.raises(TransferError, match="another host"):
        Watch(life)


def test_the_own_life_is_known() -> None:
    assert own_life().is_own
    assert own_life().is_here
