"""The house keeps the rules of `architecture.py`, and every rule can fail: each is given code that breaks it."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest
from architecture import APART, LAYERS, README_LINES, RULES, Module, extras_at_start, loops

REPO = Path(__file__).resolve().parent.parent

# ---- the house -----------------------------------------------------------------------------------------------------


def _files(*folders: str) -> list[str]:
    """Return files that git knows or would take, by path in the repository."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *folders]
    listed = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True).stdout.split("\0")
    return sorted({path for path in listed if path and (REPO / path).is_file()})


@pytest.fixture(scope="module")
def modules() -> list[Module]:
    paths = [Path(path) for path in _files("raycl", "benchmarks", "jobs", "tests", "cluster") if path.endswith(".py")]
    folders: dict[Path, list[str]] = {}
    for path in paths:
        folders.setdefault(path.parent, []).append(path.stem)
    return [
        Module.of(
            path.as_posix(),
            (REPO / path).read_text(encoding="utf-8"),
            tuple(name for name in folders[path.parent] if name != path.stem),
        )
        for path in paths
    ]


@pytest.mark.parametrize("name", RULES)
def test_the_code_keeps_the_rules(modules: list[Module], name: str) -> None:
    result = [f"{module.path}:{line}: {words}" for module in modules for line, words in RULES[name](module)]
    assert not result, "\n" + "\n".join(result)


def test_no_folders_import_one_another_in_a_circle(modules: list[Module]) -> None:
    result = loops(modules)
    assert not result, "\n" + "\n".join(result)


def test_what_pip_install_brings_is_enough_to_start(modules: list[Module]) -> None:
    result = extras_at_start(modules)
    assert not result, "\n" + "\n".join(result)


def test_a_class_has_a_name_of_its_own(modules: list[Module]) -> None:
    paths: dict[str, list[str]] = {}
    for module in modules:
        for node in module.nodes if module.path.startswith("raycl/") else ():
            if isinstance(node, ast.ClassDef):
                paths.setdefault(node.name, []).append(module.path)
    assert {name: named for name, named in paths.items() if len(named) > 1} == {}, "say whose it is in the name"


def test_the_tables_name_what_exists(modules: list[Module]) -> None:
    assert len(modules) > 5, "found no sources: is this the repository?"
    units = [unit for row in LAYERS for unit in row]
    assert len(units) == len(set(units)), "a unit stands in two rows of LAYERS"
    assert set(APART) | {unit for row in APART.values() for unit in row} <= set(units)
    drawn = (REPO / "docs/architecture.svg").read_text(encoding="utf-8")
    assert [unit for unit in units if unit not in drawn] == [], "the picture of the packages lacks a package"


