"""Who may use the server: whoever has one of the keys in a file, or everybody if there is none.

The file's path is configuration; the keys themselves are never in it, because the dashboard
shows all of it. Knows nothing of HTTP.
"""

from __future__ import annotations

import hmac
from hashlib import sha256
from pathlib import Path

from cluster.errors import StartupError, Unauthorized


class ApiKeys:
    """No keys: no check."""

    def __init__(self, keys: tuple[str, ...] = ()) -> None:
        self._digests = [sha256(key.encode()).digest() for key in keys]

    @classmethod
    def load(cls, path: str) -> ApiKeys:
        """One key a line; empty lines and lines with # are skipped. "" is no file.

        StartupError if it cannot be read or holds no key: a mistake must not open the server.
        """
        if not path:
            return cls()
        try:
            lines = Path(path).expanduser().read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError) as error:
            raise StartupError(f"http.api_keys_file: cannot read {path}: {error}") from error
        keys = tuple(
            line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")
        )
        if not keys:
            raise StartupError(f"http.api_keys_file: {path} holds no key")
        return cls(keys)

    def check(self, authorization: str) -> None:
        """The value of the header `Authorization`, "" if there was none. Raises Unauthorized.

        Takes as long for a key that is nearly right as for any other.
        """
        if not self._digests:
            return
        scheme, _, key = authorization.partition(" ")
        told = sha256(key.strip().encode(errors="replace")).digest()
        same = [hmac.compare_digest(told, digest) for digest in self._digests]
        if scheme.lower() != "bearer" or not any(same):
            raise Unauthorized(
                "the API key is wrong; send one as 'Authorization: Bearer KEY'"
                if authorization
                else "an API key is needed; send it as 'Authorization: Bearer KEY'"
            )
