"""What a launch decides before it touches anything, and how it tells what Serve says."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ray._private.runtime_env.packaging import get_uri_for_directory

from cluster import launch
from cluster.application import Applications
from cluster.config import ClusterConfig, load_config, parse_config
from cluster.deployment_options import DIGEST, deployment_options
from cluster.errors import StartupError
from cluster.launch import ROOT, remarks
from cluster.packing import Domain, domain_of
from cluster.rank_actor import resolve
from cluster.scale import deployments_to_scale
from cluster.serve_details import (
    DeploymentState,
    declared,
    deployment_state,
    progress,
    state_of,
    why_failed,
)
from cluster.wanted import outline, sizes_to_ask

CONFIGS = sorted((ROOT / "deploy" / "configs").glob("*.toml"))
TRACE = """The deployment failed to start 1 times in a row. Error:
Traceback (most recent call last):
  File "serve/replica.py", line 1, in initialize
ray.exceptions.RayTaskError: something long
cluster.errors.StartupError: decode-a/0 failed to start: ValueError: weights
  have two lines
"""


def sized(prefill: int = 1, decode: int = 1) -> ClusterConfig:
    return parse_config({"prefill": {"groups": prefill}, "decode": {"groups": decode}})


def running(**targets: int) -> dict[str, Any]:
    return {"deployments": {name: {"target_num_replicas": n} for name, n in targets.items()}}


def deployment(status: str = "HEALTHY", message: str = "", up: int = 1) -> dict[str, Any]:
    replicas = [{"state": "RUNNING"}] * up + [{"state": "STARTING"}] * (1 - up)
    return {
        "status": status,
        "message": message,
        "replicas": replicas,
        "target_num_replicas": 1,
    }


def application(status: str, message: str = "", **deployments: dict[str, Any]) -> dict[str, Any]:
    return {"status": status, "message": message, "deployments": deployments}


def test_there_are_four_configs() -> None:
    names = {"local", "local_ep2", "one_node", "scale_up_domain"}
    assert {path.stem for path in CONFIGS} == names


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_shipped_config_is_valid_and_names_ranks_that_exist(path: Path) -> None:
    config = load_config(path)
    for pool, name in ((config.prefill, "PrefillRank"), (config.decode, "DecodeRank")):
        assert getattr(resolve(pool.rank), "__name__", None) == name


def test_the_sizes_of_the_domain_config_are_4_and_64() -> None:
    config = load_config(ROOT / "deploy" / "configs" / "scale_up_domain.toml")
    assert config.prefill.groups * config.prefill.ranks == 4
    assert (config.decode.groups, config.decode.ranks) == (8, 8)


def test_what_is_held_but_not_used_is_told() -> None:
    configs = ROOT / "deploy" / "configs"
    for name in ("local", "one_node", "scale_up_domain"):
        assert remarks(load_config(configs / f"{name}.toml")) == []
    for slow in (["model.dtype=float32"], ["prefill.ranks=2", "prefill.cp=2"]):
        said = remarks(load_config(configs / "one_node.toml", slow))
        assert any("right, but slow" in remark for remark in said)


def test_a_first_launch_asks_for_what_the_config_says() -> None:
    sizes = sizes_to_ask(sized(1, 3), None, {})
    assert sizes == {"Ingress": 1, "Router": 1, "Prefill": 1, "Decode": 3}


def test_a_second_launch_keeps_the_scale_that_runs() -> None:
    asked = {"prefill": 1, "decode": 1}
    sizes = sizes_to_ask(sized(), running(Prefill=1, Decode=5, Router=2), asked)
    assert sizes == {"Ingress": 1, "Router": 2, "Prefill": 1, "Decode": 5}


def test_a_changed_number_in_the_config_counts_more_than_what_runs() -> None:
    asked = {"prefill": 1, "decode": 1}
    sizes = sizes_to_ask(sized(1, 2), running(Prefill=3, Decode=5), asked)
    assert sizes == {"Ingress": 1, "Router": 1, "Prefill": 3, "Decode": 2}


def test_a_pool_of_no_groups_is_not_deployed() -> None:
    assert sizes_to_ask(sized(0, 1), None, {}) == {"Ingress": 1, "Router": 1, "Decode": 1}


def test_only_what_restarts_everything_is_an_argument() -> None:
    changed = parse_config({"decode": {"groups": 7, "engine": {"num_blocks": 9}}})
    assert outline(changed, None) == outline(sized(1, 1), None)
    assert outline(sized(0, 1), None) != outline(sized(1, 1), None)
    domain = Domain("tandem/domain", "nvl-1")
    assert outline(sized(), domain)["domain"] == {"tandem/domain": "nvl-1"}
    assert domain_of(outline(sized(), domain)) == domain
    assert domain_of(outline(sized(), None)) is None


def test_serve_replaces_a_deployment_for_its_mark_and_tells_all_the_settings() -> None:
    before = deployment_options(sized())
    after = deployment_options(parse_config({"decode": {"engine": {"num_blocks": 9}}}))

    def mark(options: dict[str, Any]) -> str:
        return str(options["ray_actor_options"]["runtime_env"]["env_vars"][DIGEST])

    assert [name for name in before if mark(before[name]) != mark(after[name])] == ["Decode"]
    for options in after.values():
        assert parse_config(options["user_config"]).decode.engine.num_blocks == 9


def test_others_are_written_back_at_the_scale_that_they_have_now() -> None:
    schema = {"name": "green", "deployments": [{"name": "Decode", "num_replicas": 1}]}
    details = {
        "applications": {
            "green": running(Decode=3) | {"deployed_app_config": schema, "status": "RUNNING"},
            "going": running(Decode=1) | {"deployed_app_config": schema, "status": "DELETING"},
            "alien": running(Decode=1) | {"deployed_app_config": None, "status": "RUNNING"},
        }
    }
    (green,) = declared(details)
    assert green == {"name": "green", "deployments": [{"name": "Decode", "num_replicas": 3}]}


def test_an_autoscaled_pool_is_written_back_as_it_was_asked_for() -> None:
    schema = {"name": "green", "deployments": [{"name": "Decode", "num_replicas": "auto"}]}
    green = running(Decode=3) | {"deployed_app_config": schema, "status": "RUNNING"}
    assert declared({"applications": {"green": green}}) == [schema]


def test_a_deployment_is_scaled_when_nobody_starts_or_drains_any_more() -> None:
    def state(*states: str, status: str = "HEALTHY", message: str = "") -> DeploymentState:
        replicas = [{"state": one} for one in states]
        return deployment_state({"status": status, "message": message, "replicas": replicas}, 2)

    assert state("RUNNING", "RUNNING") == DeploymentState("2/2", done=True, failed=False)
    assert state("RUNNING", "STARTING", status="UPSCALING").line == "1/2, 1 starting"
    assert not state("RUNNING", "RUNNING", "STOPPING").done
    assert state("RUNNING", status="UPSCALING", message=TRACE).failed
    assert not state("RUNNING", "RUNNING", message=TRACE).failed  # an old one


@pytest.mark.parametrize(
    ("tree", "wanted", "why"),
    [
        ({}, {"decoder": 2}, "unknown pool 'decoder': tandem has decode and prefill"),
        ({"prefill": {"groups": 0}}, {"prefill": 2}, "unknown pool 'prefill': tandem has decode"),
        ({"autoscale": {"enabled": True}}, {"decode": 2}, "Serve chooses .* \\(decode 1 to 4\\)"),
    ],
)
def test_what_cannot_be_scaled_is_refused_with_the_reason(
    tree: dict[str, Any], wanted: dict[str, int], why: str
) -> None:
    with pytest.raises(StartupError, match=why):
        deployments_to_scale(parse_config(tree), wanted)
    assert deployments_to_scale(sized(), {"decode": 3}) == {"Decode": 3}


def test_an_application_is_healthy_when_all_of_it_is() -> None:
    healthy = application("RUNNING", Router=deployment(), Decode=deployment())
    starting = application("DEPLOYING", Router=deployment(), Decode=deployment("UPDATING", up=0))
    assert state_of(None) == "starting"
    assert (state_of(healthy), state_of(starting)) == ("healthy", "starting")
    assert progress(starting) == "DEPLOYING: Router 1/1, Decode 0/1"


def test_a_failed_start_is_seen_at_its_first_try_and_told_in_the_ranks_words() -> None:
    failing = application("DEPLOYING", Router=deployment(), Decode=deployment("UPDATING", TRACE, 0))
    assert state_of(failing) == "failed"
    assert why_failed(failing) == (
        "Decode: decode-a/0 failed to start: ValueError: weights\n  have two lines"
    )


def test_an_application_that_cannot_be_built_tells_why() -> None:
    failed = application("DEPLOY_FAILED", "Traceback ...\nImportError: no module named x")
    assert state_of(failed) == "failed"
    assert why_failed(failed) == "ImportError: no module named x"


def test_an_old_failure_does_not_count_once_all_is_healthy() -> None:
    assert state_of(application("RUNNING", Decode=deployment(message=TRACE))) == "healthy"


def test_a_python_without_ray_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "ray.py").write_text("raise ModuleNotFoundError('none', name='ray')\n")
    told = subprocess.run(
        [sys.executable, ROOT / "cluster" / "launch.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert told.returncode == 1
    (line,) = told.stderr.splitlines()
    assert "lacks ray" in line
    assert "/path/to/python cluster/launch.py" in line


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--config", "no-such.toml"], "no-such.toml"),
        (["--set", "http.port=zero"], "http.port"),
        (["--set", "http.nothing=1"], "http.nothing"),
        (["--set", "model.path=nowhere"], "model.path: nowhere has no config.json"),
    ],
)
def test_a_wrong_configuration_is_named(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch.main(words) == 1
    assert said in capsys.readouterr().err


def test_what_the_cluster_does_not_run_is_no_part_of_the_code(tmp_path: Path) -> None:
    """Of what a job uploads, and a launch from a shell: Ray's own digest of the folder."""

    def code(folder: Path) -> str:
        return str(get_uri_for_directory(str(folder), include_gitignore=True))

    for name in (".rayignore", ".gitignore"):
        shutil.copy(ROOT / name, tmp_path)
    for folder in ("cluster", "docs", "tests/ray"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "cluster" / "launch.py").write_text("")
    before = code(tmp_path)
    for name in ("docs/more.md", "tests/ray/test_more.py", "NOTES.md", "serve.log"):
        (tmp_path / name).write_text("more")
    assert code(tmp_path) == before
    (tmp_path / "cluster" / "more.py").write_text("")
    assert code(tmp_path) != before


def test_an_interruption_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(launch, "launch", interrupted)
    assert launch.main([]) == 130
    assert capsys.readouterr().err == "launch interrupted; what it began is taken back\n"


def test_a_folder_that_ray_does_not_take_is_told_with_what_is_large_in_it(tmp_path: Path) -> None:
    (tmp_path / ".rayignore").write_text("/kept-here/\n")
    sizes = {"weights": 3_000_000, "notes": 2_000_000, "code": 10, "more": 99}
    for name, size in {**sizes, ".git": 9_000_000, "kept-here": 9_000_000}.items():
        (tmp_path / name / "deep").mkdir(parents=True)
        (tmp_path / name / "deep" / "file").write_bytes(bytes(size))

    class Refusing:
        def _upload_working_dir_if_needed(self, runtime_env: object) -> None:
            raise RuntimeError("Request failed with status code 413: too large")

    applications = Applications.__new__(Applications)
    applications._client = Refusing()
    with pytest.raises(StartupError, match=r"weights \(3 MB\), notes \(2 MB\), more \(0 MB\)$"):
        applications.package(str(tmp_path))
