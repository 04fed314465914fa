"""Is there a Ray cluster at this address, and does it let us in? Asked before Ray is, which would
try for two minutes, and say so every second.

Ray's control store speaks gRPC, and every HTTP/2 server answers the client's preface with its
SETTINGS; a stranger is told by that. Then one call that asks for nothing shows whether it wants
another token than ours.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping

from cluster.errors import StartupError

ANSWER_S = 3.0
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
SETTINGS = 4  # frame type, in the fourth byte
WHOSE_CLUSTER = "/ray.rpc.NodeInfoGcsService/GetClusterId"  # an empty request is a right one


def check_reachable(address: str) -> None:
    """StartupError unless `address` is host:port and a control store answers there."""
    if not (found := re.fullmatch(r"\[?([^/\]]+?)\]?:(\d+)", address)):
        raise StartupError(
            f"RAY_ADDRESS {address} is not the address of a Ray cluster's control store; that is "
            "host:port, as in 127.0.0.1:6379"
        )
    host, port = found.groups()
    try:
        with socket.create_connection((host, int(port)), ANSWER_S) as asking:
            asking.settimeout(ANSWER_S)
            asking.sendall(PREFACE)
            answer = asking.recv(9)
    except (OSError, OverflowError) as error:
        raise StartupError(f"no Ray cluster at {address}: {error}") from error
    if len(answer) < 4 or answer[3] != SETTINGS:
        raise StartupError(
            f"no Ray cluster at {address}: something listens there, but it is not Ray"
        )


def check_admitted(address: str, authorization: Mapping[str, str]) -> None:
    """StartupError where the control store does not take this program's token, or lack of one."""
    import grpc  # not earlier: only those who are about to import ray come here

    metadata = [(name.lower(), value) for name, value in authorization.items()]
    with grpc.insecure_channel(address) as channel:
        try:
            channel.unary_unary(WHOSE_CLUSTER)(b"", timeout=ANSWER_S, metadata=metadata)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                raise StartupError(
                    f"the Ray cluster at {address} asks for a token that this program has not: "
                    "set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH, as `tandem up` has told"
                ) from error
            # whatever else there is, Ray tells better
