"""Counts of served texts by task, and the texts that are kept because they are far from all tasks."""

from __future__ import annotations

import json

from raycl.generation.requests import ResponseMetadata
from raycl.serve.service.history import LONGEST, MOST_LABELS, MOST_TASKS, OTHER_LABEL, OTHERS, ServedCounts


def metadata(score: float | None = None, distance: float | None = None, snapshot: int = 1) -> ResponseMetadata:
    unknown = None if distance is None else distance > 5
    return ResponseMetadata(snapshot, {}, ood_score=score, ood_distance=distance, unknown=unknown)


def test_texts_count_for_the_task_with_the_largest_weight() -> None:
    served = ServedCounts()
    served.add("one", metadata(0.2, 1.0), {"news": 0.75, "film": 0.25}, "world")
    served.add("two", metadata(1.0, 9.0), {"news": 0.6, "film": 0.4}, "sport")
    served.add("three", metadata(), {}, None)
    counts = json.loads(json.dumps(served.tree(1)))
    assert counts["news"] == {
        "texts": 2,
        "unknown": 1,
        "ood": [0, 0, 1, 0, 0, 0, 0, 0, 0, 1],
        "labels": {"world": 1, "sport": 1},
    }
    assert (counts[""]["texts"], counts[""]["unknown"]) == (1, None), "nothing is known without a threshold"
    assert "film" not in counts and served.tree(2) == {}, "the snapshot after it has not answered yet"
    assert served.unsure() == [], "texts are kept only where the setting asks for it"


def test_another_snapshot_begins_at_zero_and_keeps_the_texts() -> None:
    served = ServedCounts(keep_unsure=2)
    served.add("far", metadata(1.0, 9.0), {"news": 1.0}, "world")
    served.add("near", metadata(0.1, 1.0, snapshot=2), {"film": 1.0}, None)
    assert list(served.tree(2)) == ["film"]
    assert [one["text"] for one in served.unsure()] == ["far", "near"]


def test_the_farthest_texts_are_kept_and_equal_ones_shown_once() -> None:
    served = ServedCounts(keep_unsure=3)
    for number, distance in enumerate((3.0, 8.0, 1.0, 6.0, 8.5)):
        served.add(f"text {number % 4}" + "x" * LONGEST, metadata(1.0, distance), {"news": 1.0}, None)
    listed = served.unsure()
    assert [(one["text"][:6], one["ood_distance"]) for one in listed] == [
        ("text 0", 8.5),
        ("text 1", 8.0),
        ("text 3", 6.0),
    ]
    assert all(len(one["text"]) == LONGEST for one in listed) and listed[0]["unknown"]
    served.add(listed[0]["text"], metadata(1.0, 8.2), {"news": 1.0}, None)
    assert [one["ood_distance"] for one in served.unsure()] == [8.5, 8.0]


def test_tasks_and_labels_have_a_bound() -> None:
    served = ServedCounts()
    for number in range(MOST_TASKS + 5):
        served.add("", metadata(), {f"task{number}": 1.0}, None)
    assert len(served.tasks) == MOST_TASKS + 1 and served.tasks[OTHERS].texts == 5
    for number in range(MOST_LABELS + 5):
        served.add("", metadata(), {"task0": 1.0}, f"label{number}")
    assert served.tasks["task0"].labels[OTHER_LABEL] == 5
