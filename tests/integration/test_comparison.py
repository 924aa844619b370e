"""A table of runs: each once, those that need another after it, one that fails alone. In this process, not on workers.

What workers do is tested in tests/ray; `make demo` runs a whole comparison on them.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from at_step import learn
from tiny import Lab, run

from raycl import config as configs
from raycl.bank import Bank
from raycl.bank.branches import head_of
from raycl.cli.main import main
from raycl.errors import ConfigError, RunError, StoppedError
from raycl.launch import cluster, driver, prepared_run
from raycl.launch.driver import RunOptions
from raycl.launch.prepared_run import Prepared
from raycl.metrics.run_results import find_results, read_results
from raycl.operations.banks.unlearning import evaluate
from raycl.operations.report.run_comparison import compare, runs_to_csv
from raycl.operations.report.tables import comparison_table
from raycl.operations.sweep.comparison import ComparisonConfig, load_comparison, plan, rows_of, run_comparison, states
from raycl.operations.sweep.fused_rows import FusedRow, fused_run
from raycl.storage import Storage
from raycl.storage.records import hashed
from raycl.training.records.journal import read_state
from raycl.training.workers.stopping import stopped_by


@pytest.mark.parametrize("at_once", [1, 2])
def test_rows_one_or_two_at_a_time(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    one_at_a_time, hostings, done = threading.Lock(), [], []

    def train(prepared: Prepared, options: RunOptions) -> dict[str, Any]:
        hostings.append(options)
        if prepared.done < len(prepared.phases):
            with one_at_a_time:  # torch draws from one generator
                run(prepared.config, prepared.storage)
            done.append(prepared.name)
        return prepared_run.finish(prepared)

    monkeypatch.setattr(cluster, "joined", lambda address: nullcontext())
    monkeypatch.setattr(driver, "train", train)
    runs = {
        "separate": {"set": ["stream.schedule=separate"]},
        "lora": {"set": ["method=lora"], "singles": "separate"},
        "broken": {"set": ["stream.tasks=[nowhere]"]},
        "finetune": {"set": ["method=finetune"]},
        "merged": {"fused": {"of": "separate", "how": "ties", "density": 0.5}},
    }
    published = {"source": "a paper, its table 2", "rows": {"lora": {"ap": 82.02}}}
    tree: dict[str, Any] = {"name": "table", "base": lab.tree("bert"), "runs": runs, "seeds": [3], "at_once": at_once}
    tree["published"] = published
    comparison = configs.validate(ComparisonConfig, tree)
    outcome = run_comparison(comparison, str(tmp_path))
    trained = ["separate-s3", "lora-s3", "finetune-s3"]
    assert list(outcome.results) == [*trained, "merged-s3"] and sorted(done) == sorted(trained)
    assert list(outcome.failed) == ["broken-s3"] and "nowhere" in outcome.failed["broken-s3"]
    assert outcome.results["lora-s3"]["metrics"]["fwt"] is not None
    later = find_results(tmp_path / "table")
    for results in (later, list(outcome.results.values())):
        shown = str(comparison_table(compare(results)))
        assert "82.02" in shown and "published: a paper, its table 2" in shown
    assert {options.share for options in hostings} == {at_once}
    assert all(bool(options.label) is (at_once > 1) for options in hostings)
    with pytest.raises(ConfigError, match="no row 'lroa': expected some of separate, lora, broken, finetune"):
        run_comparison(comparison, str(tmp_path), only=("lora", "lroa"))
    with pytest.raises(
        ConfigError, match="--only leaves out 'separate', which its rows need and which is not finished: add it"
    ):
        run_comparison(comparison, str(tmp_path / "anew"), only=("lora", "merged"))
    assert rows_of(comparison, ("lora-s3", "finetune")) == ["lora", "finetune"]
    check_fused(comparison, outcome.results["merged-s3"], tmp_path)
    again = run_comparison(comparison, str(tmp_path), only=("lora-s3", "finetune"))
    assert len(done) == 3 and again.results["lora-s3"]["metrics"] == outcome.results["lora-s3"]["metrics"]


def check_fused(comparison: ComparisonConfig, result: dict[str, Any], folder: Path) -> None:
    """Check that a row's one adapter out of two is scored, published, and made once, even where scoring was stopped."""
    runs = Storage.at(folder / "table")
    bank = Bank(runs.sub("separate-s3/bank"))
    snapshot = head_of(bank, "merged-s3")
    assert [set(entry.tasks) for entry in snapshot.adapters] == [set(result["stream"]["tasks"])]
    scores = {task: score.value for task, score in evaluate(bank, snapshot).items()}
    assert [cell["value"] for cell in result["matrix"][-1]] == [scores[task] for task in result["stream"]["tasks"]]
    assert result["metrics"]["ap"] == pytest.approx(sum(scores.values()) / 2)
    lines = runs_to_csv(find_results(folder / "table")).splitlines()
    (line,) = [line for line in lines if line.startswith("merged-s3,3,")]
    assert "lora, fused by ties" in line
    assert states(comparison, str(folder), ("merged",)) == {"merged-s3": "finished"}
    runs.sub("merged-s3").delete("results.json")
    again = run_comparison(comparison, str(folder), only=("merged",)).results["merged-s3"]
    assert again["matrix"] == result["matrix"] and head_of(bank, "merged-s3").number == snapshot.number
    row = FusedRow(of="separate", how="ties", density=0.9)
    changed = comparison.model_copy(
        update={"runs": {**comparison.runs, "merged": comparison.runs["merged"].model_copy(update={"fused": row})}}
    )
    for file in ("results.json", None):
        said = run_comparison(changed, str(folder), only=("merged",)).failed["merged-s3"]
        assert "has another fusion (fused.density was 0.5, now 0.9): name the row otherwise, or remove it" in said
        if file:
            runs.sub("merged-s3").delete(file)
    runs.sub("merged-s3").write_json("results.json", hashed(again))
    source, row = runs.sub("separate-s3"), comparison.runs["merged"].fused
    whole = read_results(source.address)
    source.write_json("results.json", hashed({**whole, "finished": False, "matrix": [whole["matrix"][0], [None] * 2]}))
    with pytest.raises(ConfigError, match="leaves out 'separate', which its rows need and which is not finished"):
        run_comparison(comparison, str(folder), only=("merged",))
    assert row is not None
    with pytest.raises(RunError, match="separate-s3' has learned 1 of 2 phases: let it finish first"):
        fused_run(row, plan(comparison, str(folder))["merged-s3"], "separate-s3")
    source.write_json("results.json", hashed(whole))


