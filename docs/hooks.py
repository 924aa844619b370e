"""Hooks of MkDocs: generated pages for settings and commands, notebooks, and pages that lie elsewhere.

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

from dark_figures import darkened
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from nbconvert import MarkdownExporter
from settings_reference import SettingsGroup, groups

from raycl.cli import commands as cli
from raycl.cli import main
from raycl.config import Section
from raycl.operations.banks.commands import COMMANDS
from raycl.operations.plan.tables import COUNTED_ON, methods_table
from raycl.operations.sweep.comparison import ComparisonConfig
from raycl.operations.sweep.definition.sweep_config import SweepConfig
from raycl.serve.settings import ServeConfig
from raycl.training.setup.run_config import RunConfig

REPO = Path(__file__).resolve().parents[1]
INCLUDE = re.compile(r"^::: (\S+\.md)$", re.MULTILINE)
FIGURE = re.compile(r"(.+)(?<!-dark)\.png")
SHOWN = re.compile(r"!\[([^\]]*)\]\(([^)#\s]+)\.png\)")
"""A figure's file; a figure in a page. One for dark mode is made of it, where none lies beside it."""

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

SECTIONED = ("run",)
"""Those with a page per section."""

FOLDERS = {
    "jobs/configs": "Runs",
    "jobs/configs/paper": "Published rows",
    "jobs/configs/compare": "Comparisons",
    "sweeps": "Sweeps",
}
"""Folder of ready files -> heading."""


ICON = REPO / "raycl/launch/http/icon.svg"
"""The icon of the pages that raycl serves is that of the documentation too."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the pages of a config class that has several into the navigation, in the place of its first one."""
    for name in SECTIONED:
        _expand(config.nav, _uri(name), navigation(name, SETTINGS[name][1]))
    return config


def _expand(nav: Any, uri: str, pages: list[Any]) -> None:
    for entry in nav:
        for title, below in entry.items() if isinstance(entry, dict) else ():
            if below == uri:
                entry[title] = pages
            elif isinstance(below, list):
                _expand(below, uri, pages)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the icon and the generated pages."""
    files.append(File.generated(config, "icon.svg", content=ICON.read_bytes()))
    for name, (title, model, text) in SETTINGS.items():
        for uri, content in settings_pages(name, title, model, text).items():
            files.append(File.generated(config, uri, content=content))
    files.append(File.generated(config, "reference/commands.md", content=commands_page()))
    files.append(File.generated(config, "reference/files.md", content=files_page()))
    files.append(File.generated(config, "reference/methods.md", content=methods_page()))
    for notebook in [file for file in files if file.src_uri.endswith(".ipynb")]:
        page, pictures = notebook_page(Path(config.docs_dir, notebook.src_uri))
        files.append(File.generated(config, str(Path(notebook.src_uri).with_suffix(".md")), content=page))
        for name, picture in pictures.items():
            files.append(File.generated(config, f"{Path(notebook.src_uri).parent}/{name}", content=picture))
    for figure in [file for file in files if FIGURE.fullmatch(file.src_uri)]:
        dark = FIGURE.sub(r"\1-dark.png", figure.src_uri)
        if files.get_file_from_path(dark) is None:
            files.append(File.generated(config, dark, content=darkened(figure.content_bytes)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put files in that lie elsewhere, and beside each figure the one for dark mode."""
    whole = INCLUDE.sub(lambda match: included(match[1]), markdown)
    return SHOWN.sub(r"![\1](\2.png#only-light)![\1](\2-dark.png#only-dark)", whole)


def notebook_page(path: Path) -> tuple[str, dict[str, bytes]]:
    """Return a notebook with its stored outputs as Markdown, and its pictures by name."""
    resources = {"unique_key": path.stem, "output_files_dir": f"{path.stem}_files"}
    page, resources_written = MarkdownExporter().from_filename(str(path), resources)
    return page, resources_written["outputs"]


