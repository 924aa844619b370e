"""`python jobs/benchmark.py evaluation` with few rows: both ways answer all of them, with the same answers."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tiny import TASKS, Lab

from benchmarks.streams import evaluation

FOLDERS = ("task1572_samsum_summary", "task591_sciq_answer_generation")


def test_figures_are_measured(lab: Lab, tmp_path: Path) -> None:
    for folder, classes in zip(FOLDERS, TASKS.values(), strict=True):
        (tmp_path / folder).mkdir()
        instances = [{"input": words, "output": [label]} for label, words in classes * 3]
        for split in ("train", "test"):
            tree = {"Definition": ["the very much"], "Instances": instances}
            (tmp_path / folder / f"{split}.json").write_text(json.dumps(tree))
    parser = argparse.ArgumentParser()
    evaluation.add_flags(parser)
    words = ["--backbone", str(lab.model_folder("llama")), "--data", str(tmp_path), "--tasks", "task1572", "task591"]
    sizes = [
        "--rows",
        "4",
        "--steps",
        "2",
        "--rounds",
        "1",
        "--source-tokens",
        "100",
        "--target-tokens",
        "4",
        "--threads",
        "1",
    ]
    report = evaluation.measure(parser.parse_args([*words, *sizes, "--dtype", "float32"]))
    ratios = [figure for figure in report.figures if figure.unit == "x"]
    assert len(report.figures) == 10 and all(figure.value > 0 for figure in report.figures)
    assert all(figure.detail.startswith("8 rows, 0 with another answer") for figure in ratios)
