"""One job launches a cluster that answers over HTTP, to handles and to every example."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.ray.site import DEPLOYMENTS, ROOT, TOKENS, Site, Told, ended, until
from tests.ray.streaming import PROMPT

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

Finished = Callable[[str], Told]


def readmes_handle() -> str:
    blocks = (ROOT / "README.md").read_text().split("```python\n")[1:]
    (printed,) = [block.partition("```")[0] for block in blocks if "from_ray" in block]
    return printed


@pytest.fixture(scope="module")
def before(site: Site, job: Told) -> dict[str, int]:
    """The ranks and heads of the first submit."""
    return site.ranks()


@pytest.fixture(scope="module")
def finished(site: Site, before: dict[str, int]) -> Iterator[Finished]:
    """What commands that only look have said; they run at the same time."""
    site.settle()
    handle = ("--prompt", PROMPT, "--max-tokens", str(TOKENS))
    begun = {
        "handle": site.start("examples/client_handle.py", *handle),
        "readme": site.start("-c", readmes_handle()),
        "status": site.start_tandem("status", "--json"),
        "submit": site.start_submit(),
        "openai_client.py": site.start_example("openai_client.py"),
        "curl.sh": site.start_example("curl.sh"),
    }
    with ThreadPoolExecutor(len(begun)) as waiting:
        told = {name: waiting.submit(ended, process) for name, process in begun.items()}
        yield lambda name: told[name].result()


def test_one_job_launches_the_cluster_and_ends(cluster: Site, job: Told) -> None:
    assert "succeeded" in job.stdout + job.stderr
    application = cluster.application()
    assert application["status"] == "RUNNING"
    assert {
        name: one["status"] for name, one in application["deployments"].items()
    } == dict.fromkeys(DEPLOYMENTS, "HEALTHY")
    until(lambda: httpx.get(f"{cluster.http}/ready").status_code == 200, 10)


def test_a_real_prompt_streams_through_both_ranks(
    cluster: Site, finished: Finished, expected: list[int]
) -> None:
    body = {"prompt": PROMPT, "max_tokens": TOKENS, "stream": True, "timeline": True, "seed": 1}
    with httpx.stream("POST", f"{cluster.http}/v1/completions", json=body, timeout=60.0) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    events = {event["event"]: event for event in json.loads(lines[-1])["timeline"]["events"]}
    assert events["routed"]["prefill"].startswith("prefill-")
    assert events["routed"]["decode"].startswith("decode-")
    assert events["handed_over"]["bytes"] > 0


def test_a_handle_in_another_process_streams_the_same_tokens(
    cluster: Site, finished: Finished
) -> None:
    told = finished("handle")
    assert told.returncode == 0, told.stderr
    token_ids = [int(word) for word in told.stdout.splitlines()[0].split()]
    assert token_ids == cluster.complete()
    assert "handed_over" in told.stdout


def test_the_readmes_handle_works_as_printed(finished: Finished) -> None:
    told = finished("readme")
    assert told.returncode == 0, told.stderr
    assert re.fullmatch(r"(\(\d+,\)\n)+", told.stdout)


def text_of_the_examples(cluster: Site) -> str:
    body = {"prompt": "def add(a, b):", "max_tokens": 16, "temperature": 0}
    answer = httpx.post(f"{cluster.http}/v1/completions", json=body, timeout=60.0).json()
    text: str = answer["choices"][0]["text"]
    return text


@pytest.mark.parametrize("example", ["openai_client.py", "curl.sh"])
def test_every_example_prints_the_same_answer(
    cluster: Site, finished: Finished, example: str
) -> None:
    text = text_of_the_examples(cluster)
    told = finished(example)
    assert told.returncode == 0, told.stderr
    if example == "curl.sh":
        assert json.loads(told.stdout.splitlines()[0])["choices"][0]["text"] == text
        assert "data: [DONE]" in told.stdout
    else:
        assert told.stdout.startswith(text)


@pytest.mark.full
def test_a_task_of_a_ray_program_prints_it_too(cluster: Site) -> None:
    told = ended(cluster.start_example("ray_program.py"))
    assert told.returncode == 0, told.stderr
    assert told.stdout.startswith(text_of_the_examples(cluster))


def test_status_knows_every_process_and_its_load(cluster: Site, finished: Finished) -> None:
    told = finished("status")
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


def test_only_ranks_carry_torch(cluster: Site, finished: Finished) -> None:
    """Seconds of a head's start, and memory."""
    finished("status")
    carrying = [
        name
        for name, pid in cluster.actors().items()
        if "libtorch" in Path(f"/proc/{pid}/maps").read_text()
    ]
    assert len(carrying) == 2
    assert all("/" in name for name in carrying)


def test_the_same_submit_again_changes_no_process(
    cluster: Site, job: Told, before: dict[str, int], finished: Finished
) -> None:
    again = finished("submit")
    assert again.returncode == 0, again.stdout + again.stderr
    assert "changed" not in again.stdout + again.stderr
    assert len(before) == 4
    assert cluster.ranks() == before