def included(path: str) -> str:
    """Return a Markdown file of the repository without its heading."""
    if not (REPO / path).is_file():
        raise PluginError(f"'::: {path}' names no file of the repository: correct the path")
    return re.sub(r"^# .*\n", "", (REPO / path).read_text(encoding="utf-8"))


def _uri(name: str) -> str:
    return f"reference/{name}/index.md" if name in SECTIONED else f"reference/{name}.md"


def settings_pages(name: str, title: str, model: type[Section], text: str) -> dict[str, str]:
    """Return the pages of a config class's settings by path: one, or one per section behind a list of them."""
    found = groups(model)
    if name not in SECTIONED:
        return {_uri(name): f"# {title}\n\n{text}\n\n" + "\n\n".join(map(_section, found)) + "\n"}
    sections = by_section(found)
    listed = [f"| [`{key}`]({key}.md) | {_cell(first_sentence(inside[0]))} |" for key, inside in sections.items()]
    index = [
        f"# {title}",
        text,
        _section(found[0]),
        "## Sections",
        "\n".join(["| section | what for |", "|---|---|", *listed]),
    ]
    pages = {_uri(name): "\n\n".join(index) + "\n"}
    for key, inside in sections.items():
        body = "\n\n".join(map(_section, inside)).removeprefix("## ")
        pages[f"reference/{name}/{key}.md"] = f"# {body}\n"
    return pages


def by_section(found: list[SettingsGroup]) -> dict[str, list[SettingsGroup]]:
    """Return the groups below the top level by page: a section with those inside it, and each method with its own."""
    pages: dict[str, list[SettingsGroup]] = {}
    key = ""
    for group in found[1:]:
        section = group.path.partition(".")[0].partition("[")[0]
        if group.choice.startswith("method="):
            key = group.choice.replace("=", "-")
        elif section != "method" or not key.startswith("method-"):
            key = section
        pages.setdefault(key, []).append(group)
    return pages


def navigation(name: str, model: type[Section]) -> list[Any]:
    """Entries of the navigation for the pages of a config class: its sections, and below `method` each method."""
    keys = list(by_section(groups(model)))
    page = partial("reference/{0}/{1}.md".format, name)
    methods = [{key.removeprefix("method-"): page(key)} for key in keys if key.startswith("method-")]
    others: list[Any] = [{key: page(key)} for key in keys if not key.startswith("method-")]
    return [_uri(name), *others, {"method": methods}]


def first_sentence(group: SettingsGroup) -> str:
    """Return the first sentence of a section's description."""
    return re.split(r"(?<=\.) ", group.description)[0]


def _section(group: SettingsGroup) -> str:
    rows = [
        f"| {_path(setting.path)} | {_cell(setting.type)} | {f'`{setting.default}`' if setting.default else ''} | "
        f"{_cell(setting.description)} |"
        for setting in group.settings
    ]
    head = ["| setting | type | default | description |", "|---|---|---|---|"]
    title = f"## {_code(group.choice or group.path)}\n\n" if group.path else ""
    table = "\n".join([*head, *rows])
    return f'{title}{_cell(group.description)}\n\n<div class="settings" markdown>\n\n{table}\n\n</div>'


def _path(path: str) -> str:
    """Return a dotted path, with places where a narrow column may break it."""
    return f"<code>{html.escape(path).replace('.', '.<wbr>')}</code>"


def _code(text: str) -> str:
    return f"`{text}`"


def _cell(text: str) -> str:
    """Text in a table: what Markdown would read as a cell, HTML or emphasis is literal outside of code."""
    parts = re.split(r"(`[^`]*`)", text)
    plain = [part if part[:1] == "`" else re.sub(r"([*_\[\]])", r"\\\1", html.escape(part, False)) for part in parts]
    return "".join(plain).replace("|", "&#124;")


def files_page() -> str:
    """Return the config, comparison and sweep files with the comments at their top."""
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
    """Return the page of what each method keeps, needs and trains, read from its class."""
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
    """Return the help of every command, from its own parser."""
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
