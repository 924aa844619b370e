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
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from raycl.cli.commands import say_error
from raycl.data.sources.fields import Columns, SourceRow
from raycl.data.sources.formats import read_definition, read_rows
from raycl.data.sources.source import SourceFile
from raycl.errors import RayclError
from raycl.storage.output import write_output

LABELS, CHOICES = 10, 4
"""A task with at most so many different answers has all of them as choices; others have so many choices."""


def main(arguments: list[str] | None = None) -> int:
    """Write the files; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, metavar="DATA", help="folder of tasks, each a folder with test.json")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where the task files are written")
    parser.add_argument("tasks", nargs="+", metavar="TASK", help="names of tasks in DATA")
    options = parser.parse_args(arguments)
    try:
        for name in options.tasks:
            source = SourceFile.at(str(options.data / name / "test.json"))
            rows = list(read_rows(source, "natural_instructions", Columns()))
            _write(options.folder, name, questions(read_definition(source), rows))
    except RayclError as error:
        say_error(str(error))
        return error.exit_status
    return 0


def _write(folder: Path, name: str, rows: Sequence[dict[str, Any]]) -> None:
    lines = "".join(f"{json.dumps(row)}\n" for row in rows)
    file = write_output(folder / f"{name}.jsonl", lines.encode())
    write_output(folder / f"{name}.yaml", yaml.safe_dump(task_file(name, file.absolute()), sort_keys=False).encode())


def questions(definition: str, source: Sequence[SourceRow]) -> list[dict[str, Any]]:
    """Return a task's rows as questions: the definition with the input, the choices and the place of the right one."""
    known = sorted({row.references[0] for row in source})
    rows = []
    for number, row in enumerate(source):
        others = [other for other in known if other not in row.references]
        draw = random.Random(number)
        if len(known) > LABELS:
            others = draw.sample(others, min(CHOICES - 1, len(others)))
        choices = [row.references[0], *others]
        draw.shuffle(choices)
        query = "\n\n".join(filter(None, (definition, f"{row.text.strip()}\nAnswer:")))
        rows.append({"query": query, "choices": choices, "gold": choices.index(row.references[0])})
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
    sys.exit(main())
