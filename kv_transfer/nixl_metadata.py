"""What a NIXL transport tells its peers of itself, as bytes. Knows nothing of NIXL."""

from __future__ import annotations

import struct
from typing import NamedTuple

from cluster.errors import ProtocolError

_HEADER = struct.Struct("<4sHHQQ")  # mark, bytes of the name, device, address and bytes of the ring
_MARK = b"TNX1"
HOST = 0xFFFF  # in place of a device's number


class NixlMetadata(NamedTuple):
    name: str
    device: int  # where the ring is, as its process counts its devices; of host memory HOST
    address: int  # of the ring
    nbytes: int
    blob: bytes  # NIXL's own part

    def pack(self) -> bytes:
        name = self.name.encode()
        header = _HEADER.pack(_MARK, len(name), self.device, self.address, self.nbytes)
        return header + name + self.blob

    @classmethod
    def parse(cls, metadata: bytes) -> NixlMetadata:
        """Raises ProtocolError for bytes that are no such metadata."""
        try:
            mark, name_bytes, device, address, nbytes = _HEADER.unpack_from(metadata)
            name_stop = _HEADER.size + name_bytes
            name = metadata[_HEADER.size : name_stop].decode()
        except (struct.error, UnicodeDecodeError) as error:
            raise ProtocolError(f"{len(metadata)} bytes are not NIXL metadata: {error}") from error
        if mark != _MARK or not name or name_stop >= len(metadata):
            raise ProtocolError(f"{len(metadata)} bytes are not a NIXL transport's metadata")
        return cls(name, device, address, nbytes, metadata[name_stop:])
