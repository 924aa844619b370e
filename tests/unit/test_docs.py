"""The documentation builds strictly, its generated pages list what there is, and its example works as printed."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from mkdocs.commands.build import build
from mkdocs.config import load_config
from torch import nn

from raycl.config.reference import groups
from raycl.methods.modifier import GradientModifier, Modifiers
from raycl.operations.banks.commands import COMMANDS
from raycl.run.config import RunConfig

REPO = Path(__file__).resolve().parents[2]
FOLDERS = {"raycl", "jobs", "sweeps", "tests", "cluster", "docs"}
FOLDERS |= {path.parent.name for path in REPO.glob("raycl/*/__init__.py")} - {"bank"}  # runs have a folder bank/ too


def test_the_documentation_builds_strictly(tmp_path: Path) -> None:
    config = load_config(str(REPO / "mkdocs.yml"), site_dir=str(tmp_path), strict=True)
    config.plugins.on_startup(command="build", dirty=False)
    build(config)
    config.plugins.on_shutdown()

    settings = (tmp_path / "reference/run/index.html").read_text()
    paths = [setting.path for group in groups(RunConfig) for setting in group.settings]
    assert [
        path for path in paths if f"<code>{path.replace('<', '&lt;').replace('>', '&gt;')}</code>" not in settings
    ] == []
    commands = (tmp_path / "reference/commands/index.html").read_text()
    assert all(f"<code>{name}</code>" in commands for name in COMMANDS) and "--print-config" in commands
    ready = (tmp_path / "reference/files/index.html").read_text()
    assert [path for path in REPO.glob("jobs/configs/**/*.yaml") if path.name not in ready] == []
    assert "SumRouter" in (tmp_path / "extending/router/index.html").read_text()
    assert "What raycl does not protect from" in (tmp_path / "security/index.html").read_text()
    notebook = (tmp_path / "tutorials/from-python/index.html").read_text()
    (picture,) = re.findall(r'src="([^"]*from-python_\d+_0\.png)"', notebook)
    assert (tmp_path / "tutorials/from-python" / picture).read_bytes()[:4] == b"\x89PNG"
    assert "after tickets" in notebook and '<table border="1" class="dataframe">' in notebook
    pages = [path.read_text() for path in tmp_path.rglob("*.html")]
    assert all("fonts.googleapis.com" not in page and 'src="http' not in page for page in pages)


@pytest.fixture
def hooks() -> ModuleType:
    module = ModuleType("hooks")
    module.__file__ = str(REPO / "docs/hooks.py")
    exec(compile(Path(module.__file__).read_text(), module.__file__, "exec"), module.__dict__)
    return module


@pytest.mark.parametrize(
    ("path", "name", "message"),
    [
        ("raycl/nothing.py", None, "names no file of the repository"),
        ("raycl/routing/router.py", "Nobody", "no top-level 'Nobody'"),
    ],
)
def test_a_missing_excerpt_fails(hooks: ModuleType, path: str, name: str | None, message: str) -> None:
    with pytest.raises(hooks.PluginError, match=message):
        hooks.excerpt(path, name)


def test_the_modifier_of_the_recipe_works() -> None:
    page = (REPO / "docs/extending/modifier.md").read_text()
    (code,) = re.findall(r"^```python\n(\"\"\".*?)^```", page, re.MULTILINE | re.DOTALL)
    module = ModuleType("scale")
    sys.modules["scale"] = module
    try:
        exec(compile(code, "scale.py", "exec"), module.__dict__)
        backbone = nn.Linear(2, 1)
        backbone.bias.requires_grad_(False)
        made: GradientModifier = module.Scale(module.ScaleConfig(factor=0.1), SimpleNamespace(backbone=backbone))
    finally:
        del sys.modules["scale"]
    modifiers = Modifiers({"scale": made})
    modifiers.begin_task(SimpleNamespace(index=0), True, False)  # type: ignore[arg-type]
    assert modifiers.parameter_names == modifiers.names == ["weight"]
    assert torch.equal(modifiers("weight", torch.ones(1, 2)), torch.full((1, 2), 0.1))


@pytest.mark.parametrize(
    "page", [*sorted(REPO.glob("docs/**/*.md")), REPO / "CONTRIBUTING.md", REPO / "README.md", REPO / "SECURITY.md"]
)
def test_files_that_a_page_names_exist(page: Path) -> None:
    """`raycl/training/step.py`, or `training/step.py` for short; folders with a slash at their end."""
    named = re.findall(r"`([\w./-]+/(?:[\w.-]+\.(?:py|yaml|md))?)`", page.read_text())
    ours = [name for name in named if name.split("/")[0] in FOLDERS or name.endswith(".py")]
    assert [name for name in ours if not (REPO / name).exists() and not (REPO / "raycl" / name).exists()] == []
