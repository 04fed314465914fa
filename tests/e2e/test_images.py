"""Images from end to end: the same tokens disaggregated, colocated, plainly, and over losses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cluster.client import Client, build_request
from cluster.config import ClusterConfig, ImagesSection
from cluster.errors import BadRequest, NoRoom
from cluster.generation import Caller, Timeline
from cluster.image_rules import ImageRules
from cluster.messages import Address, Prefill, Request, Reserve, Role
from cluster.pictures import read_pictures
from cluster.router import Router
from kv_transfer.open_transport import open_paths
from tests.cluster import fakes
from tests.cluster.fake_engine import app_over, client_of
from tests.e2e.test_state_fields import Damage, Damaging
from tests.model.cases import micro_config
from tests.pictures import IMAGE, data_url, file, picture_request, rules
from tests.plain_loop import straight
from tests.rank_process import RankProcess
from tests.tiny import SECRET, TinyCluster, load_tiny, make_prompt, make_request, tiny_config, until

TOKENS = 3
SMALL, LARGE, WIDE, TALL = file(84, 84), file(250, 210), file(900, 60), file(40, 700)


def requests() -> list[Request]:
    """Chunks are 32 and blocks 16 positions: images begin, end and lie across their borders."""
    before, after = make_prompt(20), make_prompt(11, seed=1)
    prompts: dict[str, tuple[list[int], list[bytes]]] = {
        "alone": ([IMAGE], [SMALL]),
        "across chunks": ([*before, IMAGE, *after], [LARGE]),
        "two kinds, side by side": ([*before, IMAGE, IMAGE, 5], [WIDE, TALL]),
    }
    made = [
        picture_request(prompt, *files, name=name, max_tokens=TOKENS)
        for name, (prompt, files) in prompts.items()
    ]
    seeded = picture_request(
        [*before, IMAGE], SMALL, name="seeded", max_tokens=TOKENS, temperature=1.5, seed=3
    )
    text = make_request(make_prompt(40), "text", max_tokens=TOKENS)
    return [*made, seeded, text]


def roomy(**sections: Any) -> ClusterConfig:
    engine = {"num_blocks": 256, "num_slots": 32, "chunk_tokens": 32, "max_length": 512}
    pools = {name: {"engine": engine, **sections.pop(name, {})} for name in ("prefill", "decode")}
    return tiny_config(**pools, **sections)


@pytest.mark.parametrize("colocated", [False, True], ids=["disaggregated", "colocated"])
async def test_a_busy_cluster_gives_the_tokens_of_a_plain_loop(colocated: bool) -> None:
    config = roomy(router={"colocated": colocated}, decode={"vision": colocated})
    wanted = {one.request_id: straight(one) for one in requests()}
    async with TinyCluster(model=load_tiny(), config=config) as cluster:
        answers = await asyncio.gather(*(cluster.answer(one) for one in requests()))
        for request, answer in zip(requests(), answers, strict=True):
            assert tuple(answer) == wanted[request.request_id], request.request_id
        assert await cluster.settled()
        assert not any(rank._pictures.held for rank in cluster.ranks)


def test_another_picture_is_another_answer_and_no_picture_a_third() -> None:
    def answer(*files: bytes) -> tuple[int, ...]:
        return straight(picture_request([5, IMAGE, 6], *files, max_tokens=2))

    blind = picture_request([5, IMAGE, 6], SMALL, max_tokens=2).model_copy(update={"images": ()})
    assert len({answer(SMALL), answer(file(84, 84, seed=1)), straight(blind)}) == 3


async def test_damaged_state_is_refused_and_the_image_is_shown_again() -> None:
    def damaging(*args: Any, **options: Any) -> Any:
        return Damaging(open_paths(*args, **options))

    request = requests()[1]
    async with TinyCluster(model=load_tiny(), config=roomy(), open_transport=damaging) as cluster:
        link: Any = cluster.prefill[0].transport
        link.damage = Damage(write=1, start=0, stop=256, kind="corrupted")
        timeline = Timeline()
        assert tuple(await cluster.answer(request, timeline)) == straight(request)
        assert [event.name for event in timeline.events].count("lost") == 1
        assert link.damage is None
        assert await cluster.settled()


async def test_the_handle_and_http_show_the_same_pictures() -> None:
    prompt = [5, IMAGE, 6, IMAGE, 7]
    wanted = straight(picture_request(prompt, SMALL, LARGE, max_tokens=4))
    async with TinyCluster(model=load_tiny(), config=roomy()) as cluster:
        assert cluster.address is not None
        async with Client.connect(cluster.address, SECRET, cluster.config) as client:
            pictures = await client.read_images(SMALL, LARGE)
            assert [one.count for one in pictures] == [8, 37]
            answer = [
                token
                async for delta in client.generate(
                    prompt, images=pictures, max_tokens=4, ignore_stop=True, seed=0
                )
                for token in delta.token_ids
            ]
            assert tuple(answer) == wanted
        async with client_of(app_over(cluster.caller, cluster.config)) as http:
            body = {
                "prompt": prompt,
                "images": [data_url(SMALL), data_url(LARGE)],
                "max_tokens": 4,
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
            }
            told = (await http.post("/v1/completions", json=body)).json()
        assert tuple(told["choices"][0]["token_ids"]) == wanted
        assert told["usage"]["prompt_tokens"] == 3 + 8 + 37


async def test_ranks_without_an_encoder_say_so_at_once() -> None:
    request = requests()[0]
    async with TinyCluster(config=roomy()) as cluster:  # its model has none
        with pytest.raises(BadRequest, match="no prefill rank has a vision encoder"):
            await cluster.answer(request)
        assert cluster.address is not None
        async with Client.connect(cluster.address, SECRET, cluster.config) as client:
            with pytest.raises(BadRequest, match="no prefill rank has a vision encoder"):
                await client.read_images(SMALL)
    async with TinyCluster(model=load_tiny(), config=roomy()) as cluster:
        with pytest.raises(BadRequest, match=r"or decode\.vision is false"):
            await anext(cluster.caller.generate(request, colocated=True))


async def test_a_rank_holds_so_many_pixels_and_no_more() -> None:
    async with TinyCluster(
        model=load_tiny(), config=roomy(images={"held_bytes": 30_000})
    ) as cluster:
        small, large = requests()[:2]
        with pytest.raises(NoRoom, match=r"images\.held_bytes"):
            await cluster.answer(large)
        assert tuple(await cluster.answer(small)) == straight(small)


async def test_pixels_go_to_prefill_at_every_try_and_never_to_decode() -> None:
    cluster = fakes.Cluster()
    seeing = fakes.LOAD.model_copy(update={"images": rules()})
    prefill = fakes.FakePrefill(cluster, "prefill-0/0", seeing)
    first, second = (fakes.FakeDecode(cluster, f"decode-{n}/0") for n in range(2))

    async def die(index: int) -> None:
        if index == 2:
            await first.die()

    first.before_token = die
    request = picture_request([IMAGE], SMALL, max_tokens=5)
    async with fakes.running(cluster, prefill, first, second) as caller:
        assert (await fakes.read(caller, request))[0] == fakes.answer(5)
    prefills = [one.request for one in prefill.heard if isinstance(one, Prefill)]
    assert [one.output_length for one in prefills] == [0, 2]
    assert all(one.images == request.images for one in prefills)
    reserves = [
        one.request for rank in (first, second) for one in rank.heard if isinstance(one, Reserve)
    ]
    assert len(reserves) == 2
    assert all(one.images[0].key == request.images[0].key for one in reserves)
    assert not any(one.image_bytes for one in reserves)


# ------------------------------------------------------------------ ranks that are killed


@dataclass
class Processes:
    """1P2D of a very small model, each rank a process, and a caller in this one."""

    caller: Caller
    ranks: dict[str, RankProcess]  # by name
    rules: ImageRules

    async def stream(self, request: Request, timeline: Timeline) -> AsyncIterator[int]:
        async for delta in self.caller.generate(request, timeline):
            for token in delta.token_ids:
                yield token


@pytest.fixture
async def processes(tmp_path: Path) -> AsyncIterator[Processes]:
    (tmp_path / "config.json").write_text(json.dumps(micro_config()), encoding="utf-8")
    config = tiny_config(
        model={"path": str(tmp_path)}, transfer={"transport": "nixl"}, wire={"t_detect_s": 3.0}
    )
    router = Router(config, SECRET)
    address = await router.start()

    async def find_router() -> Address | None:
        return address

    caller = Caller(config, SECRET, find_router)
    with ExitStack() as life:
        wanted: list[tuple[Role, int]] = [("prefill", 0), ("decode", 0), ("decode", 1)]
        started = [
            life.enter_context(RankProcess(role, number, config, address))
            for role, number in wanted
        ]
        endpoints = [await asyncio.to_thread(process.ready) for process in started]
        await until(lambda: len(router.members()) == 3)
        ranks = {one.name: rank for one, rank in zip(endpoints, started, strict=True)}
        yield Processes(caller, ranks, await caller.image_rules())
        await caller.close()
    await router.stop()


@pytest.mark.rank
async def test_decode_is_killed_in_mid_stream_and_the_client_sees_no_seam(
    processes: Processes,
) -> None:
    image = processes.rules.image_token_id
    prompt = [*range(3, 23), image, *range(30, 41)]

    def request(file: bytes) -> Request:
        pictures = read_pictures([file], processes.rules, ImagesSection())
        return build_request(prompt, images=pictures, max_tokens=16, temperature=1.2, seed=7)

    async def answer(file: bytes) -> list[int]:
        return [token async for token in processes.stream(request(file), Timeline())]

    expected = await answer(LARGE)
    assert expected != await answer(file(250, 210, seed=1))
    timeline, seen = Timeline(), list[int]()
    async for token in processes.stream(request(LARGE), timeline):
        seen.append(token)
        if len(seen) == 6:
            taken_over = timeline.last("taken_over")
            assert taken_over is not None
            processes.ranks[str(taken_over.detail["decode"])].kill()
    assert seen == expected
    assert [event.name for event in timeline.events].count("lost") == 1
