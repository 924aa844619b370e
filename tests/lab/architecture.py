"""The rules of the house, checked on the syntax trees: who may import whom, and which libraries enter where.

Nothing of raycl is imported here, so the rules hold for code that cannot even start. Every rule is a function from
one module to findings; `test_architecture.py` applies them and gives each one code that breaks it.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TypeVar

LAYERS = (
    ("errors", "types", "progress"),
    ("plugins", "storage", "text_tables"),
    ("config",),
    ("backbone", "data", "adapters", "kernels", "bank", "metrics"),
    ("routing",),
    ("generation",),
    ("scoring",),
    ("methods",),
    ("training",),
    ("launch",),
    ("serve",),
    ("operations",),
    ("operations/report", "operations/plan", "operations/banks"),
    ("operations/sweep",),
    ("operations/advise",),
    ("api", "testing"),
    ("cli",),
    ("benchmarks",),
    ("jobs",),
)
"""A unit (a module or package of raycl/, or jobs/ or benchmarks/) imports units of rows above its own, no others."""

APART = {
    "serve": ("methods",),
}
"""Pairs that the order alone would allow: serving imports snapshots, never the method that created them."""

DOORS = {
    "ray": (
        "raycl/launch/cluster.py",
        "raycl/launch/ray_train.py",
        "raycl/launch/warm_workers.py",
        "raycl/operations/sweep/",
        "raycl/bank/object_store.py",
        "raycl/serve/",
        "benchmarks/",
    ),
    "bitsandbytes": ("raycl/training/optimizers/built_in.py",),
    "deepspeed": ("raycl/training/engines/deepspeed.py",),
    "lm_eval": ("raycl/scoring/general_ability.py", "raycl/scoring/harness.py"),
    "llguidance": ("raycl/generation/grammars.py", "raycl/generation/form_process.py"),
    "omegaconf": ("raycl/config/",),
    "boto3": ("raycl/storage/remote.py",),
    "botocore": ("raycl/storage/remote.py",),
    "google": ("raycl/storage/remote.py",),
    "datasets": ("raycl/data/sources/hub.py",),
    "jinja2": (
        "raycl/backbone/markup/render_process.py",
        "raycl/operations/report/page/",
        "raycl/scoring/general_ability.py",
    ),
    "faiss": ("raycl/routing/code_index.py",),
    "peft": ("raycl/operations/banks/fusion.py", "benchmarks/"),
    "optuna": ("raycl/operations/sweep/search/searchers.py",),
    "simpleeval": ("raycl/operations/sweep/definition/expressions.py",),
    "sentence_transformers": ("raycl/routing/sentence_encoder.py",),
    "triton": ("raycl/kernels/",),
    "matplotlib": ("raycl/operations/report/",),
    "wandb": ("raycl/training/tracking/wandb_tracker.py",),
    "tensorboard": ("raycl/training/tracking/tensorboard_tracker.py",),
    "tensorboardX": ("raycl/training/tracking/tensorboard_tracker.py",),
    "mlflow": ("raycl/training/tracking/mlflow_tracker.py",),
    "trackio": ("raycl/training/tracking/trackio_tracker.py",),
    "pickle": (),
    "cloudpickle": (),
    "dill": (),
}
"""Library -> the only files or folders that import it. No door at all: tensors and JSON are never pickled."""

EXTRAS = (
    *("bert_score", "bitsandbytes", "boto3", "botocore", "google", "llguidance", "lm_eval", "mlflow", "optuna"),
    *("rapidfuzz", "sacrebleu", "tensorboard", "tensorboardX", "trackio"),
)
"""Libraries that `pip install raycl` does not bring. A module that imports one at its top is imported in functions."""

PRIVATE_AT = {
    "raycl/launch/cluster.py": "ray._private.ray_constants",  # Ray has no public word for: listen on loopback alone
    "raycl/serve/deployment/application.py": "ray.serve.context._get_global_client",  # `serve.status` has no address
}
"""Module -> the private name of a library that it imports all the same."""

CLOSED = {"raycl/operations/report/": ("torch", "transformers")}
"""Folder -> libraries it does without: reports are made from result files on any laptop."""

PRETRAINED = "raycl/backbone"
"""The module or package that calls `from_pretrained`."""

BACKBONE_CLASSES = {"EncoderBackbone", "Seq2SeqBackbone", "CausalBackbone"}
BACKBONE_KINDS = {"encoder", "encoder-decoder", "decoder"}
KINDS_KNOWN_AT = ("raycl/backbone/", "benchmarks/streams/plain.py")
"""Only these know the kinds of backbone (the plain loop has none of raycl's classes); others read `capabilities`."""

ROUTER_CLASSES = {"SingleRouter", "SumRouter", "TaskRouter", "TextRouter", "AttentionRouter", "SlotRouter"}
ROUTERS_KNOWN_AT = ("raycl/routing/", "raycl/methods/", "raycl/training/setup/", "benchmarks/")
"""Only the package itself, methods, the assembly and benchmarks name a concrete router; others read `needs`."""

METHODS_AT = "raycl/methods/registry.py"
METHODS_KNOWN_AT = ("raycl/methods/", "raycl/data/", "raycl/operations/plan/tables.py", "raycl/testing/")
"""Only methods and their registry know methods by name; data has papers' orders and layouts, a page a table, and checks
for authors train what they check beside a plain method."""
OTHER_MEANINGS = {"adapter", "prompt", "replay", "lora", "olora", "migu"}
"""Names of methods that are words for other things: adapters of the bank, prompts, PEFT's LoRA, a layout of data files,
the modifier whose magnitudes a report shows."""

BASE_OF_ADAPTERS = "raycl.methods.per_task_adapter"
"""This base is not asked for either: its methods declare (`Method.allocation`, `without_task`, `revisable`)."""

METHOD_AT, HOOKS = "raycl/methods/base.py", 10
"""The module of a method's contract, and the number of public hooks that it may have."""

README_LINES = 150
KNOTS = {"utils", "util", "common", "misc", "helpers", "helper"}
MUTABLE_CALLS = {"list", "dict", "set", "bytearray", "defaultdict", "deque", "OrderedDict", "Counter"}
MUTATORS = {"append", "extend", "insert", "add", "update", "setdefault", "pop", "popitem", "remove", "clear", "discard"}


Node = TypeVar("Node", bound=ast.AST)


@dataclass(frozen=True)
class Module:
    """One source file: its path in the repository, its text and its tree."""

    path: str
    text: str
    tree: ast.Module
    beside: tuple[str, ...] = ()

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """The nodes of the whole tree, in the order of `ast.walk`, without contexts, of which rules ask the node."""
        result: list[ast.AST] = [self.tree]
        for node in result:  # which grows
            for name in node._fields:
                value = getattr(node, name, None)
                if isinstance(value, list):
                    result += [item for item in value if isinstance(item, ast.AST)]
                elif isinstance(value, ast.AST) and name != "ctx":
                    result.append(value)
        return result

    @cached_property
    def _by_kind(self) -> dict[type, list[ast.AST]]:
        result: dict[type, list[ast.AST]] = {}
        for node in self.nodes:
            result.setdefault(type(node), []).append(node)
        return result

    def each(self, kind: type[Node]) -> list[Node]:
        """Return the nodes of exactly this kind: of the whole tree, walked once for all rules."""
        return [node for node in self._by_kind.get(kind, ()) if isinstance(node, kind)]

    @cached_property
    def _identifiers(self) -> dict[str, list[int]]:
        result: dict[str, list[int]] = {}
        for imported in self.each(ast.ImportFrom):
            for alias in imported.names:
                result.setdefault(alias.name, []).append(imported.lineno)
        for name in self.each(ast.Name):
            result.setdefault(name.id, []).append(name.lineno)
        for attribute in self.each(ast.Attribute):
            result.setdefault(attribute.attr, []).append(attribute.lineno)
        return result

    def uses(self, names: Collection[str]) -> Iterator[tuple[int, str]]:
        """Yield the line and name wherever one of these is a variable, an attribute, or imported from a module."""
        yield from ((line, name) for name in sorted(names) for line in self._identifiers.get(name, ()))

    @staticmethod
    def of(path: str, text: str, beside: tuple[str, ...] = ()) -> Module:
        """Parsed.

        Args:
            beside: names of the other modules of its folder.
        """
        return Module(path, text, ast.parse(text, path), beside)

    @property
    def ours(self) -> bool:
        return self.path.startswith(("raycl/", "benchmarks/", "jobs/"))

    @property
    def unit(self) -> str | None:
        """`config` for raycl/config/trust.py, `bank/operations` for modules there; None for raycl itself and tests."""
        return _unit(_dotted(self.path)) if self.ours else None

    @cached_property
    def everywhere(self) -> list[tuple[int, str]]:
        """The line and dotted name of everything imported, at any depth, for type checking and by name too."""
        return list(self._imported(self.nodes))

    @cached_property
    def at_start(self) -> list[tuple[int, str]]:
        """The same of what is imported when the module is."""
        return list(self._imported(_run_at_start(self.tree)))

    def _imported(self, nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
        package = _dotted(self.path) if self.path.endswith("__init__.py") else _dotted(self.path).rpartition(".")[0]
        for node in nodes:
            if isinstance(node, ast.Import):
                yield from ((node.lineno, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
                base = ".".join([*above, *([node.module] if node.module else [])])
                yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
            elif isinstance(node, ast.Call) and _name(node.func) in ("import_module", "__import__"):
                yield from ((node.lineno, text) for text in _strings(node.args[:1]))


def _run_at_start(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes below that run when the module is imported: none of functions, nor for type checking alone."""
    for child in ast.iter_child_nodes(node):
        typing_alone = isinstance(child, ast.If) and _name(child.test) == "TYPE_CHECKING"
        if not typing_alone and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield child
            yield from _run_at_start(child)


def _dotted(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _unit(dotted: str) -> str | None:
    parts = dotted.split(".")
    if parts[0] in ("jobs", "benchmarks"):
        return parts[0]
    if parts[0] != "raycl" or len(parts) == 1 or parts[1] == "__version__":
        return None
    below = "/".join(parts[1:3])
    return below if any(below in row for row in LAYERS) else parts[1]


def _name(node: ast.expr | None) -> str:
    """Return the last word of `x`, `a.x` or `x[...]`."""
    if isinstance(node, ast.Subscript):
        return _name(node.value)
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _strings(nodes: list[ast.expr]) -> list[str]:
    return [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]


def loops(modules: Sequence[Module]) -> list[str]:
    """Return folders that import one another in a circle, each with an import that closes it.

    A folder is its own modules as one group; each of its subfolders is another. Modules at the root of raycl are
    ordered by LAYERS.
    """
    imports: dict[str, dict[str, str]] = {}
    known = {_dotted(module.path): module.path.rpartition("/")[0] for module in modules if module.ours}
    for module in modules:
        here = module.path.rpartition("/")[0]
        if not module.ours or here == "raycl":
            continue
        for line, name in module.everywhere:
            there = known.get(name) or known.get(name.rpartition(".")[0])
            if there is not None and there not in (here, "raycl"):
                imports.setdefault(here, {}).setdefault(there, f"{module.path}:{line} imports {name}")

    @cache
    def reached(folder: str) -> frozenset[str]:
        seen, left = set[str](), [folder]
        while left:
            new = imports.get(left.pop(), {}).keys() - seen
            seen |= new
            left += new
        return frozenset(seen)

    return [
        f"{why}, and {there} imports {here} again: move what one of them needs below both"
        for here, targets in sorted(imports.items())
        for there, why in sorted(targets.items())
        if here in reached(there)
    ]


def extras_at_start(modules: Sequence[Module]) -> list[str]:
    """Return imports at the top of a module of one that needs an extra: without it neither can be imported."""
    needs = {
        _dotted(module.path): library
        for module in modules
        for _, name in module.at_start
        if module.ours and (library := name.partition(".")[0]) in EXTRAS
    }
    return [
        f"{module.path}:{line} imports {name}, which needs the extra {needs[there]}: import it where it is used"
        for module in modules
        for line, name in module.at_start
        for there in (name, name.rpartition(".")[0])
        if module.path.startswith("raycl/") and there in needs
    ]


# ---- the rules: each takes a module and yields `line, what is wrong and what to do` -------------------------------

Finding = tuple[int, str]
RULES: dict[str, Callable[[Module], Iterator[Finding]]] = {}


def rule(check: Callable[[Module], Iterator[Finding]]) -> Callable[[Module], Iterator[Finding]]:
    RULES[check.__name__] = check
    return check


@rule
def direction(module: Module) -> Iterator[Finding]:
    rows = {unit: row for row, units in enumerate(LAYERS) for unit in units}
    if not module.ours:
        return
    if module.unit is not None and module.unit not in rows:
        yield 1, f"raycl/{module.unit} has no row in LAYERS: say there what it may import"
        return
    for line, name in module.everywhere:
        target = _unit(name)
        if target is None or target == module.unit:
            continue
        if target not in rows:
            yield line, f"imports {name}, which has no row in LAYERS"
        elif module.unit is None:
            if target != "api":
                yield line, f"raycl/__init__.py imports {name}: it has the API alone, so that `import raycl` is instant"
        elif rows[target] >= rows[module.unit] or target in APART.get(module.unit, ()):
            yield line, f"{module.unit} imports {target}, which is not below it: see LAYERS and APART"


@rule
def doors(module: Module) -> Iterator[Finding]:
    if not module.ours:
        return
    for line, name in module.everywhere:
        library = name.partition(".")[0]
        if library in DOORS and not module.path.startswith(DOORS[library] or "-"):
            yield line, f"imports {library}, which may enter only at {', '.join(DOORS[library]) or 'no place'}"
        for folder, libraries in CLOSED.items():
            if module.path.startswith(folder) and library in libraries:
                yield line, f"imports {library}, but {folder} does without it"


@rule
def private(module: Module) -> Iterator[Finding]:
    for line, name in module.everywhere:
        parts = name.split(".")
        theirs = parts[0] not in ("raycl", "benchmarks", "__future__")
        hidden = [part for part in parts if part.startswith("_") and not part.endswith("__")]
        if module.ours and theirs and hidden and not name.startswith(PRIVATE_AT.get(module.path, "-")):
            yield line, f"imports {name}, which is private to its library: use what that documents"


@rule
def pretrained(module: Module) -> Iterator[Finding]:
    inside = module.path.startswith((f"{PRETRAINED}.py", f"{PRETRAINED}/"))
    for node in module.each(ast.Attribute) if module.ours and not inside else ():
        if node.attr == "from_pretrained":
            yield node.lineno, f"from_pretrained outside {PRETRAINED}: ask the backbone for the model or tokenizer"


@rule
def backbone_kinds(module: Module) -> Iterator[Finding]:
    """`encoder` alone has other uses (a sentence encoder's settings), so it is a finding only where code branches."""
    if not module.ours or module.path.startswith(KINDS_KNOWN_AT):
        return
    for constant in module.each(ast.Constant):
        if constant.value in BACKBONE_KINDS - {"encoder"}:
            yield constant.lineno, f"names the kind of backbone '{constant.value}': read `backbone.capabilities`"
    for line, name in module.uses(BACKBONE_CLASSES):
        yield line, f"uses {name}: read `capabilities`, or add what is missing to `Backbone`"
    compared = [part for node in module.each(ast.Compare) for part in (node.left, *node.comparators)]
    for branch in [*compared, *(node.value for node in module.each(ast.MatchValue))]:
        parts = branch.elts if isinstance(branch, ast.Tuple | ast.List | ast.Set) else [branch]
        if "encoder" in _strings(parts):
            yield branch.lineno, "branches on the kind of backbone 'encoder': read `backbone.capabilities`"


@rule
def hooks(module: Module) -> Iterator[Finding]:
    for node in module.tree.body if module.path == METHOD_AT else ():
        if isinstance(node, ast.ClassDef) and node.name == "Method":
            result = [item for item in node.body if isinstance(item, ast.FunctionDef) and not item.name.startswith("_")]
            if len(result) > HOOKS:
                names = ", ".join(item.name for item in result)
                yield node.lineno, f"Method has {len(result)} public hooks, at most {HOOKS}: {names}"


@cache
def _tables_of_methods() -> dict[str, str]:
    """Return method name -> module, of the literal tables in the registry."""
    tree = ast.parse((Path(__file__).resolve().parents[2] / METHODS_AT).read_text(encoding="utf-8"))
    tables = [node.value for node in tree.body if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Dict)]
    rows = [(key, value) for table in tables for key, value in zip(table.keys, table.values, strict=True) if key]
    names, targets = (_strings([row[part] for row in rows]) for part in (0, 1))
    return {name: target.partition(":")[0] for name, target in zip(names, targets, strict=True)}


@rule
def method_names(module: Module) -> Iterator[Finding]:
    """Yield a string that is a method's name, or an import of a method's own module. Names that mean other things too
    (`prompt`, `lora`) are no findings."""
    if not module.path.startswith("raycl/") or module.path.startswith(METHODS_KNOWN_AT):
        return
    methods = _tables_of_methods()
    own = {*methods.values(), BASE_OF_ADAPTERS}
    for node in module.each(ast.Constant):
        value = node.value
        if isinstance(value, str) and value in methods and value not in OTHER_MEANINGS:
            yield node.lineno, f"names the method '{value}': let it declare what is asked for"
    for line, name in module.everywhere:
        if name in own or name.rpartition(".")[0] in own:
            yield line, f"imports {name}, a method's own module: let it declare what is asked for"


@rule
def router_kinds(module: Module) -> Iterator[Finding]:
    """Comparing `router.kind` counts, as do names of concrete classes."""
    if not module.ours or module.path.startswith(ROUTERS_KNOWN_AT):
        return
    for line, name in module.uses(ROUTER_CLASSES):
        yield line, f"uses {name}: read `needs` and `chooses` of the router, or of `router_class(kind)`"
    for node in module.each(ast.Compare):
        for part in (node.left, *node.comparators):
            kind = isinstance(part, ast.Attribute) and part.attr == "kind" and _name(part.value)
            if kind and kind.lower().endswith("router"):
                yield part.lineno, "compares the kind of a router: read its `needs` and `chooses`"


@rule
def prints(module: Module) -> Iterator[Finding]:
    inside = module.path.startswith("raycl/") and module.path != "raycl/cli/commands.py"
    for node in module.each(ast.Name) if inside else ():
        if node.id == "print":
            yield node.lineno, "print outside raycl/cli/commands.py: echo it in a command, or log it"


FOREIGN_CODE_AT = ("raycl/plugins.py",)
"""Modules that import packages of others: a broken one may raise anything, and becomes one sentence that names it."""


@rule
def excepts(module: Module) -> Iterator[Finding]:
    if not module.ours or module.path in FOREIGN_CODE_AT:
        return
    for node in (*module.each(ast.ExceptHandler), *module.each(ast.Call)):
        if isinstance(node, ast.ExceptHandler):
            caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        elif _name(node.func) == "suppress":
            caught = list(node.args)
        else:
            continue
        if any(kind is None or _name(kind) in ("Exception", "BaseException") for kind in caught):
            yield node.lineno, "catches everything: name the errors that can be handled here"


@rule
def stars(module: Module) -> Iterator[Finding]:
    for line, name in module.everywhere:
        if name.endswith(".*"):
            yield line, f"imports {name}: name what you take"


@rule
def names(module: Module) -> Iterator[Finding]:
    for part in _dotted(module.path).split("."):
        if module.ours and part in KNOTS:
            yield 1, f"'{part}' says nothing: name the module after the noun it is about"


@rule
def docstrings(module: Module) -> Iterator[Finding]:
    if not ast.get_docstring(module.tree):
        yield 1, "has no docstring: open with what it is for"


def _containers(module: Module) -> Iterator[tuple[int, str, bool]]:
    """Line and name of every mutable container at module level, and whether it is a table written out in full."""
    for node in module.tree.body:
        if not isinstance(node, ast.Assign | ast.AnnAssign):
            continue
        value = node.value
        made = isinstance(value, ast.Call) and _name(value.func) in MUTABLE_CALLS
        shown = isinstance(value, ast.List | ast.Set | ast.Dict | ast.ListComp | ast.SetComp | ast.DictComp)
        empty = not (value.keys if isinstance(value, ast.Dict) else getattr(value, "elts", True))
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for name in map(_name, targets):
            if (made or shown) and name != "__all__":
                yield node.lineno, name, shown and not empty and name.isupper()


@rule
def mutable_globals(module: Module) -> Iterator[Finding]:
    if not module.ours:
        return
    for line, name, is_table in _containers(module):
        if not is_table:
            yield line, f"{name} is a mutable global: only UPPER_CASE tables written out in full may be"
    for node in module.each(ast.Global):
        yield node.lineno, f"global {', '.join(node.names)}: keep the state in an object that is passed on"


@rule
def changed_tables(module: Module) -> Iterator[Finding]:
    tables = {name for _, name, _ in _containers(module)} if module.ours else set()
    for node in (*module.each(ast.Subscript), *module.each(ast.Call)) if tables else ():
        if isinstance(node, ast.Subscript):
            if not isinstance(node.ctx, ast.Store | ast.Del):
                continue
            changed = node.value
        elif isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
            changed = node.func.value
        else:
            continue
        if isinstance(changed, ast.Name) and changed.id in tables:
            yield node.lineno, f"changes the global table {changed.id}"
