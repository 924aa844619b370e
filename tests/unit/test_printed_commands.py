"""Every command that README, CONTRIBUTING, the documentation, cluster/README.md and the headers of config files print
is one that works: raycl's own are parsed by its own parsers and their configs validated, others by their own
parsers or by the files that they name.

What is not done: nothing is started, and data, runs and clusters that a command names need not be there.
"""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.scripts.scripts import cli as ray_cli
from ray.serve.scripts import cli as serve_cli

from benchmarks.command import parser as benchmark_parser
from raycl import config as configs
from raycl.cli import main
from raycl.cli.commands import COMMANDS as COMMANDS_OF_RAYCL
from raycl.cli.commands import parsed
from raycl.errors import ConfigError
from raycl.launch.prepared_run import task_of
from raycl.operations.banks.commands import COMMANDS
from raycl.operations.sweep.comparison import load_comparison
from raycl.operations.sweep.definition.sweep_config import load_sweep
from raycl.serve.settings import ServeConfig
from raycl.training.setup import run_config
from raycl.training.setup.run_config import RunConfig

REPO = Path(__file__).resolve().parents[2]
TOP = ("README.md", "CONTRIBUTING.md", "cluster/README.md", "docs/hooks.py")
TUTORIALS = sorted([*REPO.glob("docs/tutorials/*.md"), *REPO.glob("docs/coming-from/*.md")])
PAGES = [*(REPO / name for name in TOP), *sorted(REPO.glob("docs/**/*.md"))]
HEADED = [path for folder in ("jobs/configs", "sweeps", "cluster") for path in sorted((REPO / folder).glob("**/*"))]
OF_RECIPES = ("method=anchored", "modifiers=[scale]", "train.optimizer=nesterov", "format: piped")
"""Words that need the package of docs/extending: only the words of these commands are checked."""

SPAN = re.compile(r"`((?:raycl |python |make |ray |serve (?:run|deploy)|kubectl |export |sbatch |pip install )[^`]+)`")
HEADS = (
    "raycl ",
    "python",
    "make",
    "ray ",
    "serve",
    "kubectl",
    "export",
    "sbatch",
    "cluster/",
    "curl",
    "pip",
    "source",
)


