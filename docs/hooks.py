"""What MkDocs generates and includes: the reference of settings and commands, notebooks, and pages that lie elsewhere.

A line `::: cluster/README.md` in a page becomes that file; one that does not exist fails the build. Excerpts of the
source stand in the pages themselves (`docs/excerpts.py`).

A notebook becomes a page by nbconvert, as Markdown: so it has the theme's look, and its links are checked as those of
all pages. (mkdocs-jupyter would insert HTML that is not checked, with scripts from the network.)
"""

from __future__ import annotations

import contextlib
import html
import io
import itertools
import os
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from nbconvert import MarkdownExporter

from raycl.cli import commands as cli
from raycl.cli import main
from raycl.config import Section
from raycl.config.reference import SettingsGroup, groups
from raycl.operations.banks.commands import COMMANDS
from raycl.operations.plan.tables import COUNTED_ON, methods_table
from raycl.operations.sweep.comparison import ComparisonConfig
from raycl.operations.sweep.definition.sweep_config import SweepConfig
from raycl.serve.settings import ServeConfig
from raycl.training.setup.run_config import RunConfig

REPO = Path(__file__).resolve().parents[1]
INCLUDE = re.compile(r"^::: (\S+\.md)$", re.MULTILINE)

SETTINGS: dict[str, tuple[str, type[Section], str]] = {
    "run": (
        "Settings of a run",
        RunConfig,
        "A run is configured by a YAML file, by overrides on the command line, or by both: "
        "`raycl train jobs/configs/demo.yaml method=slm method.r=4`. "
        "`raycl train --print-config` prints all settings with their values.",
    ),
    "sweep": (
        "Settings of a sweep",
        SweepConfig,
        "A sweep is configured by a YAML file: `raycl sweep sweeps/seeds.yaml`. `--set` overrides it.",
    ),
    "comparison": (
        "Settings of a comparison",
        ComparisonConfig,
        "A comparison is configured by a YAML file: `raycl compare jobs/configs/compare/demo.yaml`.",
    ),
    "serve": (
        "Settings of the endpoint",
        ServeConfig,
        "The endpoint is configured by a YAML file, by overrides on the command line, or by both: "
        "`raycl serve RUN/bank port=9000`. "
        "`raycl serve RUN/bank --print-config` prints all settings with their values.",
    ),
}
"""Page -> title, config class, introduction."""

FOLDERS = {
    "jobs/configs": "Runs",
    "jobs/configs/paper": "Published rows",
    "jobs/configs/compare": "Comparisons",
    "sweeps": "Sweeps",
}
"""Folder of ready files -> heading."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    for name, (title, model, text) in SETTINGS.items():
        files.append(File.generated(config, f"reference/{name}.md", content=settings_page(title, model, text)))
    files.append(File.generated(config, "reference/commands.md", content=commands_page()))
    files.append(File.generated(config, "reference/files.md", content=files_page()))
    files.append(File.generated(config, "reference/methods.md", content=methods_page()))
    for notebook in [file for file in files if file.src_uri.endswith(".ipynb")]:
        page, pictures = notebook_page(Path(config.docs_dir, notebook.src_uri))
        files.append(File.generated(config, str(Path(notebook.src_uri).with_suffix(".md")), content=page))
        for name, picture in pictures.items():
            files.append(File.generated(config, f"{Path(notebook.src_uri).parent}/{name}", content=picture))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put files in that lie elsewhere."""
    return INCLUDE.sub(lambda match: included(match[1]), markdown)


def notebook_page(path: Path) -> tuple[str, dict[str, bytes]]:
    """A notebook with its stored outputs as Markdown, and its pictures by name."""
    resources = {"unique_key": path.stem, "output_files_dir": f"{path.stem}_files"}
    page, resources_written = MarkdownExporter().from_filename(str(path), resources)
    return page, resources_written["outputs"]


