"""`eval.subsample`: the same rows after each task and for each method, with intervals."""

from __future__ import annotations

import json
from pathlib import Path

from tiny import Lab, run

from raycl.operations.report.tables import matrix_table
from raycl.storage import Storage


def texts(storage: Storage, folder: str, task: str) -> list[str]:
    lines = storage.read(f"predictions/{folder}/{task}.jsonl").decode().splitlines()
    return [json.loads(line)["text"] for line in lines]


def test_the_same_rows_are_scored_everywhere_and_scores_have_intervals(lab: Lab, tmp_path: Path) -> None:
    stream = {"tasks": lab.tasks, "dev_fraction": 0, "max_source_tokens": 24, "unseen": [lab.unseen]}
    rows = []
    for kind, method in (("llama", "lora"), ("t5", "finetune")):
        storage = Storage.at(tmp_path / kind)
        config = lab.config(kind, method, stream=stream, eval={"subsample": 4, "untrained": True})
        results = run(config, storage).recorder.results()
        cells = [cell for row in results["matrix"] for cell in row if cell]
        cells += [*results["unseen"]["cells"].values(), *results["untrained"]["cells"].values()]
        assert len(cells) == 3 + 1 + 3 and all(cell["count"] == 4 for cell in cells)
        assert all(cell["extra"]["low"] <= cell["value"] <= cell["extra"]["high"] for cell in cells)
        shown = str(matrix_table(results))
        last = results["matrix"][-1][0]["extra"]
        assert shown.count("95 % interval") == 2 and f"{last['low']:.1f}–{last['high']:.1f}" in shown
        rows.append([texts(storage, folder, "colour") for folder in ("untrained", "000-colour", "001-animal")])
        rows.append([texts(storage, "unseen", "mixed")])
    assert rows[0] == rows[2] and rows[1] == rows[3] and rows[0][0] == rows[0][1] == rows[0][2]
    assert len(rows[0][0]) == 4
