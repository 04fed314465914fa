"""Whether Ray is at an address, found out before Ray is asked, which would wait for minutes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext

import grpc
import pytest

from cluster.errors import StartupError
from cluster.launch import ROOT
from cluster.ray_address import SETTINGS, WHOSE_CLUSTER, check_admitted, check_reachable


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


@pytest.mark.parametrize("address", ["http://127.0.0.1:8265", "ray://somewhere:10001", "local"])
def test_other_forms_of_address_are_refused_by_the_right_one(address: str) -> None:
    with pytest.raises(StartupError, match=r"that is host:port, as in 127.0.0.1:6379"):
        check_reachable(address)


@pytest.mark.parametrize("token", ["", "right", "wrong"])
def test_a_cluster_that_wants_another_token_says_so_at_once(token: str) -> None:
    class Store(grpc.GenericRpcHandler):  # type: ignore[misc]
        def service(self, call: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
            assert call.method == WHOSE_CLUSTER
            admitted = ("authorization", "Bearer right") in call.invocation_metadata

            def answer(_: bytes, context: grpc.ServicerContext) -> bytes:
                if not admitted:
                    context.abort(grpc.StatusCode.UNAUTHENTICATED, "InvalidAuthToken")
                return b""

            return grpc.unary_unary_rpc_method_handler(answer)

    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.add_generic_rpc_handlers((Store(),))
    server.start()
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    refused = nullcontext() if token == "right" else pytest.raises(StartupError, match="a token")
    with refused:
        check_admitted(f"127.0.0.1:{port}", headers)
    server.stop(None).wait()


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
    assert line.startswith(f"tandem: no Ray cluster at {address}: ")
    assert time.monotonic() - began < 20  # two minutes, if Ray is asked


@pytest.mark.parametrize("example", ["client_handle", "ray_program", "openai_client"])
def test_every_example_says_in_one_line_that_there_is_no_cluster(example: str) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        told = subprocess.run(
            [sys.executable, f"examples/{example}.py"],
            cwd=ROOT,
            env=os.environ | {"RAY_ADDRESS": address, "TANDEM_URL": f"http://{address}"},
            capture_output=True,
            text=True,
        )
    assert told.returncode == 1
    (line,) = told.stderr.splitlines()
    assert line.startswith(f"{example}: ")
    assert address in line
