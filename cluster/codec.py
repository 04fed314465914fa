"""Messages to bytes and back; the only file that knows msgpack."""

from __future__ import annotations

from typing import cast

import msgpack
from pydantic import TypeAdapter, ValidationError

from cluster.errors import ProtocolError
from cluster.messages import WireMessage

_ADAPTER: TypeAdapter[WireMessage] = TypeAdapter(WireMessage)


def encode(message: WireMessage) -> bytes:
    return cast(bytes, msgpack.packb(message.model_dump(exclude_defaults=False)))


def decode(data: bytes | bytearray | memoryview) -> WireMessage:
    """Raises ProtocolError for anything that is not exactly one known message."""
    try:
        return _ADAPTER.validate_python(msgpack.unpackb(data, use_list=False))
    except ValidationError as error:
        fields = ", ".join(str(part) for part in error.errors()[0]["loc"])
        raise ProtocolError(f"a message does not fit its kind at {fields or 'its top'}") from error
    except Exception as error:  # msgpack raises a dozen unrelated types on garbage
        raise ProtocolError(f"{len(data)} bytes are not a message: {error}") from error