def commands(path: Path) -> Iterator[str]:
    """Yield the commands of a page's code and of a config's comments, each on one line."""
    text = path.read_text()
    if path.suffix == ".md":
        fences = re.findall(r"^```([^\n]*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        blocks = [block for language, block in fences if language in ("", "sh", "bash")]
        rest = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
        blocks += re.findall(r"(?:^    .*\S.*\n)+", rest, re.MULTILINE)
        for block in blocks:
            lines = re.sub(r"\\\n\s*", "", block).splitlines()
            yield from (line.strip() for line in lines if _is_command(line.strip()))
        yield from SPAN.findall(rest)
    elif path.suffix == ".py":
        yield from (line for line in SPAN.findall(text) if line.startswith("raycl ") and "{" not in line)
    elif path.suffix in (".yaml", ".sh"):
        comments = "\n".join(line[1:].strip() for line in text.splitlines() if line.startswith("#"))
        lines = re.sub(r"\\\n", "", comments).splitlines()
        yield from (line for line in lines if line.startswith(("raycl ", "python jobs/", "cluster/local", "sbatch ")))


def _is_command(line: str) -> bool:
    """Output of a command, as README shows it, is none."""
    first = re.sub(r"^(?:[A-Z]+=\S+ )+", "", line)
    return first.startswith(HEADS) or first.startswith(".venv/bin/")


def check(line: str, patch: pytest.MonkeyPatch) -> None:
    """Go through a command as its tool would before it begins."""
    words = shlex.split(line.removesuffix(" &"), comments=True)
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    head, *rest = words
    if head in ("python", ".venv/bin/python") and rest[0].startswith("jobs/"):
        assert (REPO / rest[0]).is_file()
        if rest[0] == "jobs/benchmark.py":
            benchmark_parser(rest[1:]).parse_args(rest[1:])
            return
        if rest[0] == "jobs/lm_eval_tasks.py":
            assert len(rest) > 3, "it takes the data, the folder of the task files and tasks"
            return
        head, rest = "raycl", [Path(rest[0]).stem.removesuffix("_stream"), *rest[1:]]
    if head == "raycl":
        by_raycl(rest)
    elif head in ("python", ".venv/bin/python"):
        modules = ("pytest", "mkdocs", "pdb")
        assert rest[1] in modules if rest[0] == "-m" else rest[0].endswith(".py"), f"not a module or file: {line}"
        ours = [word for word in rest if word.endswith(".py") and "/" in word]  # a page's reader writes the others
        assert all((REPO / word).exists() for word in ours)
    elif head == "make":
        text = (REPO / "Makefile").read_text()
        known = {*re.findall(r"^([\w-]+):", text, re.MULTILINE), *re.findall(r"\$\(([A-Z_]+)\)", text)}
        assert {word.partition("=")[0] for word in rest} <= known, f"Makefile lacks something of {rest}"
    elif head in ("ray", "serve"):
        _by_click(ray_cli if head == "ray" else serve_cli, head, rest, patch)
    elif head == "cluster/local.sh":
        assert (REPO / head).stat().st_mode & 0o111
        check(shlex.join(rest), patch)
    elif head == "sbatch":
        assert (REPO / rest[0]).is_file()
        train(rest[1:])
    elif head == "kubectl":
        files = [rest[index + 1] for index, word in enumerate(rest) if word == "-f"]
        assert all(list(yaml.safe_load_all((REPO / file).read_text())) for file in files)
    elif head == "pip":
        extras = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert all(name in extras for word in rest for name in re.findall(r"raycl\[(\w+)\]", word))
    elif head == "curl":
        if "-d" in rest:
            json.loads(rest[rest.index("-d") + 1])
    elif head == "python" and any(f'title="{rest[0]}"' in page.read_text() for page in TUTORIALS):
        return  # a file of the tutorial
    else:
        assert head in ("export", "source"), f"'{head}' is a command that this test does not know: teach it"


def _by_click(group: object, head: str, words: list[str], patch: pytest.MonkeyPatch) -> None:
    """Names and options as the tool's own parser takes them, with what stands behind `--` checked as a command."""
    own, _, behind = shlex.join(words).partition(" -- ")
    command, left = group, shlex.split(own)
    while hasattr(command, "commands"):
        name = left.pop(0)
        assert name in command.commands, f"{head} has no command '{name}'"
        command = command.commands[name]
    if behind:
        left.append("x")
        check(behind, patch)
    if left:  # else a sentence names the command
        command.make_context(head, list(left))
    for word in left:
        if word.endswith(".yaml"):
            assert yaml.safe_load((REPO / word).read_text())
    if words[0] == "run":
        configs.validate(ServeConfig, _tree(words[2:]))


def _tree(overrides: list[str]) -> configs.Tree:
    tree: configs.Tree = {}
    for override in overrides:
        configs.apply_override(tree, override)
    return tree


AS_THEY_STAND = ("sweeps/", "jobs/configs/compare/", "jobs/configs/paper/")
"""Folders whose files other tests load as they stand: `test_sweep_config`, `test_unused_settings`,
`test_paper_configs`. Here they are loaded with what a command sets."""


@cache
def _loaded(load: Callable[..., object], file: str, overrides: tuple[str, ...]) -> None:
    """Load a file with overrides, once for all commands that say the same."""
    load(file, list(overrides))


def _load(load: Callable[..., object], file: str, overrides: list[str]) -> None:
    stands = file.removeprefix(f"{REPO}/").startswith(AS_THEY_STAND) and Path(file).is_file()
    if overrides or not stands:
        _loaded(load, file, tuple(overrides))


def _options(command: str, words: list[str]) -> Any:
    """Return what the command's own parser makes of the words."""
    return parsed(command, words)


def _file(name: str) -> str:
    """Return a file of the repository; of a run that a reader is to have made, or of a tutorial that has its content,
    none."""
    made = name.startswith("runs/") or any(f'title="{name}"' in page.read_text() for page in TUTORIALS)
    assert (REPO / name).is_file() or made, f"there is no '{name}'"
    return str(REPO / name)


def train(words: list[str]) -> None:
    options = _options("train", words)
    config, overrides = options.config, options.overrides
    if "key.path=value" in overrides or any(name in word for word in overrides for name in OF_RECIPES):
        return
    for added in options.add:
        task_of(added)
    if any(word.startswith("bank.start=") for word in overrides):  # whose bank a reader is to have made
        configs.load(RunConfig, None, overrides)
    elif config is not None and config != "FILE":
        config = _file(config)
        if Path(config).is_file():
            _load(run_config.load_config, config, overrides)
        else:
            run_config.load_config(None, overrides)
    else:
        run_config.load_config(None, overrides)


def compare(words: list[str]) -> None:
    options = _options("compare", words)
    _load(load_comparison, _file(options.comparison), options.overrides)


def sweep(words: list[str]) -> None:
    options = _options("sweep", words)
    file = Path(_file(options.sweep))
    if file.is_file():
        _load(load_sweep, str(file), options.set)


def bank(words: list[str]) -> None:
    several = [word for word in words if "|" in word]
    if several:
        assert set(several[0].split("|")) == COMMANDS.keys()
    else:
        _options("bank", words)


def serve(words: list[str]) -> None:
    options = _options("serve", words)
    configs.validate(ServeConfig, {"bank": "bank"} | _tree(options.overrides))


def no_command(words: list[str]) -> None:
    main.parser().parse_args(words)


CHECKS: dict[str, Callable[[list[str]], object]] = {
    "train": train,
    "compare": compare,
    "sweep": sweep,
    "bank": bank,
    "serve": serve,
}
"""The checks of commands whose files and settings are looked at too."""


def by_raycl(words: list[str]) -> None:
    name, *rest = words
    if name in ("COMMAND", "--help") or rest in ([], ["check"]):  # a sentence names the command
        assert name in (*COMMANDS_OF_RAYCL, "COMMAND", "--help")
        return
    CHECKS.get(name, partial(_options, name))(rest) if name in COMMANDS_OF_RAYCL else no_command(words)


READ = [*PAGES, *(path for path in HEADED if path.suffix in (".yaml", ".sh"))]
PRINTED = [(path.relative_to(REPO).as_posix(), line) for path in READ for line in commands(path)]


def test_printed_commands_are_found() -> None:
    paths = {path for path, _ in PRINTED}
    assert {"README.md", "cluster/README.md", "jobs/configs/pretrain.yaml", "jobs/configs/end-tasks.yaml"} <= paths
    assert {"jobs/configs/instruction.yaml", "jobs/configs/compare/sapt-long8.yaml", "cluster/slurm.sh"} <= paths
    assert {"docs/hooks.py", "docs/index.md", "docs/results.md"} <= paths
    assert {
        f"docs/guides/{name}.md" for name in ("runs", "data", "baselines", "slm", "sapt", "migu", "sweeps")
    } <= paths
    heads = {shlex.split(line, comments=True)[0] for _, line in PRINTED}
    assert {"raycl", "python", "make", "ray", "kubectl", "sbatch", "serve", "curl"} <= heads


FIRST = {line: path for path, line in reversed(PRINTED)}
"""Every command -> the first place that prints it."""


@pytest.mark.parametrize("line", FIRST, ids=[f"{path}: {line[:60]}" for line, path in FIRST.items()])
def test_a_printed_command_works(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAYCL_DATA", "RAYCL_MODELS"):
        monkeypatch.setenv(name, "/data")
    monkeypatch.chdir(REPO)
    check(line, monkeypatch)


@pytest.mark.parametrize("config", ["jobs/configs/demo.yaml", "--config=jobs/configs/demo.yaml"])
def test_a_config_file_is_named_first_or_by_its_flag(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = _options("train", [config, "seed=7"])
    monkeypatch.chdir(REPO)
    result = run_config.load_config(options.config, options.overrides)
    assert isinstance(result, RunConfig) and result.seed == 7
    assert options.overrides == ["seed=7"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a.yaml", "--config", "b.yaml"], "two config files"),
        (["--resume", "runs/x", "a.yaml"], "the run's own config"),
        (["--resume", "runs/x", "--config", "a.yaml"], "the run's own config"),
    ],
)
def test_an_extra_file_is_an_error(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        _options("train", words)
    assert message in capsys.readouterr().err


def test_a_word_that_is_no_file_is_an_override() -> None:
    options = _options("train", ["method.r"])
    with pytest.raises(ConfigError, match=r"override 'method\.r' is not of the form key\.path=value"):
        run_config.load_config(options.config, options.overrides)
