"""The number of positions that a stack of layers can read.

Where positions have a table, its size is the limit: RoBERTa and its kin begin behind the padding id, so that they have
    fewer
positions than rows, and BART keeps two rows in front of the first. Positions without a table (rotary ones) can be
computed beyond those that a model was trained on, but are not.
"""

from __future__ import annotations

import re
from typing import Any

from torch import nn

TABLE = re.compile(r"(^|\.)(\w*position\w*|wpe)$")
"""Matches the end of the path of a table of positions (BERT, BART, GPT-2 and similar models)."""


def positions_of(stack: Any) -> int | None:
    """Return positions of one sequence that a stack of layers can read; None: no limit."""
    tables = [
        table
        for path, table in stack.named_modules()
        if isinstance(table, nn.Embedding) and TABLE.search(path) and "relative" not in path
    ]
    if tables:
        return min(table.num_embeddings - _rows_in_front(table) for table in tables)
    limit = None if stack.config.is_encoder_decoder else getattr(stack.config, "max_position_embeddings", None)
    return None if limit is None else int(limit)


def _rows_in_front(table: nn.Embedding) -> int:
    """Return the number of rows before that of the first position."""
    return int(getattr(table, "offset", 0)) if table.padding_idx is None else table.padding_idx + 1
