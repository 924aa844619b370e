"""Settings of evaluation."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from raycl.config import PathOrUri, Section


class EvalConfig(Section):
    """Evaluation: how a row of the accuracy matrix is filled."""

    tasks: Literal["seen", "all"] = Field(
        "seen",
        description="tasks that are evaluated after each task. seen: those trained so far; all: also later ones "
        "(zero-shot cells)",
    )
    labels: Literal["all", "task"] = Field(
        "all",
        description="allowed answers. all: any label seen so far, or any text where answers are generated "
        "(class-incremental); task: the task's own labels (task-incremental; van de Ven and Tolias "
        "2019). Tasks without labels have no limit",
    )
    off_task: Literal["wrong", "count"] = Field(
        "wrong",
        description="answers that are a label of another task, and not of their own. wrong: they score 0, as SLM "
        "states, except under metrics of overlapping text (rouge_l); count: they are counted only",
    )
    split: Literal["test", "dev"] = Field(
        "test", description="rows that are scored: dev for choosing settings, test for reporting"
    )
    batch_size: int = Field(64, ge=1, description="examples per worker per forward pass")
    max_new_tokens: int | None = Field(
        None, ge=1, description="tokens of a generated answer at most; null: stream.max_target_tokens"
    )
    save_predictions: bool = Field(True, description="keep every answer beside the results")
    singles: PathOrUri = Field(
        None, description="run directory (or results.json) of `method=separate`, whose scores FWT compares with"
    )
