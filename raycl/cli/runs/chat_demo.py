"""The demo of chat models: three small skills, learned one after another, and the answers before and after."""

import argparse
import json
import shutil
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from raycl.cli.commands import INSTALLED, echo, local_or_installed, note, show

if TYPE_CHECKING:
    from raycl.storage import Storage

FILE = "jobs/configs/chat-demo.yaml"

ROWS = INSTALLED / "jobs/data/chat"
"""The folder of the skills' rows, a folder for each."""

SKILLS = ("shop", "teams", "orders")

UNTRAINED = "untrained"
"""The folder of answers before any training, beside those of the phases, which begin with a number."""

SHOWN = 2
"""The number of test rows of each skill whose answers are shown."""


class Answered(NamedTuple):
    """A test row and the model's answers to it.

    Attributes:
        before: the answer before any training. learned: after its skill was learned. last: after the last skill.
    """

    skill: str
    text: str
    expected: str
    before: str
    learned: str
    last: str


def write_rows(folder: str) -> None:
    """Copy the rows of the skills into a new folder.

    Raises:
        ConfigError: the folder is there.
    """
    from raycl.errors import ConfigError

    if Path(folder).exists():
        raise ConfigError(f"'{folder}' is there already: expected none, name another folder for the skills' rows")
    shutil.copytree(ROWS, folder)


def run(options: argparse.Namespace) -> int:
    """Train on the skills, or continue, and print the matrix and the answers to some test rows."""
    from raycl.config import inline_yaml
    from raycl.launch import console, driver, prepared_run
    from raycl.metrics.run_results import tasks_of
    from raycl.operations.report.tables import matrix_table
    from raycl.training.setup import run_config
    from raycl.training.workers import stopping

    console.log_to_stderr(options.quiet)
    stopping.exit_on_sigterm()
    name = f"chat-{Path(options.chat).name.lower()}"
    own = {"backbone.name": options.chat, "stream.root": str(ROWS), "output.dir": options.dir, "output.name": name}
    overrides = [f"{key}={inline_yaml(value)}" for key, value in own.items()]
    prepared = prepared_run.prepare(run_config.load_config(local_or_installed(FILE), overrides))
    note(options, f"run {prepared.storage.uri}")
    results = driver.train(prepared)
    answered = answers_of(prepared.storage, tasks_of(results))
    tree = {"results": results, "answers": [row._asdict() for row in answered]}
    show(options, matrix_table(results), tree)
    if not options.json:
        echo("")
        echo(described(answered))
        note(options, f"talk to it: raycl serve {prepared.storage.uri}/bank, then open the address that it prints")
    return 0


def answers_of(storage: "Storage", tasks: Sequence[str]) -> list[Answered]:
    """Return the answers to the first test rows of each skill, in the order of learning."""
    names = {name.split("/")[1] for name in storage.files("predictions")}
    folders = sorted(name for name in names if name[0].isdigit())
    answered = []
    for number, task in enumerate(tasks):
        rows = zip(*(_rows(storage, folder, task) for folder in (UNTRAINED, folders[number], folders[-1])), strict=True)
        for before, learned, last in islice(rows, SHOWN):
            texts = (row["answer"] for row in (before, learned, last))
            answered.append(Answered(task, before["text"], before["references"][0], *texts))
    return answered


def _rows(storage: "Storage", folder: str, task: str) -> list[Mapping[str, Any]]:
    return [json.loads(line) for line in storage.read_text(f"predictions/{folder}/{task}.jsonl").splitlines()]


def described(answered: Sequence[Answered]) -> str:
    """Return the answers as lines."""
    lines = []
    for row in answered:
        lines += [f"{row.skill}: {row.text}", f"  before training         {' '.join(row.before.split())}"]
        lines += [f"  after learning {row.skill:9}{' '.join(row.learned.split())}"]
        lines += [f"  after the last skill    {' '.join(row.last.split())}", ""]
    return "\n".join(lines[:-1])
