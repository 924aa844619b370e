"""Published numbers next to our own: a comparison file names the numbers that a paper printed for its rows.

A comparison writes them into its folder (`published.json`), so that later reports show them too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from pydantic import Field, field_validator

from raycl import config as configs
from raycl.config import Section, Tree
from raycl.storage import Storage

METRICS = ("ap", "f_ra", "fwt", "bwt", "accuracy", "accuracy_first_two", "accuracy_last_two", "unseen")
OF_TYPE = "unseen_"
"""Numbers of a comparison's line that a paper may print too; `unseen_<type>` is the mean over the tasks of a type that
were never trained."""

FILE, KEY = "published.json", "published"
"""Name in a comparison's folder, and the key of a result tree under which its row's numbers stand."""


class Published(Section):
    """The numbers that a paper printed."""

    source: str = Field(min_length=1, description="paper, table, benchmark and model of the numbers")
    rows: dict[str, dict[str, float]] = Field(
        min_length=1, description="name of a row -> ap, f_ra, fwt, bwt, accuracy, unseen or unseen_<type> -> number"
    )

    @field_validator("rows")
    @classmethod
    def _metrics_are_known(cls, rows: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
        for row, numbers in rows.items():
            unknown = [name for name in numbers if name not in METRICS and not name.startswith(OF_TYPE)]
            if unknown:
                raise ValueError(f"row '{row}' has the number '{unknown[0]}': expected {', '.join(METRICS)}")
        return rows

    def beside(self, result: Tree, row: str) -> Tree:
        """Return the result tree with the published numbers of its row, if there are any."""
        if row not in self.rows:
            return result
        return {**result, KEY: {"source": self.source, "numbers": dict(self.rows[row])}}

    def write(self, folder: Storage) -> None:
        """Write the numbers into the comparison's folder for later reports, unless they are there already."""
        tree = configs.as_tree(self)
        if not folder.exists(FILE) or folder.read_json(FILE) != json.loads(json.dumps(tree)):
            folder.write_json(FILE, tree)


def read_published(folder: Storage) -> Published | None:
    """Read the numbers that `Published.write` wrote to a folder.

    Raises:
        ConfigError: the file is something else.
    """
    return configs.validate(Published, dict(folder.read_json(FILE))) if folder.exists(FILE) else None


def row_of(result: Tree) -> str:
    """Return the row of a comparison that a run belongs to, by the run's name: `<row>-s<seed>`."""
    name = str((result["config"].get("output") or {}).get("name") or "")
    return name.rpartition("-s")[0]


def numbers_of(result: Tree) -> Mapping[str, float]:
    """Return the published numbers of the run's row; {} where there are none."""
    return dict((result.get(KEY) or {}).get("numbers") or {})


def source_of(result: Tree) -> str:
    """Return the source of these numbers; "" where there are none."""
    return str((result.get(KEY) or {}).get("source") or "")
