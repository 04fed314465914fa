"""`tandem demo`: a whole cluster on this machine, three prompts through it, and its end.

Shows tokens as they come and what happened to each request. It looks from outside: HTTP for the
prompts, and once the wire, to ask one rank alone for the answer that two have given.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import httpx

from cluster import local_ray
from cluster.config import ClusterConfig, load_config
from cluster.errors import ProtocolError, StartupError, WorkerLost, revive
from cluster.launch import DEFAULT_CONFIG, ROOT, Say, launch, timed
from cluster.members import ask_members
from cluster.messages import (
    Failed,
    Generate,
    Request,
    Sampling,
    Started,
    Tokens,
    pack_ids,
)
from cluster.processes import alive
from cluster.timeline import Timeline, TimelineEvent
from cluster.wire import Identity, Peers, new_incarnation

CPUS = 4
READY_S = 30.0
MOST_TOKENS = 160  # of an answer


def run_demo() -> int:
    """Exit status 0 when every prompt was answered and nothing is left."""
    say = timed()
    with local_ray.free_ports(1) as (port,):
        pass
    config = load_config(DEFAULT_CONFIG, [f"http.port={port}"])
    say("1. a Ray of its own on this machine")
    head = local_ray.start(cpus=CPUS)
    head.enter_environment()
    from cluster.application import disconnect, take_down  # not earlier: ray reads the environment

    family = head.family()
    try:
        say(f"   up; dashboard {head.dashboard}")
        say("2. launch: one prefill and one decode rank")
        launch(config, say=lambda line: say(f"   {line}"))
        family |= head.family()
        try:
            asyncio.run(_prompts(config, say))
        except httpx.HTTPError as error:
            raise WorkerLost(f"HTTP on port {port} broke off: {error!r}") from error
        say("4. end")
        take_down(config.name, say=lambda line: say(f"   {line}"))
    finally:
        disconnect()
        head.stop()
    if left := alive(family):
        raise StartupError(f"processes are left: {', '.join(map(str, left))}")
    say(f"   all {len(family)} processes have ended; done")
    return 0


async def _prompts(config: ClusterConfig, say: Say) -> None:
    """Those in the model's folder, in its chat encoding (examples/mini/demo_prompts.py)."""
    path = ROOT / config.model.path / "demo.json"
    prompts = json.loads(path.read_text(encoding="utf-8"))
    url = f"http://{config.http.host}:{config.http.port}"
    async with httpx.AsyncClient(base_url=url, timeout=60.0) as client:
        await _wait_ready(client)
        say("3. prompts, over HTTP: a question, a fact in a long text, a turn of a coding agent")
        body: dict[str, Any] = {}
        told: list[int] = []
        for prompt in prompts:
            say(f"   {prompt['about']}")
            body = {"prompt": prompt["prompt"], "max_tokens": MOST_TOKENS, "temperature": 0.0}
            told = await _stream(client, body)
    say("   the last one again, on the decode rank alone")
    alone = await _colocated(config, body)
    if alone != told:
        raise ProtocolError(f"two ranks said {told}, and one alone says {alone}")
    say(f"   the same {len(told)} tokens: moving the state changed nothing")


async def _wait_ready(client: httpx.AsyncClient) -> None:
    deadline = time.monotonic() + READY_S
    while (answer := await client.get("/ready")).status_code != 200:
        if time.monotonic() > deadline:
            raise WorkerLost(f"not ready after {READY_S:.0f} s: {answer.text}")
        await asyncio.sleep(0.1)


async def _stream(client: httpx.AsyncClient, body: dict[str, Any]) -> list[int]:
    """Prints the answer as it comes, then its timeline; returns its token ids."""
    asked = body | {"stream": True, "return_token_ids": True, "timeline": True}
    asked["stream_options"] = {"include_usage": True}
    token_ids: list[int] = []
    print("\n           ", end="")
    async with client.stream("POST", "/v1/completions", json=asked) as answer:
        if answer.status_code != 200:
            raise StartupError(f"HTTP {answer.status_code}: {(await answer.aread()).decode()}")
        async for line in answer.aiter_lines():
            if not line or line == "data: [DONE]":
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                raise WorkerLost(chunk["error"]["message"])
            for choice in chunk["choices"]:
                token_ids += choice["token_ids"]
                print(choice["text"].replace("\n", "\n           "), end="", flush=True)
    print(f"\n\n           {chunk['usage']['prompt_tokens']} prompt tokens; what happened:")
    for shown in _timeline(chunk["timeline"]).summary().splitlines():
        print(f"           {shown}")
    return token_ids


def _timeline(told: dict[str, Any]) -> Timeline:
    timeline = Timeline()
    for event in told["events"]:
        name, at_s = event.pop("event"), event.pop("at_s")
        timeline.events.append(TimelineEvent(name, at_s, event))
    timeline.token_times = told["token_times_s"]
    return timeline


async def _colocated(config: ClusterConfig, body: dict[str, Any]) -> list[int]:
    """The same request to a decode rank, which runs the prompt itself: no state is moved."""
    from cluster.ray_services import ApplicationKeys

    keys = ApplicationKeys(config.name)
    identity = Identity("caller", new_incarnation(), keys.secret())
    router = await keys.find_router()
    assert router is not None  # it has just routed three requests
    members = await ask_members(router, identity, config.wire)
    decode = next(one.endpoint for one in members if one.endpoint.role == "decode")
    request = Request(
        request_id="demo-colocated",
        prompt=pack_ids(body["prompt"]),
        sampling=Sampling(temperature=body["temperature"], max_tokens=body["max_tokens"]),
    )
    token_ids: list[int] = []
    peers = Peers(identity, config.wire)
    try:
        async with await peers.open(decode, Generate(request=request, attempt=1)) as stream:
            async for message in stream:
                match message:
                    case Tokens():
                        token_ids += message.token_ids
                        if message.finish:
                            break
                    case Failed():
                        raise revive(message.error, message.message)
                    case Started():
                        continue
    finally:
        await peers.close()
    return token_ids
