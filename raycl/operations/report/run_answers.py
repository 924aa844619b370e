"""Answers of a run to test rows (`predictions/`), where its folder has them: texts, references, answers, scores."""

import json
from dataclasses import dataclass

from raycl.config import Tree
from raycl.metrics.paired_comparison import RowScores
from raycl.metrics.run_results import FOLDER
from raycl.storage import Storage


@dataclass(frozen=True)
class AnsweredRow:
    """A test row with its answer.

    Attributes:
        score: 0 to 100; None: the task's metric is no mean of rows, or the run is older than scores of rows.
    """

    text: str
    references: tuple[str, ...]
    answer: str
    score: float | None


def answered_rows(result: Tree, phase: int, task: str) -> list[AnsweredRow]:
    """Return the answers to a task's test rows after a phase; empty where they were not kept.

    Args:
        phase: number of the phase, from 0.
    """
    if FOLDER not in result:
        return []
    name = f"predictions/{phase:03d}-{result['phases'][phase]}/{task}.jsonl"
    storage = Storage.at(result[FOLDER])
    if not storage.exists(name):
        return []
    records = [json.loads(line) for line in storage.read(name).decode().splitlines()]
    return [
        AnsweredRow(record["text"], tuple(record["references"]), record["answer"], record.get("score"))
        for record in records
    ]


def row_scores(result: Tree, phase: int, task: str) -> RowScores | None:
    """Return the scores of a task's test rows after a phase; None where they are not known."""
    rows = answered_rows(result, phase, task)
    scores = [row.score for row in rows if row.score is not None]
    if not rows or len(scores) < len(rows):
        return None
    return RowScores.of(scores, [text for row in rows for text in (row.text, *row.references)])
