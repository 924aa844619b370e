"""`raycl probe`: the large outputs of finished models, with the modifier and without, against sums made by hand."""

from __future__ import annotations

import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import TASKS, Complete, Lab, Stop, run, work
from transformers import AutoModelForSeq2SeqLM

from raycl import config as configs
from raycl.backbone import load_codec
from raycl.cli import main
from raycl.data.stream import open_stream
from raycl.errors import ConfigError, RunError
from raycl.launch import prepared_run
from raycl.launch.probe import FILE, ProbeSettings, probe
from raycl.operations.report.phase_summaries import unpacked_rows
from raycl.storage import Storage
from raycl.storage.records import hashed
from raycl.training.records.run_folder import CONFIG

ROWS, HALF = 3, ProbeSettings(rows=3, threshold=0.5)
MIGU = [{"name": "migu", "threshold": 0.7, "skip_first_task": False}]


def finished(lab: Lab, folder: Path, name: str, kind: str = "t5", method: Any = "finetune", **sections: Any) -> str:
    """Return the address of a complete run."""
    config = lab.config(kind, method, output={"dir": str(folder), "name": name}, **sections)
    work(prepared_run.prepare(config))
    return str(folder / name)


@pytest.fixture(scope="module")
def runs(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("runs")
    return {
        "plain": finished(lab, folder, "plain"),
        "migu": finished(lab, folder, "migu", modifiers=MIGU),
        "lora": finished(lab, folder, "lora", method="lora"),
    }


def by_hand(lab: Lab, model_folder: str | Path) -> dict[str, list[set[int]]]:
    """Return layer -> the larger half of its outputs for each task: one text at a time, so without padding."""
    config = lab.config("t5", "finetune")
    codec = load_codec(config.backbone, config.stream.max_source_tokens, config.stream.max_target_tokens)
    stream = open_stream(config.stream, config.seed)
    model = AutoModelForSeq2SeqLM.from_pretrained(model_folder).eval()
    by_hand: dict[str, list[set[int]]] = {}
    for task in stream.tasks:
        sums: dict[str, Any] = {}

        def add(path: str, y: torch.Tensor, sums: dict[str, Any] = sums) -> None:
            sums[path] = sums.get(path, 0) + y.double().abs().sum((0, 1))

        linears = [(path, part) for path, part in model.named_modules() if path.split(".")[-1] in "q k v o wi wo"]
        handles = [
            part.register_forward_hook(lambda _, __, y, path=path, add=add: add(path, y))
            for path, part in linears
            if isinstance(part, torch.nn.Linear)
        ]
        columns = stream.table(task, "test", codec).columns(range(ROWS))
        with torch.no_grad():
            for source, target in zip(columns.source_ids, columns.target_ids, strict=True):
                ids, labels = (torch.from_numpy(item.astype(np.int64)).unsqueeze(0) for item in (source, target))
                model(input_ids=ids, labels=labels)
        for handle in handles:
            handle.remove()
        for path, n in sums.items():
            by_hand.setdefault(path, []).append(set(n.argsort(descending=True)[: len(n) - len(n) // 2].tolist()))
    return by_hand


def sets(layers: dict[str, Any]) -> dict[str, list[set[int]]]:
    return {path: [set(unpacked_rows(item).nonzero()[0].tolist()) for item in kept] for path, kept in layers.items()}


@pytest.mark.parametrize("name", ["plain", "migu"])
def test_the_large_outputs_are_those_summed_by_hand_over_a_tasks_test_texts(
    lab: Lab, runs: dict[str, str], name: str
) -> None:
    result = probe(runs[name], HALF)
    assert result["tasks"] == list(TASKS)
    last = sorted(Path(runs[name], "learned").iterdir())[-1]
    assert sets(result["models"]["trained"]) == by_hand(lab, last)
    assert sets(result["models"]["untrained"]) == by_hand(lab, lab.model_folder("t5"))
    assert result["models"]["trained"] != result["models"]["untrained"]


def test_the_command_prints_the_overlap_of_tasks_side_by_side(
    lab: Lab, runs: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    png, table = tmp_path / "new" / "overlap.png", tmp_path / "new" / "overlap.csv"
    words = ["probe", runs["plain"], runs["migu"], "--rows", "3", "--threshold", "0.5"]
    assert main.main([*words, "--png", str(png), "--csv", str(table)]) == 0
    text = capsys.readouterr().out
    assert png.is_file() and "50.0 is chance" in text and "untrained" in text and "finetune+migu" in text
    folders = {
        "untrained": lab.model_folder("t5"),
        "finetune": Path(runs["plain"]),
        "finetune+migu": Path(runs["migu"]),
    }
    for title, folder in folders.items():
        last = folder if title == "untrained" else sorted((folder / "learned").iterdir())[-1]
        shares = [len(item & other) / len(item) for item, other in by_hand(lab, last).values()]
        (line,) = [item for item in table.read_text().splitlines() if f",{title}," in item and ",all layers," in item]
        assert float(line.split(",")[-3]) == pytest.approx(100 * sum(shares) / len(shares))
    assert main.main([*words, "--layer", "DenseReluDense.wi"]) == 0
    shown = capsys.readouterr().out
    assert "DenseReluDense.wi" in shown and "SelfAttention" not in shown
    assert main.main([*words, "--layer", "nothing"]) == 1
    assert "no measured layer ends with 'nothing'" in capsys.readouterr().err


KINDS = [
    ("bert", "slm", "answer"),
    ("llama", "olora", "answer"),
    ("bert", "finetune", "answer"),
    ("t5", "sapt", "answer"),
    ("masked", "lora", "mlm"),
    ("llama", "finetune", "clm"),
]


@pytest.mark.parametrize(("kind", "method", "objective"), KINDS)
def test_every_method_and_kind_of_backbone_can_be_measured(
    lab: Lab, complete: Complete, tmp_path: Path, kind: str, method: str, objective: str
) -> None:
    if objective == "answer":
        done = complete(kind, method, "torch")
        storage = done.copy(tmp_path)
        storage.write(CONFIG, configs.to_yaml(done.config).encode())
        address = storage.uri
    else:
        address = finished(lab, tmp_path, "one", kind, method, stream={"objective": objective})
    result = probe(address, HALF)
    models = result["models"]
    assert models["trained"].keys() == models["untrained"].keys() and len(models["trained"]) > 8
    for kept in models["trained"].values():
        assert [int(unpacked_rows(item).sum()) for item in kept] == [item["rows"] - item["rows"] // 2 for item in kept]
    assert models["trained"] != models["untrained"]


def test_a_run_whose_checkpoints_were_removed_is_read_from_its_bank(runs: dict[str, str], tmp_path: Path) -> None:
    result = probe(runs["lora"], HALF)
    copies = {name: shutil.copytree(runs[name], tmp_path / name) for name in ("lora", "plain")}
    for copy in copies.values():
        shutil.rmtree(Path(copy, "checkpoints"))
    assert probe(str(copies["lora"]), HALF, again=True)["models"] == result["models"]
    with pytest.raises(RunError, match=r"the weights of .* are gone"):
        probe(str(copies["plain"]), HALF, again=True)


def test_what_was_measured_is_kept_until_the_settings_differ(runs: dict[str, str], tmp_path: Path) -> None:
    address = str(shutil.copytree(runs["plain"], tmp_path / "copy"))
    first = probe(address, HALF)
    storage = Storage.at(address)
    storage.write_json(FILE, hashed({**first, "mark": True}))
    assert probe(address, HALF)["mark"]
    whole = storage.read(FILE)
    for bad in (b"", whole[:90], whole.replace(b"true", b"null"), b"[]"):
        storage.write(FILE, bad)
        assert "mark" not in probe(address, HALF), "a damaged file is measured again"
    storage.write(FILE, whole)
    assert "mark" not in probe(address, HALF, again=True)
    counts = [
        sum(
            item["rows"] - item["rows"] * tenths // 10
            for kept in probe(address, settings)["models"]["trained"].values()
            for item in kept
        )
        for tenths, settings in ((5, HALF), (7, ProbeSettings(rows=3)))
    ]
    assert (
        all(item > other for item, other in pairwise(counts))
        and storage.read_json(FILE)["settings"]["threshold"] == 0.7
    )


def test_runs_that_have_no_one_model_at_the_end_are_refused(lab: Lab, tmp_path: Path) -> None:
    separate = finished(lab, tmp_path, "separate", method="separate")
    with pytest.raises(RunError, match="has a model for each task"):
        probe(separate, HALF)
    config = lab.config("t5", "lora", output={"dir": str(tmp_path), "name": "stopped"})
    prepared = prepared_run.prepare(config)
    with pytest.raises(Stop):
        run(config, prepared.storage, after=5)
    with pytest.raises(RunError, match="has finished 1 of 2 phases: continue it with raycl train --resume"):
        probe(str(tmp_path / "stopped"), HALF)
    with pytest.raises(ConfigError, match="0 rows of each task: expected at least 1"):
        ProbeSettings(rows=0)
    with pytest.raises(ConfigError, match="threshold is 1: expected at least 0 and less than 1"):
        ProbeSettings(threshold=1)
