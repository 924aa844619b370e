"""Settings of evaluation."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from raycl.config import Section


class EvalConfig(Section):
    """How a row of the accuracy matrix is filled."""

    tasks: Literal["seen", "all"] = Field("seen", description="all: also tasks not trained yet (zero-shot cells)")
    split: Literal["test", "dev"] = Field("test", description="dev for choosing settings; test is for reporting")
    batch_size: int = Field(64, ge=1, description="examples per worker per forward pass")
    max_new_tokens: int | None = Field(None, ge=1, description="limit of an answer; null: stream.max_target_tokens")
    save_predictions: bool = Field(True, description="keep every answer beside the results")
    singles: str | None = Field(
        None, description="run directory (or results.json) of `method=separate`, whose scores FWT compares with"
    )
