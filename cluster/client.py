"""A Python program's handle on a running cluster: token ids in, token ids out, as they come.

    async with await Client.from_ray() as client:
        async for delta in client.generate(prompt_token_ids, max_tokens=64): ...

    with SyncClient.from_ray() as client:
        for delta in client.generate(prompt_token_ids, max_tokens=64): ...

Leaving the loop early (break, del, a cancelled task) cancels the request on every rank. For text,
from anywhere, over a server's URL, there is cluster.http_client.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
import threading
from collections.abc import AsyncGenerator, Coroutine, Generator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from cluster.closing import AsyncClosing, Closing
from cluster.config import ClusterConfig, ImagesSection
from cluster.errors import BadRequest
from cluster.generation import Answer, Caller, Delta, Timeline
from cluster.image_prompt import BadPrompt, place
from cluster.image_rules import ImageRules
from cluster.messages import Address, Member, Request, Sampling, pack_ids
from cluster.pictures import Picture, read_pictures
from cluster.router_link import FindRouter

T = TypeVar("T")
_NO_NUMBERS = ("ignore_stop", "grammar")  # all else is, and "0.7" and True are none, as over HTTP


def build_request(
    prompt_token_ids: Sequence[int],
    *,
    request_id: str | None = None,
    images: Sequence[Picture] = (),
    **sampling: Any,
) -> Request:
    """`sampling` are fields of cluster.request.Sampling, `grammar` a Grammar from there.

    The prompt has an image token for each of `images`, or all that they take. A missing seed is
    drawn here, once. BadRequest names the value that cannot be.
    """
    if sampling.get("seed") is None:
        sampling["seed"] = secrets.randbits(63)
    for name, value in sampling.items():
        if isinstance(value, str | bool) and name not in _NO_NUMBERS:
            raise BadRequest(f"{name}: must be a number or numbers, not {value!r}")
    try:
        token_ids, placed = place(prompt_token_ids, images)
        return Request(
            request_id=request_id or f"req-{secrets.token_hex(12)}",
            prompt=pack_ids(token_ids),
            sampling=Sampling(**sampling),
            images=placed,
        )
    except ValidationError as error:
        problem = error.errors()[0]
        why = problem["msg"].removeprefix("Value error, ")
        raise BadRequest(f"{'.'.join(map(str, problem['loc']))}: {why}") from error
    except (OverflowError, TypeError) as error:
        raise BadRequest(f"prompt: {error}") from error
    except BadPrompt as error:
        raise BadRequest(f"prompt: {error}") from error


class Client(AsyncClosing):
    """For asyncio programs; belongs to the event loop in which it is used."""

    def __init__(self, caller: Caller, config: ClusterConfig | None = None) -> None:
        self._caller = caller
        self._config = config or ClusterConfig()

    @classmethod
    async def from_ray(cls, app: str = "tandem", config: ClusterConfig | None = None) -> Client:
        """The application of that name in the Ray cluster that this program is connected to.

        A program that is connected to none joins the one that `tandem` itself would use.
        """
        _join_ray()
        from cluster.ray_services import ApplicationKeys

        keys = ApplicationKeys(app)
        secret = await asyncio.to_thread(keys.secret)
        return cls(Caller(config or ClusterConfig(), secret, keys.find_router), config)

    @classmethod
    def connect(
        cls, router: Address | FindRouter, secret: bytes, config: ClusterConfig | None = None
    ) -> Client:
        """A cluster whose router listens there, or is found by that coroutine."""

        async def there() -> Address | None:
            assert isinstance(router, Address)
            return router

        find_router = there if isinstance(router, Address) else router
        return cls(Caller(config or ClusterConfig(), secret, find_router), config)

    def generate(
        self,
        prompt_token_ids: Sequence[int],
        *,
        timeline: Timeline | None = None,
        colocated: bool = False,
        **sampling: Any,
    ) -> Answer:
        """Streams tokens; keywords are those of build_request(). Raises one ClusterError.

        `colocated`: one decode rank does it all, which gives the same tokens.
        """
        request = build_request(prompt_token_ids, **sampling)
        return self._caller.generate(request, timeline, colocated=colocated)

    async def read_images(self, *files: bytes | str | Path) -> tuple[Picture, ...]:
        """Pictures for generate(): PNG, JPEG or WebP, as bytes or paths. BadRequest for what the
        cluster's model does not take; OSError for a file that cannot be read."""
        rules = await self._caller.image_rules()
        return await asyncio.to_thread(_read, files, rules, self._config.images)

    def members(self) -> tuple[Member, ...]:
        return self._caller.members()

    async def close(self) -> None:
        await self._caller.close()


class SyncClient(Closing):
    """For programs without an event loop; one of its own runs in a thread."""

    def __init__(self, make: Coroutine[None, None, Client]) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="tandem-client", daemon=True
        )
        self._thread.start()
        try:
            self._client = self._wait(make)
        except BaseException:
            self._stop()
            raise

    @classmethod
    def from_ray(cls, app: str = "tandem", config: ClusterConfig | None = None) -> SyncClient:
        _join_ray()
        return cls(Client.from_ray(app, config))

    @classmethod
    def connect(
        cls, router: Address | FindRouter, secret: bytes, config: ClusterConfig | None = None
    ) -> SyncClient:
        async def make() -> Client:
            return Client.connect(router, secret, config)

        return cls(make())

    def generate(
        self, prompt_token_ids: Sequence[int], **options: Any
    ) -> Generator[Delta, None, None]:
        """As Client.generate(), for a plain for loop."""
        return self._drive(self._client.generate(prompt_token_ids, **options))

    def read_images(self, *files: bytes | str | Path) -> tuple[Picture, ...]:
        return self._wait(self._client.read_images(*files))

    def close(self) -> None:
        self._wait(self._loop.shutdown_asyncgens())  # requests that nobody has read to their end
        self._wait(self._client.close())
        self._stop()

    def _drive(self, deltas: AsyncGenerator[Delta, None]) -> Generator[Delta, None, None]:
        one_at_a_time = asyncio.Lock()  # an interrupted step has to end before the closing

        async def following() -> Delta | None:
            async with one_at_a_time:
                return await anext(deltas, None)

        async def leaving() -> None:
            async with one_at_a_time:
                await deltas.aclose()

        try:
            while (delta := self._wait(following())) is not None:
                yield delta
        finally:
            if not self._loop.is_closed():
                self._wait(leaving())

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # of a KeyboardInterrupt here, the loop knows nothing
            raise

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _read(
    files: Sequence[bytes | str | Path], rules: ImageRules, limits: ImagesSection
) -> tuple[Picture, ...]:
    data = [one if isinstance(one, bytes) else Path(one).read_bytes() for one in files]
    return read_pictures(data, rules, limits)


def _join_ray() -> None:
    """Raises StartupError, in one line, if there is no cluster to join.

    Ray reads its settings when it is imported: a program that imports it itself says where to.
    """
    if "ray" in sys.modules and sys.modules["ray"].is_initialized():
        return
    from cluster import local_ray

    local_ray.prefer()
    from cluster.application import connect

    connect()
