"""deploy/kuberay and deploy/ray against what KubeRay and Ray take, and against the code they start.

The shapes of KubeRay's v1 resources are written here by hand, as far as the manifests use them;
Ray's own schema of a cluster file comes with Ray.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml
from jsonschema import Draft7Validator
from ray.autoscaler._private.local.config import prepare_local

from cluster.config import load_config, parse_config
from cluster.deployment_options import deployment_options
from cluster.errors import StartupError
from cluster.launch import build
from cluster.packing import DOMAIN_LABELS
from cluster.render import add_render
from cluster.wanted import wanted_of

ROOT = Path(__file__).parents[2]
KUBERAY = ROOT / "deploy" / "kuberay"
MANIFESTS = ("raycluster.yaml", "rayservice.yaml")
OUR_LABEL = "tandem/domain"

STRINGS = {"type": "object", "additionalProperties": {"type": "string"}}
PROBE = {
    "type": "object",
    "additionalProperties": False,
    "required": ["exec"],
    "properties": {
        "exec": {
            "type": "object",
            "required": ["command"],
            "properties": {"command": {"type": "array", "items": {"type": "string"}}},
        },
        "initialDelaySeconds": {"type": "integer"},
        "periodSeconds": {"type": "integer"},
        "timeoutSeconds": {"type": "integer"},
        "failureThreshold": {"type": "integer"},
    },
}
QUANTITIES = {
    "type": "object",
    "additionalProperties": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
}
CONTAINER = {
    "type": "object",
    "additionalProperties": False,
    "required": ["name", "image", "resources", "livenessProbe", "volumeMounts"],
    "properties": {
        "name": {"type": "string"},
        "image": {"type": "string", "pattern": r"^[a-z0-9./-]+:(?!latest).+$"},
        "env": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["name", "value"],
                "properties": {"name": {"type": "string"}, "value": {"type": "string"}},
            },
        },
        "ports": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["name", "containerPort"],
                "properties": {
                    "name": {"type": "string", "maxLength": 15},
                    "containerPort": {"type": "integer"},
                },
            },
        },
        "resources": {
            "type": "object",
            "required": ["limits", "requests"],
            "properties": {"limits": QUANTITIES, "requests": QUANTITIES},
        },
        "securityContext": {"type": "object"},
        "startupProbe": PROBE,
        "readinessProbe": PROBE,
        "livenessProbe": PROBE,
        "volumeMounts": {
            "type": "array",
            "items": {"type": "object", "required": ["name", "mountPath"]},
        },
    },
}
TEMPLATE = {
    "type": "object",
    "additionalProperties": False,
    "required": ["spec"],
    "properties": {
        "metadata": {"type": "object"},
        "spec": {
            "type": "object",
            "additionalProperties": False,
            "required": ["containers", "volumes", "securityContext"],
            "properties": {
                "affinity": {"type": "object"},
                "securityContext": {"type": "object", "required": ["runAsNonRoot", "runAsUser"]},
                "terminationGracePeriodSeconds": {"type": "integer"},
                "containers": {"type": "array", "items": CONTAINER},
                "volumes": {"type": "array", "items": {"type": "object", "required": ["name"]}},
            },
        },
    },
}
HEAD_GROUP = {
    "type": "object",
    "additionalProperties": False,
    "required": ["rayStartParams", "template"],
    "properties": {"rayStartParams": STRINGS, "labels": STRINGS, "template": TEMPLATE},
}
WORKER_GROUP = {
    "type": "object",
    "additionalProperties": False,
    "required": [
        "groupName",
        "replicas",
        "minReplicas",
        "maxReplicas",
        "rayStartParams",
        "template",
    ],
    "properties": {
        "groupName": {"type": "string"},
        "replicas": {"type": "integer"},
        "minReplicas": {"type": "integer"},
        "maxReplicas": {"type": "integer"},
        "rayStartParams": STRINGS,
        "labels": STRINGS,
        "template": TEMPLATE,
    },
}
CLUSTER = {
    "type": "object",
    "additionalProperties": False,
    "required": ["rayVersion", "headGroupSpec", "workerGroupSpecs"],
    "properties": {
        "rayVersion": {"type": "string"},
        "headGroupSpec": HEAD_GROUP,
        "workerGroupSpecs": {"type": "array", "items": WORKER_GROUP},
    },
}
SERVICE = {
    "type": "object",
    "additionalProperties": False,
    "required": ["serveConfigV2", "rayClusterConfig"],
    "properties": {"serveConfigV2": {"type": "string"}, "rayClusterConfig": CLUSTER},
}


def read(name: str) -> dict[str, Any]:
    (document,) = yaml.safe_load_all((KUBERAY / name).read_text(encoding="utf-8"))
    found: dict[str, Any] = document
    return found


def cluster_of(manifest: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = manifest["spec"]
    return spec if manifest["kind"] == "RayCluster" else spec["rayClusterConfig"]


def templates(cluster: dict[str, Any]) -> list[dict[str, Any]]:
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    return [group["template"]["spec"] for group in groups]


def serve_config() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(read("rayservice.yaml")["spec"]["serveConfigV2"])
    return found


# ------------------------------------------------------------------ KubeRay


@pytest.mark.parametrize(
    ("name", "kind", "schema"),
    [("raycluster.yaml", "RayCluster", CLUSTER), ("rayservice.yaml", "RayService", SERVICE)],
)
def test_manifests_have_the_fields_of_kuberays_v1(
    name: str, kind: str, schema: dict[str, Any]
) -> None:
    manifest = read(name)
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", kind)
    assert re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,48}[a-z0-9])?", manifest["metadata"]["name"])
    errors = [error.message for error in Draft7Validator(schema).iter_errors(manifest["spec"])]
    assert not errors


@pytest.mark.parametrize("name", MANIFESTS)
def test_pods_have_shared_memory_of_their_own_and_mount_only_what_they_have(name: str) -> None:
    for spec in templates(cluster_of(read(name))):
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
        (container,) = spec["containers"]
        mounts = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
        assert mounts["shm"] == "/dev/shm"
        assert mounts.keys() == volumes.keys()
        assert spec["securityContext"] == {"runAsNonRoot": True, "runAsUser": 1000}


@pytest.mark.parametrize("name", MANIFESTS)
def test_gpus_are_limited_and_requested_alike_and_the_head_has_none(name: str) -> None:
    head, *workers = (spec["containers"][0] for spec in templates(cluster_of(read(name))))
    assert "nvidia.com/gpu" not in head["resources"]["limits"]
    for worker in workers:
        assert worker["resources"]["limits"] == worker["resources"]["requests"]
        assert worker["resources"]["limits"]["nvidia.com/gpu"] >= 1


@pytest.mark.parametrize("name", MANIFESTS)
def test_nodes_carry_a_label_by_which_launch_finds_a_domain(name: str) -> None:
    for group in cluster_of(read(name))["workerGroupSpecs"]:
        assert group["labels"].keys() & set(DOMAIN_LABELS) == {OUR_LABEL}
        assert "labels" not in group["rayStartParams"]  # KubeRay 1.5 refuses it there


@pytest.mark.parametrize("name", MANIFESTS)
def test_ray_and_the_image_are_those_of_this_version(name: str) -> None:
    pinned = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    )
    cluster = cluster_of(read(name))
    assert cluster["rayVersion"] == pinned["ray"]
    version = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version is not None
    for spec in templates(cluster):
        assert spec["containers"][0]["image"] == f"tandem-serve:{version[1]}"


def test_the_cluster_has_the_gpus_of_the_configuration_it_is_for() -> None:
    config = load_config(ROOT / "deploy" / "configs" / "scale_up_domain.toml", (), {})
    pools = (config.prefill, config.decode)
    wanted = sum(pool.groups * pool.ranks * pool.gpus for pool in pools)
    (group,) = read("raycluster.yaml")["spec"]["workerGroupSpecs"]
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert group["replicas"] * limits["nvidia.com/gpu"] == wanted == 68
    assert float(limits["cpu"]) >= limits["nvidia.com/gpu"] * max(pool.cpus for pool in pools)
    grace_s = group["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace_s > config.life.drain_timeout_s


def test_the_head_opens_the_ports_that_the_service_has() -> None:
    service = serve_config()
    told = service["applications"][0]["deployments"][0]["user_config"]
    config = parse_config(told)
    head = templates(cluster_of(read("rayservice.yaml")))[0]["containers"][0]
    ports = {one["name"]: one["containerPort"] for one in head["ports"]}
    assert ports["http"] == config.http.port
    assert ports["serve"] == service["http_options"]["port"] == config.http.proxy_port
    assert config.http.host == "0.0.0.0"
    assert config.wire.host == "auto"


def test_every_file_says_that_nobody_has_run_it() -> None:
    files = [*KUBERAY.glob("*.yaml"), ROOT / "deploy" / "ray" / "cluster.yaml"]
    assert len(files) == 3
    for file in files:
        assert "# Not run by us: " in file.read_text()
    assert "# Not built by us: " in (ROOT / "deploy" / "Dockerfile").read_text()


# ------------------------------------------------------------------ the application


def render_command() -> list[str]:
    text = (KUBERAY / "rayservice.yaml").read_text(encoding="utf-8")
    line = next(line for line in text.splitlines() if line.startswith("#   tandem render "))
    return shlex.split(line.removeprefix("#   tandem "))


def render(words: list[str]) -> int:
    parser = argparse.ArgumentParser()
    add_render(parser.add_subparsers())
    options = parser.parse_args(words)
    return int(options.run(options))


def test_the_service_is_what_its_own_render_command_prints(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    *words, into, file = render_command()
    assert (into, file) == ("--into", "deploy/kuberay/rayservice.yaml")
    assert render(words) == 0
    told = capsys.readouterr().out
    assert read("rayservice.yaml")["spec"]["serveConfigV2"] == told, (
        f"run: tandem {shlex.join(render_command())}"
    )


def test_render_into_a_file_changes_that_key_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    original = (KUBERAY / "rayservice.yaml").read_text(encoding="utf-8")
    copy = tmp_path / "service.yaml"
    emptied = re.sub(r"(  serveConfigV2: \|\n)(?:    .*\n)+", r"\1    applications: []\n", original)
    assert "cluster.launch:build" not in emptied
    assert "cluster.launch:build" in original
    copy.write_text(emptied)
    assert render([*render_command()[:-1], str(copy)]) == 0
    assert copy.read_text() == original
    other = tmp_path / "other.yaml"
    other.write_text("kind: RayCluster\n")
    with pytest.raises(StartupError, match="has no `serveConfigV2"):
        render([*render_command()[:-1], str(other)])
    assert other.read_text() == "kind: RayCluster\n"


def test_the_application_is_the_one_that_launch_asks_for() -> None:
    """Its arguments and its settings, read back, make the same demand of Serve."""
    (application,) = serve_config()["applications"]
    module, _, name = application["import_path"].partition(":")
    assert (module, name) == (build.__module__, build.__name__)
    config = parse_config(application["deployments"][0]["user_config"])
    sizes = {one["name"]: one["num_replicas"] for one in application["deployments"]}
    wanted = wanted_of(config, sizes, None, code={}, surge=False).schema()
    for ours, theirs in zip(application["deployments"], wanted["deployments"], strict=True):
        assert parse_config(ours["user_config"]) == parse_config(theirs["user_config"]) == config
        assert ours | {"user_config": 0} == theirs | {"user_config": 0}
    assert application["args"]["config"] == wanted["args"]["config"]
    assert application["args"]["domain"] == {OUR_LABEL: "a"}
    assert sizes.keys() == deployment_options(config).keys()


def test_serves_own_schema_takes_the_configuration() -> None:
    from ray.serve.schema import ServeDeploySchema

    schema = ServeDeploySchema.model_validate(serve_config())
    assert [one.name for one in schema.applications] == ["tandem"]


# ------------------------------------------------------------------ ray up


def cluster_file() -> dict[str, Any]:
    text = (ROOT / "deploy" / "ray" / "cluster.yaml").read_text(encoding="utf-8")
    found: dict[str, Any] = yaml.safe_load(text)
    return found


def test_rays_schema_takes_the_cluster_file() -> None:
    prepared, local = prepare_local(cluster_file())
    assert local
    (node,) = prepared["available_node_types"].values()
    workers = len(cluster_file()["provider"]["worker_ips"])
    assert (node["min_workers"], node["max_workers"]) == (workers, workers)
    schema = json.loads((Path(ray.__file__).parent / "autoscaler" / "ray-schema.json").read_text())
    errors = [error.message for error in Draft7Validator(schema).iter_errors(prepared)]
    assert not errors


def test_every_worker_joins_the_head_with_its_domain() -> None:
    config = cluster_file()
    head = " ".join(config["head_start_ray_commands"])
    worker = " ".join(config["worker_start_ray_commands"])
    port = re.search(r"--head --port=(\d+)", head)
    assert port is not None
    assert f"--address=$RAY_HEAD_IP:{port[1]}" in worker
    label = re.search(r'--labels="([^=]+)=', worker)
    assert label is not None
    assert label[1] in DOMAIN_LABELS
