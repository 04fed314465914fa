"""Components that take over changed settings while they run."""

from __future__ import annotations

import httpx

from cluster.config import ClusterConfig, parse_config
from cluster.membership import Roster
from cluster.messages import Address, Endpoint, Load, Member, NoWorkers, Role, Route, Routed
from cluster.router import Router
from tests.cluster.fake_engine import TOKENIZER, FakeEngine, app_over, with_http
from tests.cluster.fakes import SECRET

ROUTE = Route(request_id="r", length=10, longest=20)


async def test_a_server_takes_over_its_limits_and_what_readiness_needs() -> None:
    engine = FakeEngine(TOKENIZER.encode("some text"))
    engine.roles = ("decode",)
    app = app_over(engine, with_http(max_body_bytes=1024))
    transport = httpx.ASGITransport(app)
    long = {"prompt": "a" * 2000}
    async with httpx.AsyncClient(transport=transport, base_url="http://tandem") as client:
        assert (await client.post("/v1/completions", json=long)).status_code == 413
        assert (await client.get("/ready")).status_code == 503
        app.state.reconfigure(
            parse_config({"http": {"max_body_bytes": 4096}, "router": {"colocated": True}})
        )
        assert (await client.post("/v1/completions", json=long)).status_code == 200
        assert (await client.get("/ready")).status_code == 200


def member(role: Role) -> Member:
    endpoint = Endpoint(
        name=f"{role}-a/0", role=role, incarnation=f"1-{role}", address=Address(host="h", port=1)
    )
    return Member(endpoint=endpoint, load=Load(free_blocks=9, free_slots=9, total_blocks=9))


def test_a_router_decides_by_the_new_balancing_at_once() -> None:
    router = Router(ClusterConfig(), SECRET)
    router._roster = Roster.of([member("decode")], 0.0)
    assert isinstance(router.route(ROUTE), NoWorkers)  # no prefill rank
    router.reconfigure(parse_config({"router": {"colocated": True}}))
    assert isinstance(router.route(ROUTE), Routed)