def test_what_cannot_be_fused_is_refused_before_a_run(lab: Lab, tmp_path: Path) -> None:
    def checked(**merged: Any) -> ComparisonConfig:
        runs = {"lora": {"set": ["method=lora"]}, "apart": {"set": ["method=lora", "stream.schedule=separate"]}}
        file = tmp_path / "table.yaml"
        file.write_text(json.dumps({"name": "table", "base": lab.tree("bert"), "runs": {**runs, "merged": merged}}))
        return load_comparison(str(file))

    assert list(plan(checked(fused={"of": "apart", "how": "svd"}), ".")) == ["lora-s42", "apart-s42", "merged-s42"]
    for merged, words in (
        ({"fused": {"of": "lora", "how": "svd"}}, "fused.of: 'lora' publishes no adapter for each task"),
        (
            {"fused": {"of": "nothing", "how": "svd"}},
            "runs.merged.fused.of is 'nothing': expected a run that is listed",
        ),
        ({"fused": {"of": "apart", "how": "sum"}}, "runs.merged.fused.how"),
        ({"fused": {"of": "apart", "how": "svd"}, "set": ["seed=1"]}, "trains nothing: leave set and singles out"),
        ({"fused": {"of": "apart", "how": "average", "density": 0.3}}, "density acts on ties and dare alone"),
    ):
        with pytest.raises(ConfigError, match=words):
            checked(**merged)
    tree = {"name": "table", "base": lab.tree("bert"), "runs": {}}
    with pytest.raises(ConfigError, match="runs"):
        configs.validate(ComparisonConfig, tree)
    apart = {"set": ["method=lora", "stream.schedule=separate"]}
    for again in ({"singles": "fused"}, {"fused": {"of": "fused", "how": "svd"}}):
        tree["runs"] = {"apart": apart, "fused": {"fused": {"of": "apart", "how": "svd"}}, "again": again}
        with pytest.raises(ConfigError, match="is 'fused', which is fused itself: name a row that trains"):
            configs.validate(ComparisonConfig, tree)


