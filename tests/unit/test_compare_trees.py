"""`compare_trees.py` reports every kind of difference between two runs, and none between equal ones."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import compare_trees
import pytest
import torch
from run_difference import RECORD, ROUTED, SERVED, compared, distance_of
from safetensors.torch import load_file, save_file
from tiny import Complete, fits

from raycl.methods.registry import METHODS


@pytest.fixture
def pair(complete: Complete, tmp_path: Path) -> tuple[Path, Path]:
    """Return the same run twice, as the script lays them out."""
    for side in ("reference", "tree"):
        shutil.copytree(complete("bert", "slm", "torch").storage.path(), tmp_path / side / "run")
        for file, value in ((RECORD, {"trained": True}), (ROUTED, {"text [1]": {"colour.0": 0.25}}), (SERVED, ["red"])):
            (tmp_path / side / file).write_text(json.dumps(value))
    return tmp_path / "reference", tmp_path / "tree"


def replaced(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def differing(reference: Path, tree: Path) -> dict[str, Any]:
    return {kind: item for kind, item in compared(reference, tree).items() if item}


def test_equal_runs_have_no_difference_and_all_kinds_are_read(pair: tuple[Path, Path]) -> None:
    kinds = compared(*pair)
    assert not any(kinds.values())
    read = {kind for kind, item in kinds.items() if item.compared}
    assert read >= {"loss", "grad_norm", "matrix", "scores", "answers", "router", "tensors", "weights", "served"}
    assert kinds["loss"].compared == 8


def test_a_loss_that_differs_in_its_last_digit_is_reported(pair: tuple[Path, Path]) -> None:
    trace = next((pair[1] / "run" / "trace").iterdir())
    loss = json.loads(trace.read_text().splitlines()[0])["loss"]
    replaced(trace, f'"loss": {loss}', f'"loss": {loss + 2**-40}')
    (kind, one), *others = differing(*pair).items()
    assert not others and (kind, one.differ, one.largest) == ("loss", 1, 2**-40)


def test_a_bit_of_an_adapter_is_reported(pair: tuple[Path, Path]) -> None:
    for path in (pair[1] / "run" / "bank" / "objects").rglob("*.safetensors"):
        tensors = load_file(path)
        if any(tensor.is_floating_point() for tensor in tensors.values()):
            break
    name = next(name for name, tensor in tensors.items() if tensor.is_floating_point())
    tensors[name].view(-1).view(torch.int32)[0] ^= 1
    save_file(tensors, path)
    assert differing(*pair).keys() == {"tensors"}


def test_a_cell_an_answer_weights_and_a_file_on_one_side_are_reported(pair: tuple[Path, Path]) -> None:
    run = pair[1] / "run"
    results = json.loads((run / "results.json").read_text())
    results["matrix"][0][0]["value"] += 1
    (run / "results.json").write_text(json.dumps(results))
    first, *_, last = sorted((run / "predictions").rglob("*.jsonl"))
    replaced(first, '"answer": "', '"answer": "not ')
    last.unlink()
    (pair[1] / ROUTED).write_text(json.dumps({"text [1]": {"colour.0": 0.75}}))
    result = differing(*pair)
    assert result.keys() == {"matrix", "answers", "weights"}
    assert (result["matrix"].largest, result["weights"].largest) == (1, 0.5)
    assert result["answers"].differ == 1 and result["answers"].missing[0].startswith("only in the reference: ")


def test_values_that_are_no_numbers_have_no_distance() -> None:
    zeros = torch.zeros(2)
    assert distance_of(zeros, -zeros) and distance_of(zeros, zeros.double()) is None
    assert distance_of(zeros, torch.tensor([0.0, float("nan")])) == float("inf")
    assert distance_of(float("nan"), float("nan")) == 0 and distance_of("red", "blue") is None


def test_every_method_runs_on_every_kind_of_backbone_that_it_supports(tmp_path: Path) -> None:
    listed = compare_trees.runs(tmp_path)
    for method in METHODS:
        for kind in ("bert", "t5", "llama"):
            if fits(kind, method):
                assert f"{method}-{kind}".replace("+", "p") in listed
    assert all(tree["train"]["weight_decay"] == 0 for tree in listed.values())


def test_the_command_ends_with_1_where_a_run_differs(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def trained(checkout: Path, folder: Path, listed: dict[str, Any], number: int) -> None:
        for name in listed:
            shutil.copytree(pair[0], folder / name, dirs_exist_ok=True)
            if (folder.name.startswith("tree"), listed[name]["train"]["learning_rate"]) == (True, 0.5):
                replaced(next((folder / name / "run" / "trace").iterdir()), '"loss": ', '"loss": 1')

    monkeypatch.setattr(compare_trees, "train_all", trained)
    repository = str(Path(__file__).parents[2])
    command = [repository, repository, "--only", "lora-*", "--folder", str(tmp_path / "runs")]
    assert compare_trees.main(command) == 0
    assert "No run differs." in capsys.readouterr().out
    assert (
        compare_trees.main([*command, "--change", "train.learning_rate=0.5", "--json", str(tmp_path / "a.json")]) == 1
    )
    assert "| lora-t5 | 1 loss | 8 |" in capsys.readouterr().out
    assert json.loads((tmp_path / "a.json").read_text())["runs"]["lora-t5"]["loss"]["differ"] == 1
