"""Whether Ray is at an address, found out before Ray is asked, which would wait for minutes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from cluster.errors import StartupError
from cluster.launch import ROOT
from cluster.ray_address import SETTINGS, check_reachable


@contextmanager
def answering(words: bytes) -> Iterator[str]:
    """Somebody who says this to everyone; its address."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(words)
                connection.recv(1)

        thread = threading.Thread(target=answer)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        thread.join()


def test_who_answers_in_http2_may_be_ray() -> None:
    with answering(bytes([0, 0, 0, SETTINGS, 0, 0, 0, 0, 0])) as address:
        check_reachable(address)


def test_another_program_is_told_from_ray() -> None:
    with (
        answering(b"HTTP/1.0 400 Bad Request\r\n") as address,
        pytest.raises(StartupError, match="something listens there, but it is not Ray"),
    ):
        check_reachable(address)


def test_other_forms_of_address_are_rays_affair() -> None:
    check_reachable("auto")
    check_reachable("ray://somewhere:10001")


@pytest.mark.parametrize("command", ["status --json", "scale decode=2", "down", "up"])
def test_every_command_says_in_one_line_and_soon_that_there_is_no_ray(command: str) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        began = time.monotonic()
        told = subprocess.run(
            [sys.executable, "-m", "cluster.cli", *command.split()],
            cwd=ROOT,
            env=os.environ | {"RAY_ADDRESS": address},
            capture_output=True,
            text=True,
        )
    assert told.returncode == 1
    assert told.stdout == ""
    (line,) = told.stderr.splitlines()
    assert line.startswith(f"tandem: no Ray cluster at RAY_ADDRESS {address}: ")
    assert time.monotonic() - began < 20  # two minutes, if Ray is asked
