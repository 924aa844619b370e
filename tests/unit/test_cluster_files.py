"""The files of cluster/ parse, have the versions of constraints.txt, and name jobs and settings that exist."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from raycl.serve.http.access import PROXY_HOOK, limit_proxy

REPO = Path(__file__).resolve().parents[2]
CLUSTER = REPO / "cluster"
FILES = sorted(path for path in CLUSTER.iterdir() if path.is_file())
PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
PINNED = (REPO / "constraints.txt").read_text().split()
RAY = next(line.partition("==")[2] for line in PINNED if line.startswith("ray=="))
PYTHON = PROJECT["requires-python"].removeprefix(">=").replace(".", "")
VERSION = re.findall(r'__version__ = "(.+)"', (REPO / "raycl" / "__init__.py").read_text())[0]
IMAGE = f"REGISTRY/raycl:{VERSION}"


def tree(name: str) -> Any:
    return yaml.safe_load((CLUSTER / name).read_text())


def commands(text: str) -> list[list[str]]:
    """Return the arguments of every `jobs/*.py` in a text, up to the end of the line (joined lines count as one)."""
    joined = re.sub(r"\\\n", " ", text)
    joined = re.sub(r"(?<=\S)\n(?=\s+[a-z_]+\.[a-z_]+=)", " ", joined)  # folded YAML continues with overrides
    return [shlex.split(match, comments=True) for match in re.findall(r"jobs/\w+\.py[^\n`]*", joined)]


@pytest.mark.parametrize("path", [path for path in FILES if path.suffix == ".yaml"], ids=lambda path: path.name)
def test_yaml_parses(path: Path) -> None:
    assert all(isinstance(result, dict) for result in yaml.safe_load_all(path.read_text()))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_named_files_exist(path: Path) -> None:
    named = set(re.findall(r"\b((?:jobs|cluster|sweeps)/[\w./-]+\.\w+)", path.read_text()))
    missing = sorted(name for name in named if not (REPO / name).is_file())
    assert not missing, f"cluster/{path.name} names {missing}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_settings_on_command_lines_exist(path: Path) -> None:
    from raycl import config
    from raycl.training.setup.run_config import RunConfig

    for words in commands(path.read_text()):
        if words[0] != "jobs/train_stream.py":
            continue
        built: dict[str, Any] = {}
        for word in words:
            if re.match(r"[a-z_.]+=", word):
                config.apply_override(built, word)
        config.validate(RunConfig, built)


def test_the_command_finder_joins_lines() -> None:
    text = (
        "python jobs/a.py \\\n    x.y=1\n  entry: >-\n"
        "    python /home/jobs/b.py --config c\n    x.y=2 x.z=3\n    x.w=4\n  z: 1"
    )
    result = [["jobs/a.py", "x.y=1"], ["jobs/b.py", "--config", "c", "x.y=2", "x.z=3", "x.w=4"]]
    assert commands(text) == result


@pytest.mark.parametrize("name", ["aws.yaml", "gcp.yaml"])
def test_launcher_files_fit_rays_schema(name: str) -> None:
    import jsonschema
    import ray

    schema = json.loads((Path(ray.__file__).parent / "autoscaler" / "ray-schema.json").read_text())
    jsonschema.validate(tree(name), schema)
    assert tree(name)["head_node_type"] in tree(name)["available_node_types"]
    assert tree(name)["max_workers"] >= sum(
        kind.get("min_workers", 0) for kind in tree(name)["available_node_types"].values()
    )
    assert "~/.ray/auth_token" in tree(name)["file_mounts"]


def test_one_image_everywhere() -> None:
    images = {path.name: re.findall(r"\S+/raycl:\S+", path.read_text()) for path in FILES}
    assert {image for result in images.values() for image in result} == {IMAGE}
    users = {"aws.yaml", "gcp.yaml", "kuberay-raycluster.yaml", "kuberay-rayjob.yaml", "kuberay-rayservice.yaml"}
    users |= {"Dockerfile"}
    assert users == {name for name, result in images.items() if result}


def test_the_image_has_the_projects_python_and_ray() -> None:
    bases = re.findall(r"rayproject/ray:(\S+?)-(py\d+)\b", (CLUSTER / "Dockerfile").read_text())
    assert set(bases) == {(RAY, f"py{PYTHON}")}
    assert re.findall(r"torch==\S+", (CLUSTER / "Dockerfile").read_text())[0] in PINNED


def test_what_the_image_copies_exists() -> None:
    copied = re.findall(r"^COPY (?:--\S+ )?(.+) \S+$", (CLUSTER / "Dockerfile").read_text(), flags=re.MULTILINE)
    names = {name for line in copied for name in line.split()}
    assert [name for name in names if not (REPO / name).exists()] == []
    assert names >= {"raycl", "jobs", "sweeps"}, "what the printed commands name"


def test_proxies_of_the_image_close_silent_connections() -> None:
    hook = re.findall(rf"^ENV {PROXY_HOOK}=(\S+)$", (CLUSTER / "Dockerfile").read_text(), flags=re.MULTILINE)
    assert hook == [f"{limit_proxy.__module__}:{limit_proxy.__name__}"]


def test_the_images_user_owns_the_projects_folder() -> None:
    """Classic builders make the folder of WORKDIR as root, and `pip install -e` writes into it."""
    text = (CLUSTER / "Dockerfile").read_text()
    folder = re.findall(r"^WORKDIR (\S+)$", text, flags=re.MULTILINE)[0]
    before = text.partition("\nWORKDIR")[0]
    assert f"RUN mkdir -p {folder}" in before and "\nUSER" not in before
    assert all("--chown=ray" in line for line in text.splitlines() if line.startswith("COPY"))


def test_every_node_of_google_cloud_may_use_the_bucket() -> None:
    """Runs lie in gs://: Ray gives an account to the head alone."""
    worker = tree("gcp.yaml")["available_node_types"]["worker"]["node_config"]
    assert "https://www.googleapis.com/auth/cloud-platform" in worker["serviceAccounts"][0]["scopes"]
    assert "cannot" not in (CLUSTER / "gcp.yaml").read_text(), (
        "commits work there: tests/integration/test_google_storage.py"
    )


