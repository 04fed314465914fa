"""What the processes of one application find in Ray's internal key-value store.

Four keys an application: its secret (made once, kept over later submits), where the leading
router listens, the pool sizes last asked for, and which launch is under way. Calls block for
about a millisecond; the coroutines run them in a thread. Knows nothing of what the values are for.
"""

from __future__ import annotations

import asyncio
import json
import secrets

from ray.experimental import internal_kv

from cluster.errors import StartupError
from cluster.messages import Address, Value

NAMESPACE = "tandem"
SECRET_BYTES = 32


class RouterRecord(Value):
    """Where one incarnation of the router listens."""

    incarnation: str
    address: Address


class ApplicationKeys:
    """The keys of one application; the process must be connected to Ray."""

    def __init__(self, application: str) -> None:
        self._application = application

    def make_secret(self) -> bytes:
        """The application's secret; made now if there is none yet. Only one maker wins."""
        internal_kv._internal_kv_put(
            self._key("secret"),
            secrets.token_bytes(SECRET_BYTES),
            overwrite=False,
            namespace=NAMESPACE,
        )
        return self.secret()

    def secret(self) -> bytes:
        """StartupError where no launch has made one."""
        secret = self.find_secret()
        if secret is None:
            raise StartupError(
                f"application {self._application!r} has no secret in this Ray cluster; launch it "
                "first"
            )
        return secret

    def find_secret(self) -> bytes | None:
        return self._get("secret")

    def router(self) -> RouterRecord | None:
        """The newest incarnation that has published itself."""
        record = self._get("router")
        return None if record is None else RouterRecord.model_validate_json(record)

    def publish_router(self, record: RouterRecord) -> None:
        """From now on callers and ranks go to this router."""
        self._put("router", record.model_dump_json().encode())

    def withdraw_router(self, incarnation: str) -> None:
        """Forget this router, unless a newer one has taken its place."""
        record = self.router()
        if record is not None and record.incarnation == incarnation:
            self._delete("router")

    async def find_router(self) -> Address | None:
        record = await asyncio.to_thread(self.router)
        return None if record is None else record.address

    def asked_sizes(self) -> dict[str, int]:
        """Groups of each pool as the last launch's configuration asked for them."""
        sizes = self._get("sizes")
        return {} if sizes is None else dict(json.loads(sizes))

    def remember_sizes(self, sizes: dict[str, int]) -> None:
        self._put("sizes", json.dumps(sizes).encode())

    def begin_launch(self) -> str:
        """Says which launch is under way: the last that began."""
        launch = secrets.token_hex(8)
        self._put("launch", launch.encode())
        return launch

    def launch(self) -> str | None:
        found = self._get("launch")
        return None if found is None else found.decode()

    def end_launch(self) -> None:
        self._delete("launch")

    def delete_all(self) -> None:
        for name in ("secret", "router", "sizes", "launch"):
            self._delete(name)

    def left(self) -> list[str]:
        """Keys that are still there; none after `delete_all`."""
        keys = internal_kv._internal_kv_list(self._key(""), namespace=NAMESPACE)
        return [key.decode() for key in keys]

    def _key(self, name: str) -> bytes:
        return f"{self._application}/{name}".encode()

    def _get(self, name: str) -> bytes | None:
        value: bytes | None = internal_kv._internal_kv_get(self._key(name), namespace=NAMESPACE)
        return value

    def _put(self, name: str, value: bytes) -> None:
        internal_kv._internal_kv_put(self._key(name), value, namespace=NAMESPACE)

    def _delete(self, name: str) -> None:
        internal_kv._internal_kv_del(self._key(name), namespace=NAMESPACE)


def all_keys() -> list[str]:
    """Every key of every application, as `application/name`."""
    keys = internal_kv._internal_kv_list(b"", namespace=NAMESPACE)
    return [key.decode() for key in keys]
