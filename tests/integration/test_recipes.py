"""The package that `docs/extending` prints: it builds, keeps the contracts, and works in the commands."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from recipes import installed_recipes
from tiny import KINDS, Lab, run, save_tasks, trace

from raycl import plugins
from raycl.bank import Bank
from raycl.cli.main import main
from raycl.data.settings import StreamConfig
from raycl.data.stream import open_stream
from raycl.errors import PluginError, RunError
from raycl.launch.driver import RunOptions, job_of
from raycl.launch.prepared_run import prepare
from raycl.launch.ray_train import raise_left
from raycl.launch.worker import Worker, work
from raycl.methods.registry import method_class, modifier_class
from raycl.routing.routers import router_class
from raycl.storage import Storage
from raycl.testing import check_method, check_modifier, check_optimizer, check_router
from raycl.testing.packages import on_path
from raycl.training.optimizers.registry import optimizer_class
from raycl.training.setup.plugins_list import plugins_list
from raycl.training.workers.distributed import DistributedContext
from raycl.types import RouterState


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return installed_recipes(tmp_path_factory.mktemp("recipes"))


@pytest.fixture
def package(site: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(site))
    return site


@pytest.mark.usefixtures("package")
def test_all_that_the_package_names_is_found() -> None:
    usable, problems = plugins_list()
    assert problems == [] and {plugin.kind for plugin in usable} == set(plugins.KINDS)
    assert {plugin.source for plugin in usable} == {"my-raycl 0.1.0"}


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(("name", "kind"), [("anchored", "bert"), ("fading", "llama")])
def test_the_methods_keep_the_contract(name: str, kind: str) -> None:

    check_method(method_class(name), kinds=(kind,))


@pytest.mark.usefixtures("package")
def test_modifier_optimizer_and_router_keep_their_contracts() -> None:

    check_modifier(modifier_class("scale"), methods=("lora",), kinds=KINDS[:1])
    check_optimizer(optimizer_class("nesterov"), "nesterov", methods=("lora",))
    state = RouterState("recency", {"order": ["a", "b"], "decay": 0.5})
    check_router(router_class(state), "recency", state, {"a": ("a",), "b": ("b",)})


@pytest.mark.usefixtures("package")
def test_records_name_the_package(lab: Lab, tmp_path: Path) -> None:
    storage = Storage.at(tmp_path)
    run(lab.config("bert", "fading", modifiers=["scale"], train={"optimizer": "nesterov"}), storage)
    used = {
        "method fading": "my-raycl 0.1.0",
        "modifier scale": "my-raycl 0.1.0",
        "optimizer nesterov": "my-raycl 0.1.0",
    }
    assert storage.read_json("results.json")["versions"].items() >= used.items()
    snapshot = Bank(storage.sub("bank")).newest()
    assert snapshot is not None and snapshot.router.package == "my-raycl 0.1.0"
    assert snapshot.provenance["versions"].items() >= used.items()


def test_the_command_line_finds_it_and_says_when_it_is_missing(
    lab: Lab, site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "run.yaml"
    tree = lab.tree("bert", "lora", modifiers=["scale"], train={"optimizer": "nesterov"})
    config.write_text(yaml.safe_dump({**tree, "method": {"name": "fading"}}))
    with on_path(site):
        assert main(["train", "--print-config", str(config)]) == 0
        assert "decay: 0.5" in capsys.readouterr().out
        assert main(["plugins"]) == 0
    listed = capsys.readouterr().out
    assert "recency" in listed and len(listed.splitlines()) == 8
    assert main(["train", "--print-config", str(config)]) == 1
    assert "error: config key 'method' names 'fading': " in capsys.readouterr().err


@pytest.mark.usefixtures("package")
def test_files_in_the_format_of_the_package_are_learned_and_scored_by_its_metric(lab: Lab, tmp_path: Path) -> None:
    stream = {"tasks": piped(tmp_path), "cache_dir": str(tmp_path / "cache")}
    storage = Storage.at(tmp_path / "run")
    run(lab.config("bert", "anchored", stream=stream), storage)
    results = storage.read_json("results.json")
    assert results["finished"] and results["versions"]["format piped"] == "my-raycl 0.1.0"
    plain = Storage.at(tmp_path / "plain")
    run(lab.config("bert", "anchored"), plain)
    assert trace(storage) == trace(plain), "the same rows"


@pytest.mark.usefixtures("package")
def test_an_order_of_the_package_is_found_below_a_root(tmp_path: Path) -> None:
    for name in ("yelp", "hotel_reviews", "amazon"):
        (tmp_path / name).mkdir()
        for split in ("train", "test"):
            label = "good" if name == "hotel_reviews" else "positive"
            row = json.dumps({"text": "clean rooms", "label": label})
            (tmp_path / name / f"{split}.jsonl").write_text(f"{row}\n" * 3)
    config = StreamConfig(name="reviews", root=str(tmp_path), dev_fraction=0, cache_dir=str(tmp_path / "cache"))
    tasks = open_stream(config, 0).tasks
    assert [task.name for task in tasks] == ["yelp", "hotels", "amazon"] and tasks[1].labels == ("good", "bad")


def piped(folder: Path) -> list[dict[str, Any]]:
    """Return the tasks of the laboratory in the format of the package."""
    specs = save_tasks(folder / "tasks")
    for spec in specs:
        for split in ("train", "test"):
            file = Path(spec["path"]) / f"{split}.jsonl"
            rows = map(json.loads, file.read_text().splitlines())
            file.with_suffix(".piped").write_text("".join(f"{row['text']}|{row['label']}\n" for row in rows))
            file.unlink()
        spec |= {"format": "piped", "metric": "prefix"}
    return specs


def test_a_bank_of_the_package_is_served_with_it_alone(
    lab: Lab, package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    storage = Storage.at(tmp_path / "run")
    run(lab.config("bert", "fading"), storage)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "fire is warm", "label": "red"}\n')
    bank = str(Path(storage.root) / "bank")
    assert main(["evaluate", bank, str(rows), "--task", "colour"]) == 0
    assert "exact_match" in capsys.readouterr().out
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder != str(package)])
    assert main(["evaluate", bank, str(rows), "--task", "colour"]) == 1
    words = "router 'recency' comes from package 'my-raycl' 0.1.0, which is not installed here: pip install my-raycl=="
    assert words in capsys.readouterr().err


def test_a_worker_that_lacks_the_package_leaves_the_sentence_to_the_driver(
    lab: Lab, site: Path, tmp_path: Path
) -> None:
    """The job travels to a worker before anything of the package is imported there."""
    output = {"dir": str(tmp_path), "name": "run"}
    with on_path(site):
        job = job_of(prepare(lab.config("bert", "lora", train={"optimizer": "nesterov"}, output=output)), RunOptions())
    words = (
        "optimizer 'nesterov' comes from package 'my-raycl' 0.1.0, and the worker on .* does not have it: install it"
    )
    with pytest.raises(PluginError, match=words):
        work(pickle.loads(pickle.dumps(job)), Worker(DistributedContext.alone(torch.device("cpu"))))
    with pytest.raises(RunError, match=words):
        raise_left(job)
