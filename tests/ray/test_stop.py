"""The end, asked for at any moment: nothing is left of it."""

from __future__ import annotations

import signal
import socket
import subprocess
from pathlib import Path

import pytest

from tests.ray.site import Site, until

STREAM = 80  # tokens

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]


DOWN_ON_A_LINE = """
from cluster.application import connect
from cluster.cli import main

connect()
print("ready", flush=True)
input()
assert main(["down"]) == 0
assert main(["down"]) == 1  # there is nothing, not even a key
"""


def loading(site: Site) -> subprocess.Popen[str]:
    """A launch whose ranks have begun to load, and will for ever."""
    hanging = "tests.ray.cursed:HangingRank"
    launch = site.start(
        *site.launching(
            f"prefill.rank={hanging}", f"decode.rank={hanging}", "life.drain_timeout_s=0"
        )
    )
    until(lambda: len(site.ranks_of()) == 2, 60)
    return launch


@pytest.mark.full
def test_a_launch_that_is_stopped_while_ranks_load_leaves_nothing(cluster: Site) -> None:
    before, second = cluster.actors(), cluster.beside("second")
    with loading(second) as launch:
        launch.send_signal(signal.SIGTERM)  # as `ray job stop` does
        launch.communicate(timeout=30)
    assert launch.returncode == 143
    until(lambda: cluster.actors() == before, 30)
    assert second.tandem("down").returncode != 0  # not even a key


@pytest.mark.full
def test_one_command_ends_what_a_killed_launch_has_left(cluster: Site) -> None:
    before, second = cluster.actors(), cluster.beside("second")
    with loading(second) as launch:
        launch.kill()
        launch.communicate(timeout=30)
    down = second.tandem("down")
    assert down.returncode == 0, down.stderr
    assert cluster.actors() == before
    assert second.launch().returncode == 0  # the same name, the same port
    assert second.tandem("down").returncode == 0


def test_down_lets_streams_finish_and_leaves_nothing(cluster: Site, expected: list[int]) -> None:
    pids = cluster.actors().values()
    with cluster.start("-c", DOWN_ON_A_LINE) as down:
        assert down.stdin is not None
        assert down.stdout is not None
        assert down.stdout.readline() == "ready\n"
        with cluster.streaming(STREAM, streams=3) as streams:
            down.stdin.write("\n")
            down.stdin.flush()
            assert "draining tandem" in down.stdout.readline()
            assert not any(stream.end.done() for stream in streams)
            out, err = down.communicate(timeout=60)
            assert down.returncode == 0, out + err
            assert "no application 'tandem' runs" in err
            assert all(stream.result() == expected[:STREAM] for stream in streams)
    assert not cluster.actors()
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 10)
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", cluster.port)) != 0
    assert f"@tandem-http-{cluster.port}" not in Path("/proc/net/unix").read_text()
    assert not [one.name for one in Path("/dev/shm").iterdir() if "ucx" in one.name]
