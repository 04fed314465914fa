"""What KubeRay would do with `tandem render`, on a Ray head of our own: put it, use it, scrape it.

The code is installed on the node here, as in the image, and not uploaded with a job.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from cluster import local_ray
from cluster.metric_samples import METRICS, shown_name
from cluster.render import add_render

pytestmark = [pytest.mark.ray, pytest.mark.full, pytest.mark.timeout(240)]

ROOT = Path(__file__).parents[2]
TOKENS = 12
# A counter that is still zero is not exported; a prompt of one chunk hides no transfer.
RARE = {
    "tandem_preemptions",
    "tandem_transfer_hidden_seconds",
    "tandem_decode_steps",
    "tandem_rows_ahead",
}


@dataclass(frozen=True)
class Service:
    head: local_ray.LocalRay
    port: int

    @property
    def http(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def metrics(self) -> dict[str, dict[tuple[str, ...], float]]:
        """Values by name and by the labels that are ours, from every exporter that Ray names."""
        folder = Path(self.head.folder)
        (found,) = json.loads((folder / "prom_metrics_service_discovery.json").read_text())
        values: dict[str, dict[tuple[str, ...], float]] = {}
        for target in found["targets"]:
            text = httpx.get(f"http://{target}/metrics", timeout=10.0).text
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    if sample.name.startswith("ray_tandem_"):
                        ours = ("pool", "state", "path", "outcome")
                        labels = tuple(sample.labels[one] for one in ours if one in sample.labels)
                        by_labels = values.setdefault(sample.name, {})
                        by_labels[labels] = by_labels.get(labels, 0.0) + sample.value
        return values


def until(look: Callable[[], Any], within_s: float) -> Any:
    deadline = time.monotonic() + within_s
    while not (found := look()):
        assert time.monotonic() < deadline, f"not within {within_s} s"
        time.sleep(0.2)
    return found


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with pytest.MonkeyPatch.context() as patch, local_ray.free_ports(1) as (port,):
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("PYTHONPATH", str(ROOT))
        head = local_ray.start(cpus=4)
    try:
        yield Service(head, port)
    finally:
        head.stop()


def test_the_rendered_configuration_runs_and_answers(
    service: Service, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    add_render(parser.add_subparsers())
    model = ROOT / "deploy" / "models" / "mini"
    settings = (f"http.port={service.port}", f"model.path={model}")
    config = str(ROOT / "deploy" / "configs" / "local.toml")
    words = [word for one in settings for word in ("--set", one)]
    options = parser.parse_args(["render", "--config", config, *words])
    options.run(options)
    told = yaml.safe_load(capsys.readouterr().out)
    url = f"{service.head.dashboard}/api/serve/applications/"
    answer = httpx.put(url, json=told, timeout=30.0)
    assert answer.status_code == 200, answer.text

    def healthy() -> bool:
        application = httpx.get(url, timeout=30.0).json()["applications"].get("tandem", {})
        assert application.get("status") != "DEPLOY_FAILED", application["message"]
        return bool(application.get("status") == "RUNNING")

    until(healthy, 120)
    until(lambda: httpx.get(f"{service.http}/ready", timeout=30.0).status_code == 200, 30)
    body = {"prompt": "def add(a, b):", "max_tokens": TOKENS, "ignore_eos": True}
    done = httpx.post(f"{service.http}/v1/completions", json=body, timeout=60.0)
    assert done.status_code == 200, done.text
    assert done.json()["usage"]["completion_tokens"] == TOKENS


def test_rays_exporter_shows_what_the_ranks_and_the_router_have_done(service: Service) -> None:
    wanted = {shown_name(metric) for metric in METRICS if metric.name not in RARE}
    ranks = {("decode", "ready"): 1.0, ("prefill", "ready"): 1.0}
    blocks = {("decode", "leased"): 0.0, ("decode", "free"): 512.0, ("prefill", "free"): 512.0}

    def scraped() -> dict[str, dict[tuple[str, ...], float]] | None:
        """Exporters are a few seconds behind: once all is there, and nothing is held any more.

        On a machine with no time for it the router may just have lost sight of a rank.
        """
        values = service.metrics()
        quiet = blocks.items() <= values.get("ray_tandem_blocks", {}).items()
        seen = ranks.items() <= values.get("ray_tandem_ranks", {}).items()
        return values if quiet and seen and wanted <= values.keys() else None

    values = until(scraped, 60)
    assert values["ray_tandem_rank_starts_total"]["decode",] == 1
    assert values["ray_tandem_handoffs_total"]["prefill", "nixl/UCX"] == 1
    assert values["ray_tandem_transfer_bytes_total"]["prefill", "nixl/UCX"] > 10_000
    made = values["ray_tandem_engine_tokens_total"]
    assert made["prefill",] + made["decode",] == TOKENS
    assert values["ray_tandem_http_requests_total"]["/v1/completions", "ok"] == 1
    assert values["ray_tandem_answers_total"]["length",] == 1
    assert values["ray_tandem_time_to_first_token_seconds_count_total"][()] == 1
