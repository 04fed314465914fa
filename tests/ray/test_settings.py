"""Settings that change while the cluster runs: who takes them over, and who restarts."""

from __future__ import annotations

import httpx
import pytest

from tests.ray.site import Site

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]


def test_a_live_setting_takes_effect_and_changes_no_process(cluster: Site) -> None:
    before, sizes = cluster.actors(), cluster.sizes()
    told = cluster.launch("http.max_body_bytes=1024", "prefill.engine.max_waiting=7")
    assert told.returncode == 0, told.stderr
    assert "changed: http.max_body_bytes 4194304 -> 1024: live" in told.stdout
    assert "changed: prefill.engine.max_waiting 1024 -> 7: live" in told.stdout
    assert cluster.actors() == before
    answer = httpx.post(f"{cluster.http}/v1/completions", json={"prompt": "a" * 2000})
    assert answer.status_code == 413
    assert cluster.complete()
    assert cluster.actors() == before
    assert cluster.sizes() == sizes


@pytest.mark.full
def test_a_setting_of_one_deployment_restarts_that_one_only(cluster: Site) -> None:
    before = cluster.actors()
    told = cluster.launch("decode.engine.num_blocks=400")
    assert told.returncode == 0, told.stderr
    assert "changed: decode.engine.num_blocks 512 -> 400: restarts Decode" in told.stdout
    changed = {name for name in before if cluster.actors().get(name) != before[name]}
    assert len(changed) == 2
    assert all("decode" in name.lower() for name in changed)