def test_readme_is_short_and_its_links_lead_to_files() -> None:
    text = (REPO / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= README_LINES, "README.md: move details into docs/, and link there"
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", text)
    assert links and [link for link in links if not (REPO / link).is_file()] == []


def test_no_test_folder_hides_a_library() -> None:
    hidden = [path for path in _files("tests") if re.fullmatch(r"tests/\w+/__init__\.py", path)]
    assert not hidden, f"{hidden}: tests/ is on sys.path, so a package tests/ray would be imported instead of ray"


# ---- the checker itself --------------------------------------------------------------------------------------------

DOC = '"""Why."""\n'
BROKEN = [
    ("direction", "raycl/data/x.py", "from raycl.methods.single_adapter import Lora", "data imports methods"),
    ("direction", "raycl/data/x.py", "from raycl.bank import Bank", "data imports bank"),
    ("direction", "raycl/data/x.py", "from raycl import metrics", "data imports metrics"),
    ("direction", "raycl/data/x.py", "from .. import metrics", "data imports metrics"),
    ("direction", "raycl/data/__init__.py", "from ..training.step import step", "data imports training"),
    ("direction", "raycl/data/x.py", "def f():\n    import raycl.launch.driver", "data imports launch"),
    (
        "direction",
        "raycl/data/x.py",
        "if TYPE_CHECKING:\n    from raycl.training.assembly import RunConfig",
        "data imports training",
    ),
    (
        "direction",
        "raycl/data/x.py",
        "importlib.import_module('raycl.operations.sweep')",
        "data imports operations/sweep",
    ),
    ("direction", "raycl/training/x.py", "import raycl.operations.report.tables", "training imports operations/report"),
    ("direction", "raycl/training/x.py", "import jobs.sweep", "training imports jobs"),
    ("direction", "raycl/types.py", "from raycl.errors import RayclError", "types imports errors"),
    ("direction", "raycl/serve/x.py", "from raycl.methods import METHODS", "serve imports methods"),
    ("direction", "raycl/extra.py", "import os", "no row in LAYERS"),
    ("direction", "raycl/data/x.py", "import raycl.extra", "no row in LAYERS"),
    ("direction", "raycl/__init__.py", "from raycl.config import load", "it has the API alone"),
    ("doors", "raycl/training/phase/step.py", "import deepspeed.ops", "imports deepspeed"),
    ("doors", "raycl/training/engines/engine.py", "def f():\n    from ray import train", "imports ray"),
    ("doors", "jobs/serve.py", "import ray", "imports ray"),
    ("doors", "raycl/launch/driver.py", "import wandb", "imports wandb"),
    ("doors", "raycl/bank/store.py", "import pickle", "only at no place"),
    ("doors", "raycl/operations/report/plots.py", "import torch", "does without it"),
    ("private", "raycl/launch/x.py", "from ray._private.state import jobs", "is private to its library"),
    ("private", "raycl/config/x.py", "import omegaconf._utils", "is private to its library"),
    ("private", "raycl/serve/x.py", "from ray.serve.context import _get_global_client", "is private to its library"),
    ("pretrained", "raycl/routing/x.py", "AutoModel.from_pretrained('x')", "ask the backbone"),
    ("pretrained", "raycl/backbones.py", "AutoModel.from_pretrained('x')", "ask the backbone"),
    ("backbone_kinds", "raycl/serve/x.py", "if codec.kind == 'encoder':\n    f()", "branches on the kind"),
    ("backbone_kinds", "raycl/training/x.py", "x = kind in ('encoder', other)", "branches on the kind"),
    ("backbone_kinds", "jobs/x.py", "match kind:\n    case 'encoder':\n        f()", "branches on the kind"),
    ("backbone_kinds", "raycl/data/x.py", "KINDS = {'clm': 'decoder'}", "names the kind of backbone 'decoder'"),
    ("backbone_kinds", "raycl/serve/x.py", "x = kind != 'encoder-decoder'", "names the kind of backbone 'encoder-d"),
    ("backbone_kinds", "raycl/training/x.py", "from raycl.backbone.encoder import EncoderBackbone", "uses EncoderB"),
    ("backbone_kinds", "raycl/training/x.py", "x = isinstance(y, causal.CausalBackbone)", "uses CausalBackbone"),
    ("method_names", "raycl/training/x.py", "used = 'sapt' in names", "names the method 'sapt'"),
    ("method_names", "raycl/training/x.py", "from raycl.methods.sapt.sapt import Sapt", "a method's own module"),
    ("router_kinds", "raycl/serve/x.py", "from raycl.routing.routers import TextRouter", "uses TextRouter"),
    ("router_kinds", "raycl/bank/x.py", "x = isinstance(router, attention.AttentionRouter)", "uses AttentionRouter"),
    ("router_kinds", "raycl/serve/x.py", "x = snapshot.router.kind == 'task'", "compares the kind of a router"),
    ("router_kinds", "jobs/x.py", "x = router.kind in KINDS", "compares the kind of a router"),
    (
        "hooks",
        "raycl/methods/base.py",
        "class Method:\n" + "".join(f"    def h{number}(self): ...\n" for number in range(11)),
        "Method has 11 public hooks, at most 10",
    ),
    ("prints", "raycl/data/x.py", "print('x')", "print outside raycl/cli/commands.py"),
    ("prints", "raycl/cli/runs/x.py", "print('x')", "echo it in a command"),
    ("excepts", "raycl/data/x.py", "try:\n    f()\nexcept:\n    g()", "catches everything"),
    ("excepts", "raycl/data/x.py", "try:\n    f()\nexcept (OSError, Exception):\n    g()", "catches everything"),
    ("excepts", "jobs/x.py", "with contextlib.suppress(BaseException):\n    f()", "catches everything"),
    ("stars", "tests/test_x.py", "from os import *", "name what you take"),
    ("names", "raycl/training/utils.py", "x = 1", "'utils' says nothing"),
    ("names", "raycl/common/x.py", "x = 1", "'common' says nothing"),
    ("docstrings", "raycl/data/__init__.py", None, "has no docstring"),
    ("mutable_globals", "raycl/data/x.py", "cache = {'a': 1}", "cache is a mutable global"),
    ("mutable_globals", "raycl/data/x.py", "CACHE: dict[str, int] = {}", "CACHE is a mutable global"),
    ("mutable_globals", "raycl/data/x.py", "SEEN = set()", "SEEN is a mutable global"),
    ("mutable_globals", "raycl/data/x.py", "SEEN = collections.defaultdict(list)", "SEEN is a mutable global"),
    ("changed_tables", "raycl/data/x.py", "T = {'a': 1}\ndef f():\n    T['b'] = 2", "changes the global table T"),
    ("changed_tables", "raycl/data/x.py", "T = ['a']\ndef f():\n    T.append('b')", "changes the global table T"),
    ("mutable_globals", "raycl/data/x.py", "x = 1\ndef f():\n    global x\n    x = 2", "global x"),
]
SOUND = [
    (
        "raycl/data/x.py",
        "from raycl.data.y import z\nfrom . import y\nfrom raycl import __version__\nfrom raycl.types import Task",
    ),
    ("raycl/launch/ray_train.py", "import ray.train\nfrom raycl.training.assembly import build"),
    ("raycl/backbone/load.py", "AutoModel.from_pretrained('x')"),
    ("raycl/backbone.py", "AutoModel.from_pretrained('x')"),
    ("raycl/backbone/load.py", "x = EncoderBackbone if kind == 'encoder' else {'decoder': CausalBackbone}[kind]"),
    ("benchmarks/streams/plain.py", "x = kind == 'encoder-decoder'"),
    ("raycl/routing/x.py", "x = isinstance(router, TextRouter) and router.kind == 'keys'"),
    ("raycl/methods/x.py", "from raycl.routing.slots import SlotRouter"),
    ("raycl/serve/x.py", "x = 'task_id' in router.needs\ny = RouterInfo(kind=router.kind)\nz = one.kind == 'a'"),
    ("raycl/training/x.py", "x = f({'encoder': settings})\ny = backbone.capabilities.answers == 'label'"),
    ("raycl/methods/__init__.py", "METHODS = {'lora': 'raycl.methods.single_adapter:Lora'}\n__all__ = ['METHODS']"),
    (
        "raycl/data/x.py",
        "Tree = dict[str, int]\nlog = logging.getLogger(__name__)\ndef f():\n    seen = {}\n    seen['a'] = 1",
    ),
    ("raycl/data/x.py", "try:\n    f()\nexcept (OSError, ValueError):\n    raise"),
    ("jobs/train_stream.py", "from raycl.launch.driver import launch\nprint('done')"),
    ("tests/test_x.py", "import pickle\nimport ray\nfrom raycl import data, launch"),
]


@pytest.mark.parametrize(("name", "path", "code", "words"), BROKEN)
def test_every_rule_finds_its_violation(name: str, path: str, code: str | None, words: str) -> None:
    texts = [text for _, text in RULES[name](Module.of(path, "" if code is None else DOC + code + "\n"))]
    assert any(words in text for text in texts), f"expected '{words}' in {texts}"


@pytest.mark.parametrize(("path", "code"), SOUND)
def test_valid_code_has_no_findings(path: str, code: str) -> None:
    module = Module.of(path, DOC + code + "\n")
    assert [(name, text) for name, check in RULES.items() for _, text in check(module)] == []


def test_every_rule_has_a_test_case() -> None:
    assert {name for name, *_ in BROKEN} == set(RULES)


def _package(**imports: str) -> list[Module]:
    """Return modules of raycl/data: `sources__cache` is sources/cache.py."""
    paths = {f"raycl/data/{name.replace('__', '/')}.py": code for name, code in imports.items()}
    return [Module.of(path, DOC + code + "\n") for path, code in paths.items()]


def test_a_circle_of_folders_is_found() -> None:
    direct = _package(sources__cache="from raycl.data.stream import A", stream="import raycl.data.sources.cache")
    assert len(loops(direct)) == 2 and "raycl/data/sources/cache.py:2 imports raycl.data.stream.A" in loops(direct)[1]
    by_third = _package(
        a__x="from raycl.data.b.y import A", b__y="from ..c import z", c__z="from raycl.data.a import x", own=""
    )
    assert len(loops(by_third)) == 3


def test_folders_in_an_order_are_no_circle() -> None:
    assert loops(_package(sources__cache="import os", stream="from raycl.data.sources.cache import A", order="")) == []
    beside = _package(sources__cache="from raycl.data.sources.cache import A", sources__chunks="from . import cache")
    assert loops(beside) == [], "modules of one folder are one group"


def test_an_import_of_what_needs_an_extra_is_found() -> None:
    found = extras_at_start(_package(model="import lm_eval", checks="from raycl.data.model import A"))
    assert len(found) == 1 and "raycl/data/checks.py:2 imports raycl.data.model.A, which needs the extra" in found[0]
    for sound in ("def f():\n    from raycl.data import model", "if TYPE_CHECKING:\n    from raycl.data import model"):
        assert extras_at_start(_package(model="import lm_eval", checks=sound)) == []
