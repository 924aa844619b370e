"""The Kubernetes files of cluster/ against KubeRay's own schemas, and what each of them needs from the others."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from raycl.training.definition.settings import LaunchConfig

CLUSTER = Path(__file__).resolve().parents[2] / "cluster"
README = (CLUSTER / "README.md").read_text()
FILES = {path.name: list(yaml.safe_load_all(path.read_text())) for path in sorted(CLUSTER.glob("kuberay-*.yaml"))}
OBJECTS = [(name, result) for name, objects in FILES.items() for result in objects]
CLUSTERS = {"RayCluster": (), "RayJob": ("rayClusterSpec",), "RayService": ("rayClusterConfig",)}
RAY = [(name, result) for name, result in OBJECTS if result["kind"] in CLUSTERS]


def cluster_of(result: dict[str, Any]) -> dict[str, Any]:
    """Return the cluster that a RayCluster, RayJob or RayService describes."""
    spec: dict[str, Any] = result["spec"]
    for key in CLUSTERS[result["kind"]]:
        spec = spec[key]
    return spec


def pods(result: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the group and pod of every group of nodes, the head's first."""
    cluster = cluster_of(result)
    yield "head", cluster["headGroupSpec"]["template"]["spec"]
    for group in cluster["workerGroupSpecs"]:
        yield group["groupName"], group["template"]["spec"]


def strict(schema: Any) -> Any:
    """Return a schema that refuses fields it does not know, as `kubectl apply` does (it validates strictly)."""
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result = {key: strict(value) for key, value in schema.items()}
    open_to_all = result.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in result
    if isinstance(result.get("properties"), dict) and result.get("type") == "object" and not open_to_all:
        result["additionalProperties"] = False
    return result