_CLUSTERS = {"RayJob": "rayClusterSpec", "RayService": "rayClusterConfig"}


@pytest.mark.parametrize("name", ["kuberay-raycluster.yaml", "kuberay-rayjob.yaml", "kuberay-rayservice.yaml"])
def test_kubernetes_files(name: str) -> None:
    result = tree(name)
    assert result["apiVersion"] == "ray.io/v1"
    cluster = result["spec"] if result["kind"] == "RayCluster" else result["spec"][_CLUSTERS[result["kind"]]]
    assert cluster["rayVersion"] == RAY
    assert cluster["authOptions"] == {"mode": "token"}
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]:
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        pod = group["template"]["spec"]
        volumes = {volume["name"] for volume in pod["volumes"]}
        for container in pod["containers"]:
            assert container["image"] == IMAGE
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
            assert container["resources"]["limits"]["memory"] == container["resources"]["requests"]["memory"]


@pytest.mark.parametrize("path", [path for path in FILES if path.suffix == ".sh"], ids=lambda path: path.name)
def test_scripts_are_bash_and_strict(path: Path) -> None:
    subprocess.run(["bash", "-n", str(path)], check=True)
    assert path.stat().st_mode & 0o111, f"{path.name} is not executable"
    assert "set -euo pipefail" in path.read_text()


def test_nothing_switches_token_authentication_off() -> None:
    for path in FILES:
        assert not re.search(r"RAY_AUTH_MODE\W+disabled", path.read_text()), path.name


def test_the_readme_names_every_file() -> None:
    text = (CLUSTER / "README.md").read_text()
    assert [path.name for path in FILES if path.name != "README.md" and f"`{path.name}`" not in text] == []


def test_serve_files_fit_rays_schema_and_our_settings() -> None:
    """`serve deploy` and KubeRay read files that fit Ray's schema; every argument is a setting of the endpoint."""
    from ray.serve.schema import ServeDeploySchema

    from raycl import config
    from raycl.serve.settings import ServeConfig

    service = yaml.safe_load(tree("kuberay-rayservice.yaml")["spec"]["serveConfigV2"])
    for result in (tree("serve.yaml"), service):
        schema = ServeDeploySchema.model_validate(result)
        assert schema.applications[0].import_path == "raycl.serve.deployment.app:build"
        args = config.validate(ServeConfig, result["applications"][0]["args"])
        assert args.host == result["http_options"]["host"] or args.host == "127.0.0.1"


def test_the_dashboard_queries_existing_metrics() -> None:
    """Every series of the Grafana board is one that a replica or its gate makes."""
    made = ("service/metrics.py", "gate/gate_actor.py")
    source = "\n".join((REPO / "raycl" / "serve" / file).read_text() for file in made)
    board = json.loads((CLUSTER / "grafana-endpoint.json").read_text())
    asked = set(re.findall(r"ray_raycl_(\w+)", json.dumps(board["panels"])))
    suffixes = re.compile(r"(_ms_bucket|_total)$")
    names = {suffixes.sub("", name) for name in asked}
    reported = set(re.findall(r'^ +\("(\w+)",', source, re.M)) | set(re.findall(r'"raycl_(\w+)"', source))
    assert names and names <= reported, f"no replica reports {sorted(names - reported)}"
