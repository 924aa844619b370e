"""Write task files of lm-eval for tasks in the layout of SuperNI, to measure general ability on texts outside a stream.

python jobs/lm_eval_tasks.py DATA/superni FOLDER task591_sciq_answer_generation task875_emotion_classification
raycl train jobs/configs/best.yaml eval.general.include_path=FOLDER 'eval.general.tasks=[superni]'

Each row of a task's test.json becomes a question with choices, whose likelihoods are compared: all labels of a task
with few, otherwise the row's own answer and three of other rows. The tag `superni` names all of them. FOLDER gets the
rows too, so that nothing of DATA is read later.
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any

import yaml

LABELS, CHOICES = 10, 4
"""A task with at most so many different answers has all of them as choices; others have so many choices."""


def main(arguments: list[str] | None = None) -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, metavar="DATA", help="folder of tasks, each a folder with test.json")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where the task files are written")
    parser.add_argument("tasks", nargs="+", metavar="TASK", help="names of tasks in DATA")
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    for name in options.tasks:
        source = json.loads((options.data / name / "test.json").read_text())
        rows = options.folder / f"{name}.jsonl"
        rows.write_text("".join(f"{json.dumps(row)}\n" for row in questions(source)))
        file = options.folder / f"{name}.yaml"
        file.write_text(yaml.safe_dump(task_file(name, rows.absolute()), sort_keys=False))


def questions(source: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a task's rows as questions: the definition with the input, the choices and the place of the right one."""
    answers = [row["output"] if isinstance(row["output"], str) else row["output"][0] for row in source["Instances"]]
    accepted = [{row["output"]} if isinstance(row["output"], str) else {*row["output"]} for row in source["Instances"]]
    known = sorted(set(answers))
    rows = []
    for number, (row, answer) in enumerate(zip(source["Instances"], answers, strict=True)):
        others = [other for other in known if other not in accepted[number]]
        draw = random.Random(number)
        if len(known) > LABELS:
            others = draw.sample(others, CHOICES - 1)
        choices = [answer, *others]
        draw.shuffle(choices)
        query = f"{source['Definition'][0].strip()}\n\n{row['input'].strip()}\nAnswer:"
        rows.append({"query": query, "choices": choices, "gold": choices.index(answer)})
    return rows


def task_file(name: str, rows: Path) -> dict[str, Any]:
    """Return the task in lm-eval's format."""
    measures = [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc_norm", "acc")]
    return {
        "task": name,
        "tag": ["superni"],
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(rows)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{query}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{gold}}",
        "metric_list": measures,
    }


if __name__ == "__main__":
    main()