@cache
def schema_of(folder: Path, kind: str) -> Any:
    path = folder / f"ray.io_{kind.lower()}s.yaml"
    if not path.is_file():
        pytest.skip(f"no '{path}': put KubeRay's custom resource definitions there")
    versions = yaml.load(path.read_text(), yaml.CSafeLoader)["spec"]["versions"]
    schema = strict(next(version for version in versions if version["name"] == "v1")["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}  # of Kubernetes, not of KubeRay
    return schema


@pytest.mark.parametrize(("name", "manifest"), RAY, ids=[name for name, _ in RAY])
def test_manifests_fit_kuberays_schemas(shared: Path, name: str, manifest: dict[str, Any]) -> None:
    assert manifest["apiVersion"] == "ray.io/v1"
    jsonschema.Draft202012Validator(schema_of(shared / "schemas", manifest["kind"])).validate(manifest)


@pytest.mark.parametrize("path", [("spec", "rayClusterConfig", "enableInTreeAutoscalling"), ("spec", "serveConfig")])
def test_a_misspelt_field_is_found(shared: Path, path: tuple[str, ...]) -> None:
    tree = yaml.safe_load((CLUSTER / "kuberay-rayservice.yaml").read_text())
    here = tree
    for key in path[:-1]:
        here = here[key]
    here[path[-1]] = True
    with pytest.raises(jsonschema.ValidationError, match=path[-1]):
        jsonschema.Draft202012Validator(schema_of(shared / "schemas", "RayService")).validate(tree)


@pytest.mark.parametrize(("name", "manifest"), RAY, ids=[name for name, _ in RAY])
def test_groups_that_may_grow_have_an_autoscaler(name: str, manifest: dict[str, Any]) -> None:
    cluster = cluster_of(manifest)
    grows = [group for group in cluster["workerGroupSpecs"] if group["maxReplicas"] > group["replicas"]]
    assert not grows or cluster.get("enableInTreeAutoscaling") is True
    if cluster.get("enableInTreeAutoscaling"):
        assert cluster["autoscalerOptions"]["version"] == "v2"
        assert all(pod["restartPolicy"] == "Never" for _, pod in pods(manifest)), (
            "its pods are never used a second time"
        )


def test_the_service_can_scale_to_its_maximum() -> None:
    """Every replica and the gate have a GPU of their own, and a node has one."""
    result = FILES["kuberay-rayservice.yaml"][0]
    args = yaml.safe_load(result["spec"]["serveConfigV2"])["applications"][0]["args"]
    nodes = sum(group["maxReplicas"] for group in cluster_of(result)["workerGroupSpecs"])
    assert nodes >= args["max_replicas"] + int(args["follow"]["gated"])


def test_the_service_outlives_its_head() -> None:
    result = FILES["kuberay-rayservice.yaml"][0]
    options = cluster_of(result)["gcsFaultToleranceOptions"]
    named = {item["metadata"]["name"]: item for _, item in OBJECTS if item["kind"] == "Service"}
    host, _, port = options["redisAddress"].partition(":")
    assert int(port) in {item["port"] for item in named[host]["spec"]["ports"]}
    assert options["redisPassword"]["valueFrom"]["secretKeyRef"]["name"] in secrets_made()


def test_claims_are_defined() -> None:
    defined = {result["metadata"]["name"] for _, result in OBJECTS if result["kind"] == "PersistentVolumeClaim"}
    used = {
        volume["persistentVolumeClaim"]["claimName"]
        for _, result in RAY
        for _, pod in pods(result)
        for volume in pod["volumes"]
        if "persistentVolumeClaim" in volume
    }
    assert used and used <= defined


def secrets_made() -> set[str]:
    """Return names of the secrets that a printed command makes."""
    texts = [README, *((CLUSTER / name).read_text() for name in FILES)]
    return {name for text in texts for name in re.findall(r"kubectl create secret generic (\S+)", text)}


def test_every_secret_is_made_by_a_printed_command() -> None:
    def keys(tree: Any) -> Iterator[str]:
        if isinstance(tree, dict):
            for key, value in tree.items():
                if key == "secretName":
                    yield value
                elif key == "secretKeyRef":
                    yield value["name"]
                else:
                    yield from keys(value)
        elif isinstance(tree, list):
            for item in tree:
                yield from keys(item)

    used = {name for _, result in OBJECTS for name in keys(result)}
    assert used and used <= secrets_made()


@pytest.mark.parametrize(("name", "manifest"), RAY, ids=[name for name, _ in RAY])
def test_gpu_pods_find_gpu_nodes(name: str, manifest: dict[str, Any]) -> None:
    """Nodes with GPUs are tainted nearly everywhere, and a label says which they are."""
    for _, pod in pods(manifest):
        if "nvidia.com/gpu" not in pod["containers"][0]["resources"]["limits"]:
            continue
        assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in pod["tolerations"]
        assert pod["nodeSelector"]


@pytest.mark.parametrize(("name", "manifest"), RAY, ids=[name for name, _ in RAY])
def test_every_pod_has_the_hub_token(name: str, manifest: dict[str, Any]) -> None:
    """Gated backbones; where there is no such secret the pods start all the same."""
    for group, pod in pods(manifest):
        tokens = [
            item["valueFrom"]["secretKeyRef"] for item in pod["containers"][0]["env"] if item["name"] == "HF_TOKEN"
        ]
        assert [token["optional"] for token in tokens] == [True], group


@pytest.mark.parametrize(("name", "manifest"), RAY, ids=[name for name, _ in RAY])
def test_pods_of_runs_have_the_time_that_a_checkpoint_may_take(name: str, manifest: dict[str, Any]) -> None:
    """Drivers run on the head; Kubernetes ends a pod after 30 seconds otherwise."""
    drives = manifest["kind"] != "RayService"
    for group, pod in pods(manifest):
        if drives or group != "head":
            assert pod.get("terminationGracePeriodSeconds", 30) > LaunchConfig().grace_s, f"{name}: {group}"
