"""The Python handle, in an event loop and without one."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

import pytest

from cluster.client import Client, SyncClient, build_request
from cluster.errors import BadRequest, Unauthorized, Unavailable
from cluster.messages import unpack_ids
from tests.cluster.fakes import CONFIG, SECRET, Cluster, FakeDecode, FakePrefill, answer, until

pytestmark = pytest.mark.filterwarnings("error")
T = TypeVar("T")


@asynccontextmanager
async def cluster_of_two() -> AsyncIterator[Cluster]:
    cluster = Cluster()
    await cluster.start_router()
    await cluster.add(FakePrefill(cluster, "p"))
    await cluster.add(FakeDecode(cluster, "d"))
    try:
        yield cluster
    finally:
        for rank in cluster.ranks:
            await rank.stop()
        await cluster.stop_router()


@contextmanager
def cluster_elsewhere() -> Iterator[tuple[Cluster, asyncio.AbstractEventLoop]]:
    """The same in a thread of its own, for programs without a loop."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def run(work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, loop).result()

    life = cluster_of_two()
    cluster = run(life.__aenter__())  # type: ignore[arg-type]
    try:
        yield cluster, loop
    finally:
        run(life.__aexit__(None, None, None))  # type: ignore[arg-type]
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.mark.usefixtures("nothing_is_left_behind")
async def test_tokens_stream_in_an_event_loop() -> None:
    async with cluster_of_two() as cluster:
        assert cluster.address is not None
        async with Client.connect(cluster.address, SECRET, CONFIG) as client:
            got = [
                token
                async for delta in client.generate([1, 2, 3], max_tokens=5)
                for token in delta.token_ids
            ]
            assert got == answer(5)
            assert {member.endpoint.name for member in client.members()} == {"p", "d"}


@pytest.mark.usefixtures("nothing_is_left_behind")
async def test_a_decode_rank_does_it_all_on_demand() -> None:
    async with cluster_of_two() as cluster:
        assert cluster.address is not None
        async with Client.connect(cluster.address, SECRET, CONFIG) as client:
            deltas = client.generate([1, 2, 3], max_tokens=5, colocated=True)
            assert [token async for delta in deltas for token in delta.token_ids] == answer(5)
        assert [len(rank.heard) for rank in cluster.ranks] == [0, 1]


@pytest.mark.usefixtures("nothing_is_left_behind")
async def test_another_secret_reaches_nobody() -> None:
    async with cluster_of_two() as cluster:
        assert cluster.address is not None
        generation = CONFIG.generation.model_copy(update={"recovery_wait_s": 0.1})
        config = CONFIG.model_copy(update={"generation": generation})
        async with Client.connect(cluster.address, b"another", config) as client:
            with pytest.raises((Unavailable, Unauthorized)):
                await anext(client.generate([1, 2, 3]))


def test_tokens_stream_without_an_event_loop() -> None:
    with (
        cluster_elsewhere() as (cluster, _),
        SyncClient.connect(cluster.find_router, SECRET, CONFIG) as client,
    ):
        deltas = list(client.generate([1, 2, 3], max_tokens=5))
        assert [token for delta in deltas for token in delta.token_ids] == answer(5)
        assert deltas[-1].finish == "length"
        with pytest.raises(BadRequest, match="empty"):
            next(client.generate([]))


def test_leaving_a_plain_loop_cancels_the_request() -> None:
    with (
        cluster_elsewhere() as (cluster, loop),
        SyncClient.connect(cluster.find_router, SECRET, CONFIG) as client,
    ):

        async def slowly(index: int) -> None:
            await asyncio.sleep(0.005)

        for rank in cluster.ranks:
            rank.before_token = slowly
        for delta in client.generate([1, 2, 3], max_tokens=1000):
            if delta.first == 2:
                break
        idle = until(lambda: not any(rank.open_streams for rank in cluster.ranks))
        asyncio.run_coroutine_threadsafe(idle, loop).result()


def test_a_client_may_be_closed_under_a_request() -> None:
    with cluster_elsewhere() as (cluster, _):
        client = SyncClient.connect(cluster.find_router, SECRET, CONFIG)
        deltas = client.generate([1, 2, 3], max_tokens=1000)
        assert next(deltas).first == 0
        client.close()
        deltas.close()


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"stop_token_ids": ("x",)}, "stop_token_ids"),
        ({"request_id": "r" * 129}, "request_id"),
    ],
)
def test_values_that_cannot_be_are_named(wrong: dict[str, Any], complaint: str) -> None:
    with pytest.raises(BadRequest, match=complaint):
        build_request([1, 2], **wrong)


@pytest.mark.parametrize("prompt", [[2**31], [-(2**31) - 1], ["a"], [1.5], [None]])
def test_prompts_that_are_no_token_ids_are_refused(prompt: list[Any]) -> None:
    with pytest.raises(BadRequest, match="prompt"):
        build_request(prompt)


def test_a_missing_seed_is_drawn_once() -> None:
    ours, theirs = build_request([1]), build_request([1])
    assert ours.sampling.seed != theirs.sampling.seed
    assert ours.request_id != theirs.request_id
    assert build_request([1], seed=7).sampling.seed == 7
    assert unpack_ids(ours.resume_after([5]).prompt) == [1]
    assert ours.resume_after([5]).sampling == ours.sampling


def test_the_client_needs_neither_ray_nor_torch_to_be_imported() -> None:
    code = (
        "import sys, cluster.client; "
        "print([m for m in ('ray', 'torch', 'numpy', 'fastapi') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
