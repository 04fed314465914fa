"""Who is there: both sides of a new connection prove that they know the cluster's secret.

    connecting side   Hello          | who, and a fresh nonce
    serving side             Hello
    connecting side   Proof          | HMAC-SHA256 over both Hellos, under the secret
    serving side             Proof

An ordinary conversation on the connection's first stream, whose frames are kept very small.
Each proof names its side, so that neither can be sent back as the other. Nothing here is
encrypted: the secret keeps strangers out, it does not hide what is said.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from dataclasses import dataclass, field

from cluster.codec import encode
from cluster.errors import ProtocolError, Unauthorized, WorkerLost
from cluster.messages import PROTOCOL_VERSION, Hello, Proof
from cluster.stream import Stream

GREETING_BYTES = 512
"""The longest frame that is read from somebody who has proved nothing."""


def new_incarnation() -> str:
    """A name for one life of one process; later lives sort after earlier ones."""
    return f"{time.time_ns():016x}-{secrets.token_hex(4)}"


@dataclass(frozen=True)
class Identity:
    """What a process says of itself, and the secret that makes it believed."""

    role: str  # "prefill", "decode", "router", "caller"
    incarnation: str
    secret: bytes = field(repr=False)

    def hello(self) -> Hello:
        return Hello(
            version=PROTOCOL_VERSION,
            role=self.role,
            incarnation=self.incarnation,
            nonce=secrets.token_bytes(32),
        )


async def introduce(stream: Stream, identity: Identity) -> Hello:
    """The connecting side: returns who serves. Unauthorized, ProtocolError or WorkerLost."""
    mine = identity.hello()
    await stream.send(mine)
    theirs = _expect_hello(await stream.receive())
    if theirs.version != mine.version:
        raise ProtocolError(
            f"the peer speaks protocol {theirs.version}, this process {mine.version}: "
            "restart the older one"
        )
    await stream.send(Proof(mac=_mac(identity.secret, b"connecting", mine, theirs)))
    try:
        answer = await stream.receive()
    except WorkerLost as error:
        raise Unauthorized(
            "the peer hung up on our proof: its cluster has another secret"
        ) from error
    _check(answer, _mac(identity.secret, b"serving", mine, theirs))
    return theirs


async def admit(stream: Stream, identity: Identity) -> Hello:
    """The serving side: returns who connected. Any error means: hang up and say nothing."""
    theirs = _expect_hello(await stream.receive())
    mine = identity.hello()
    await stream.send(mine)  # also to a peer of another version, so that it can say what is wrong
    if theirs.version != mine.version:
        raise ProtocolError(f"the peer speaks protocol {theirs.version}")
    _check(await stream.receive(), _mac(identity.secret, b"connecting", theirs, mine))
    await stream.send(Proof(mac=_mac(identity.secret, b"serving", theirs, mine)))
    return theirs


def _expect_hello(message: object) -> Hello:
    if not isinstance(message, Hello):
        raise ProtocolError("the peer did not begin with Hello")
    return message


def _check(message: object, mac: bytes) -> None:
    if not isinstance(message, Proof) or not hmac.compare_digest(message.mac, mac):
        raise Unauthorized("the peer does not know this cluster's secret")


def _mac(secret: bytes, side: bytes, connecting: Hello, serving: Hello) -> bytes:
    parts = (side, encode(connecting), encode(serving))
    spoken = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return hmac.new(secret, spoken, hashlib.sha256).digest()