def test_the_command_ends_with_verdicts_and_a_page(
    lab: Lab, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two seeds are paired by the scores of their test rows, which the runs' folders have."""
    base = {**lab.tree("bert", stream={"tasks": lab.tasks[:1]}), "launch": {"mode": "local"}}
    runs = {"lora": {"set": ["method=lora"]}, "finetune": {"set": ["method=finetune"]}}
    file = tmp_path / "table.yaml"
    file.write_text(json.dumps({"name": "table", "base": base, "runs": runs, "seeds": [0, 1]}))
    given = ["compare", str(file), "--dir", str(tmp_path / "runs")]
    assert main([*given, "--against", "sapt"]) == 1 and not (tmp_path / "runs").exists()
    assert "--against is 'sapt', which is no row of this run: expected lora, finetune" in capsys.readouterr().err
    assert main([*given, "--against", "lora", "--json"]) == 0
    output = capsys.readouterr()
    warnings = [line for line in output.err.splitlines() if ": test rows with a text that is in train: " in line]
    assert len(warnings) == 1, "of the one task, though four runs read the same rows"
    shown = json.loads(output.out)
    (verdict,) = shown["verdicts"]
    assert (verdict["second"], verdict["seeds"], verdict["paired_over"]) == ("lora", 2, "seeds and test rows")
    ap = {name: tree["metrics"]["ap"] for name, tree in shown["results"].items()}
    differences = [ap[f"finetune-s{seed}"] - ap[f"lora-s{seed}"] for seed in (0, 1)]
    assert verdict["difference"] == pytest.approx(sum(differences) / 2)
    page = (tmp_path / "runs/table/report.html").read_text()
    assert verdict["sentence"] in page and "Sample answers" in page
    assert main(["report", str(tmp_path / "runs/table"), "--against", "lora", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdicts"] == shown["verdicts"], "the report reads the same"


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_stops_all_runs_with_a_checkpoint(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, status: int
) -> None:
    """Two runs are learning, the third has not begun; the same command continues them."""
    both, started = threading.Barrier(2), []

    def train(prepared: Prepared, options: RunOptions) -> dict[str, Any]:
        stop = options.stop
        assert stop is not None
        started.append(prepared.name)

        def send() -> None:
            if both.wait() == 0:
                os.kill(os.getpid(), number)
            while not stop.is_requested:
                time.sleep(0.01)

        learn(prepared.config, prepared.storage, 3, send, stop)
        raise stopped_by(stop.reason, prepared.name)

    monkeypatch.setattr(cluster, "joined", lambda address: nullcontext())
    monkeypatch.setattr(driver, "train", train)
    runs = {name: {"set": ["method=lora", f"method.r={rank}"]} for rank, name in enumerate(("a", "b", "c"), 1)}
    tree: dict[str, Any] = {"name": "table", "base": lab.tree("bert"), "runs": runs, "seeds": [3], "at_once": 2}
    before = signal.getsignal(number)
    with pytest.raises(
        StoppedError, match=r"^stopped by .*, [ab]-s3; the same command continues with all runs$"
    ) as error:
        run_comparison(configs.validate(ComparisonConfig, tree), str(tmp_path))
    assert error.value.exit_status == status and signal.getsignal(number) is before
    assert sorted(started) == ["a-s3", "b-s3"], "a run began after the signal"
    for name in started:
        newest = read_state(Storage.at(tmp_path / "table" / name)).checkpoints[-1]
        assert newest.startswith("phase000-step0000003"), "a checkpoint of the very last step"


def test_published_numbers_are_checked() -> None:
    tree = {"name": "table", "runs": {"lora": {}}, "published": {"source": "a paper", "rows": {"lroa": {"ap": 1.0}}}}
    with pytest.raises(ConfigError, match=r"published.rows names 'lroa': expected some of lora"):
        configs.validate(ComparisonConfig, tree)
    tree["published"] = {"source": "a paper", "rows": {"lora": {"average": 1.0}}}
    with pytest.raises(ConfigError, match=r"row 'lora' has the number 'average': expected ap, f_ra, fwt, bwt"):
        configs.validate(ComparisonConfig, tree)
    rows = {"lora": {"ap": 1.0}}
    tree["published"] = {"source": "a paper", "rows": rows, "contradicted": {"lora": {"bwt": "elsewhere -1"}}}
    with pytest.raises(ConfigError, match=r"contradicted.lora names 'bwt', of which rows.lora has no number"):
        configs.validate(ComparisonConfig, tree)


def test_a_row_runs_with_fewer_seeds(lab: Lab) -> None:
    """Its reference for FWT must have them."""
    alone = {"set": ["stream.schedule=separate"]}
    tree: dict[str, Any] = {"name": "table", "base": lab.tree("bert"), "seeds": [0, 1, 2]}
    tree["runs"] = {"separate": alone, "lora": {"singles": "separate"}, "finetune": {"seeds": [0]}}
    planned = list(plan(configs.validate(ComparisonConfig, tree), "."))
    assert planned == ["separate-s0", "lora-s0", "finetune-s0", "separate-s1", "lora-s1", "separate-s2", "lora-s2"]
    tree["runs"]["finetune"] = {"seeds": [3]}
    with pytest.raises(ConfigError, match=r"runs.finetune.seeds has 3: expected some of seeds, \[0, 1, 2\]"):
        configs.validate(ComparisonConfig, tree)
    tree["runs"] = {"separate": {**alone, "seeds": [0]}, "lora": {"singles": "separate", "seeds": [0, 2]}}
    with pytest.raises(ConfigError, match=r"runs.lora runs with seed 2, and 'separate', .* to runs.separate.seeds"):
        configs.validate(ComparisonConfig, tree)
