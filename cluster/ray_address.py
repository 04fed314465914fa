"""Is there a Ray cluster at this address? Asked before Ray is, which would try for two minutes.

Ray's control store speaks gRPC, and every HTTP/2 server answers the client's preface with its
SETTINGS; that is all that is looked at. Knows nothing of Ray's own messages.
"""

from __future__ import annotations

import re
import socket

from cluster.errors import StartupError

ANSWER_S = 3.0
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
SETTINGS = 4  # frame type, in the fourth byte


def check_reachable(address: str) -> None:
    """StartupError unless a control store answers; other forms than host:port are let pass."""
    if not (found := re.fullmatch(r"\[?([^/\]]+?)\]?:(\d+)", address)):
        return  # "auto", "ray://..."
    host, port = found.groups()
    try:
        with socket.create_connection((host, int(port)), ANSWER_S) as asking:
            asking.settimeout(ANSWER_S)
            asking.sendall(PREFACE)
            answer = asking.recv(9)
    except (OSError, OverflowError) as error:
        raise StartupError(f"no Ray cluster at RAY_ADDRESS {address}: {error}") from error
    if len(answer) < 4 or answer[3] != SETTINGS:
        raise StartupError(f"RAY_ADDRESS {address}: something listens there, but it is not Ray")
