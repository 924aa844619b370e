"""`method.train_nearest`: the adapter of the most similar known task learns on beside the new task's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny import Lab, run

from raycl.bank.tensor_groups import TensorGroups
from raycl.config import validate
from raycl.errors import BankError, ConfigError
from raycl.methods.registry import method_config
from raycl.methods.sapt.sapt import Sapt
from raycl.operations.plan.arithmetic import GPUS, Cluster
from raycl.operations.plan.report import plan
from raycl.operations.report.tables import matrix_table
from raycl.storage import Storage
from raycl.testing import check_method
from raycl.training.setup.checks import check
from raycl.training.setup.run_config import RunConfig
from raycl.types import AdapterState

METHOD = {"name": "sapt", "train_nearest": True, "start_threshold": 0.999, "router_text": "input"}


def are_equal(first: AdapterState, second: AdapterState) -> bool:
    ones, others = first.tensors(), second.tensors()
    return ones.keys() == others.keys() and all(torch.equal(ones[name], others[name]) for name in ones)


@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_a_later_task_trains_the_adapter_of_the_most_similar_one_and_no_other(
    lab: Lab, tmp_path: Path, kind: str
) -> None:
    """The third task has the texts of the first one, and the second one those of none."""
    tasks = [*lab.tasks, {**lab.tasks[0], "name": "again"}]
    storage = Storage.at(tmp_path / "three")
    before = run(lab.config(kind, METHOD), Storage.at(tmp_path / "two")).context.method
    after = run(validate(RunConfig, lab.tree(kind, METHOD, stream={"tasks": tasks})), storage).context.method
    assert isinstance(before, Sapt) and isinstance(after, Sapt)
    assert are_equal(before._learned["animal"], after._learned["animal"])
    assert not are_equal(before._learned["colour"], after._learned["colour"])
    results = storage.read_json("results.json")
    assert after.trained_on == results["phase_summaries"][-1]["trained_on"] == {"again": "colour"}
    assert "trained_on" not in results["phase_summaries"][1]
    assert "earlier adapters trained on: colour with again (cosine 1.000)" in str(matrix_table(results))
    with pytest.raises(BankError, match=r"'again' has trained the adapter of colour too .* cannot be taken out"):
        Sapt.without_task(*after.state_dict(), "again", ["again"], False)
    values, _ = Sapt.without_task(*after.state_dict(), "animal", ["animal"], False)
    assert values["trained_on"] == {"again": "colour"}
    without_first, _ = Sapt._without({**values, "learned": []}, TensorGroups({}), "colour", ())
    assert without_first["trained_on"] == {}


def test_a_run_stops_and_resumes_and_is_served() -> None:
    check_method(Sapt, {**METHOD, "start_threshold": -1.0}, kinds=("t5",))


def test_plans_count_both_adapters(lab: Lab) -> None:
    adapter = {"name": "lora", "r": 8}
    methods = (adapter, {**METHOD, "train_nearest": False}, METHOD)
    lora, own, both = (plan(lab.config("t5", method), Cluster(GPUS["a100-80"])).model.trained for method in methods)
    assert both == (own[0], own[1] + lora[0])


def test_what_cannot_be_trained_so_is_refused(lab: Lab) -> None:
    with pytest.raises(ConfigError, match=r"train_nearest .* label rows .* backbone that writes its answers"):
        check(lab.config("bert", METHOD))
    others = {"value": "prompt", "start_from": "nearest", "r_by_task": {"colour": 2}, "ablation": "shared_attention"}
    for name, value in others.items():
        with pytest.raises(ConfigError, match=f"train_nearest trains two LoRAs of one size .* {name}"):
            method_config({**METHOD, name: value})
