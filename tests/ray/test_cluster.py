"""One job launches a cluster that answers over HTTP, to handles and to every example."""

from __future__ import annotations

import json
import re

import httpx
import pytest

from tests.ray.site import DEPLOYMENTS, ROOT, TOKENS, Site, Told, until
from tests.ray.streaming import PROMPT

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]


def test_one_job_launches_the_cluster_and_ends(cluster: Site, job: Told) -> None:
    assert "succeeded" in job.stdout + job.stderr
    application = cluster.application()
    assert application["status"] == "RUNNING"
    assert {
        name: one["status"] for name, one in application["deployments"].items()
    } == dict.fromkeys(DEPLOYMENTS, "HEALTHY")
    until(lambda: httpx.get(f"{cluster.http}/ready").status_code == 200, 10)


def test_a_real_prompt_streams_through_both_ranks(cluster: Site) -> None:
    body = {"prompt": PROMPT, "max_tokens": TOKENS, "stream": True, "timeline": True, "seed": 1}
    with httpx.stream("POST", f"{cluster.http}/v1/completions", json=body, timeout=60.0) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    events = {event["event"]: event for event in json.loads(lines[-1])["timeline"]["events"]}
    assert events["routed"]["prefill"].startswith("prefill-")
    assert events["routed"]["decode"].startswith("decode-")
    assert events["handed_over"]["bytes"] > 0


def test_a_handle_in_another_process_streams_the_same_tokens(cluster: Site) -> None:
    told = cluster.run("examples/client_handle.py", "--prompt", PROMPT, "--max-tokens", str(TOKENS))
    assert told.returncode == 0, told.stderr
    token_ids = [int(word) for word in told.stdout.splitlines()[0].split()]
    assert token_ids == cluster.complete()
    assert "handed_over" in told.stdout


def test_the_readmes_handle_works_as_printed(cluster: Site) -> None:
    blocks = (ROOT / "README.md").read_text().split("```python\n")[1:]
    printed = [block.partition("```")[0] for block in blocks if "from_ray" in block]
    assert len(printed) == 1
    told = cluster.run("-c", printed[0])
    assert told.returncode == 0, told.stderr
    assert re.fullmatch(r"(\(\d+,\)\n)+", told.stdout)


@pytest.mark.parametrize("example", ["openai_client.py", "ray_program.py", "curl.sh"])
def test_every_example_prints_the_same_answer(cluster: Site, example: str) -> None:
    body = {"prompt": "def add(a, b):", "max_tokens": 16, "temperature": 0}
    answer = httpx.post(f"{cluster.http}/v1/completions", json=body, timeout=60.0).json()
    text: str = answer["choices"][0]["text"]
    told = cluster.example(example)
    assert told.returncode == 0, told.stderr
    if example == "curl.sh":
        assert json.loads(told.stdout.splitlines()[0])["choices"][0]["text"] == text
        assert "data: [DONE]" in told.stdout
    else:
        assert told.stdout.startswith(text)


def test_status_knows_every_process_and_its_load(cluster: Site) -> None:
    told = cluster.tandem("status", "--json")
    assert told.returncode == 0, told.stderr
    status = json.loads(told.stdout)
    assert status["application"]["status"] == "RUNNING"
    assert {one["name"]: one["running"] for one in status["deployments"]} == dict.fromkeys(
        DEPLOYMENTS, 1
    )
    assert status["router"]["answers"]
    ranks = [rank for group in status["groups"] for rank in group["ranks"]]
    assert {rank["name"]: rank["pid"] for rank in ranks}.items() <= cluster.ranks().items()
    assert all(rank["load"]["total_blocks"] for rank in ranks)


def test_the_same_submit_again_changes_no_process(cluster: Site) -> None:
    before = cluster.ranks()
    assert len(before) == 4
    job = cluster.submit()
    assert job.returncode == 0, job.stdout + job.stderr
    assert cluster.ranks() == before