def included(path: str) -> str:
    """A Markdown file of the repository without its heading."""
    if not (REPO / path).is_file():
        raise PluginError(f"'::: {path}' names no file of the repository: correct the path")
    return re.sub(r"^# .*\n", "", (REPO / path).read_text(encoding="utf-8"))


def settings_page(title: str, model: type[Section], text: str) -> str:
    """All settings of a config class, section by section."""
    return f"# {title}\n\n{text}\n\n" + "\n\n".join(map(_section, groups(model))) + "\n"


def _section(group: SettingsGroup) -> str:
    rows = [
        f"| `{setting.path}` | {_cell(setting.type)} | {f'`{setting.default}`' if setting.default else ''} | "
        f"{_cell(setting.description)} |"
        for setting in group.settings
    ]
    head = ["| setting | type | default | description |", "|---|---|---|---|"]
    title = f"## {_code(group.choice or group.path)}\n\n" if group.path else ""
    return f"{title}{_cell(group.description)}\n\n" + "\n".join([*head, *rows])


def _code(text: str) -> str:
    return f"`{text}`"


def _cell(text: str) -> str:
    """Text in a table: what Markdown would read as a cell, HTML or emphasis is literal outside of code."""
    parts = re.split(r"(`[^`]*`)", text)
    plain = [part if part[:1] == "`" else re.sub(r"([*_\[\]])", r"\\\1", html.escape(part, False)) for part in parts]
    return "".join(plain).replace("|", "&#124;")


def files_page() -> str:
    """Config, comparison and sweep files with the comments at their top."""
    sections = [
        "# Ready files\n\nConfig, comparison and sweep files of the repository, with the comments at their top."
    ]
    for folder, title in FOLDERS.items():
        sections.append(f"## {title}")
        for path in sorted((REPO / folder).glob("*.yaml")):
            head = itertools.takewhile(lambda line: line.startswith("#"), path.read_text(encoding="utf-8").splitlines())
            text = "\n".join(line.removeprefix("#").removeprefix(" ") for line in head)
            sections.append(f"### `{folder}/{path.name}`\n\n```text\n{text}\n```")
    return "\n\n".join(sections) + "\n"


def methods_page() -> str:
    """What each method keeps, needs and trains, from its class."""
    first, *others = COUNTED_ON
    text = (
        "What each method keeps, needs and trains, read from the classes by `raycl train --methods`. The columns are "
        "those of MIGU's table 1 and SLM's table 1: rows, samples or features of earlier tasks are kept; training must "
        "know where a task begins and ends; a test text comes with its task id; tasks have answers, or texts are "
        f"learned themselves. Parameters are those of the default settings on {first} (or {', '.join(others)}, where "
        "it says so), without label heads: all that one task trains, and the adapters that are kept for it alone."
    )
    return f"# Methods\n\n{text}\n\n{methods_table()}\n"


def commands_page() -> str:
    """The help of every command, from its own parser."""
    top = f"```text\n{_help(main.parser().parse_args, ['--help'])}\n```"
    sections = [f"## `raycl {name}`\n\n" + "\n\n".join(_helps(name)) for name in cli.COMMANDS]
    return "# Command line\n\nThe output of `--help` of each command.\n\n" + "\n\n".join([top, *sections]) + "\n"


def _helps(name: str) -> Iterator[str]:
    names: list[list[str]] = [[]]
    if name == "bank":
        names += [[command] for command in COMMANDS]
    for words in names:
        title = f"### `{words[-1]}`\n\n" if words else ""
        parse = partial(cli.parsed, name, prog=f"raycl {name}")
        yield f"{title}```text\n{_help(parse, [*words, '--help'])}\n```"


def _help(parse: Callable[[list[str]], Any], words: list[str]) -> str:
    output = io.StringIO()
    with (
        patch.dict(os.environ, COLUMNS="100"),
        contextlib.redirect_stdout(output),
        contextlib.suppress(SystemExit),
    ):
        parse(words)
    return output.getvalue().rstrip()
