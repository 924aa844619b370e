"""Strict configuration: one YAML tree, dotted overrides, errors that name the dotted key, a fingerprint.

A typo must be an error with the nearest valid key, before any work starts. OmegaConf parses, pydantic validates; ours
is only the sugar for named nodes and the wording of errors.

Named nodes: `method=lora method.r=8` is short for `method: {name: lora, r: 8}`, and
`modifiers=[migu] modifiers.migu.threshold=0.7` for `modifiers: {migu: {threshold: 0.7}}`. Naming another
choice drops the keys of the former choice, which do not apply to it; naming the same choice keeps them.
Interpolations (`${data.path}`) are resolved last: they see the overrides, and only what is written, never a
default; `\\${` is a literal `${`.

A file may begin with another one: `extends: base.yaml`, relative to its own folder. What it writes is laid over that
file's tree as overrides are: mappings key by key, all else replaced (`assignment.overlay`).

Of environment variables, `${oc.env:NAME}` reads folders of data and models alone, and what the command allows by name:
a config of another author could put any variable, a key for example, into an address that the run sends requests to.
"""

import difflib
import io
import re
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar, get_args

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, GetCoreSchemaHandler, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticCustomError, core_schema

from raycl.config import trainer_names
from raycl.config.assignment import Tree, apply_override, name_of, one_line, overlay, without_name
from raycl.errors import ConfigError, meant
from raycl.plugins import Names


def _absolute(path: str) -> str:
    scheme, is_database, database = path.partition("sql:sqlite:///")
    if is_database and not scheme and database and not database.startswith("/"):
        return f"{is_database}{Path(database).absolute()}"
    return path if "://" in path else str(Path(path).expanduser().absolute())


Location = Annotated[str, AfterValidator(_absolute)]
"""A path or URI; local paths become absolute when the config is read: workers run in other folders."""

PathOrUri = Location | None
"""A `Location`, or null."""

Size = Annotated[int, Field(ge=1)]
"""A positive number, for values of mappings, which have no field of their own to say so."""

MARK = "# Every setting, written by raycl.\n"


class Section(BaseModel):
    """Base of every config section: unknown keys are errors, values are immutable."""

    model_config: ClassVar[ConfigDict] = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, protected_namespaces=()
    )

    folders: ClassVar[tuple[str, ...]] = ()
    """Settings of the section that name folders of samples, which a run reads."""

    def unused_settings(self) -> Iterator[tuple[str, str]]:
        """Yield settings in here that act on nothing, and the `key=value` why; both are dotted paths from here."""
        return iter(())


ConfigT = TypeVar("ConfigT", bound=Section)


def load(model: type[ConfigT], path: str | None, overrides: Sequence[str] = ()) -> ConfigT:
    """Read YAML at `path` (None: all defaults), apply `key.path=value` overrides in order, validate.

    Raises:
        ConfigError: unreadable file, malformed override, unknown key, wrong value.
    """
    return validate(model, load_tree(path, overrides))


def load_tree(path: str | None, overrides: Sequence[str] = ()) -> Tree:
    """Return what `load` validates: the file's tree with overrides, interpolations resolved.

    Raises:
        ConfigError: unreadable file, malformed override.
    """
    tree = read_tree(path) if path is not None else {}
    for override in overrides:
        apply_override(tree, override)
    return _resolve(tree, f"config file '{path}'" if path is not None else "the overrides")


def from_yaml(text: str, source: str) -> Tree:
    """Return the tree in a YAML text, for example in what `to_yaml` wrote; `source` names it in errors.

    Raises:
        ConfigError: it is not YAML, or is not a mapping.
    """
    return _resolve(_mapping(text, f"'{source}'"), f"'{source}'", files=False)


def read_tree(path: str, below: Sequence[str] = ()) -> Tree:
    """Return the tree as written, with what the file extends; interpolations still in it.

    Args:
        below: resolved paths of files that extend this one.
    """
    written = _read_file(path)
    trainer_names.rename_in(written, f"config file '{path}'")
    if "extends" not in written:
        return written
    base, resolved = written.pop("extends"), str(Path(path).resolve())
    if not isinstance(base, str) or not base:
        raise ConfigError(f"config file '{path}' extends {base!r}: expected the path of a YAML file from its folder")
    target, chain = Path(path).parent / base, [*below, resolved]
    if str(target.resolve()) in chain:
        raise ConfigError(f"config file '{path}' extends '{base}', which extends it in turn: leave one of the two out")
    if not target.is_file():
        raise ConfigError(f"config file '{path}' extends '{base}', and '{target}' does not exist: correct the name")
    tree = read_tree(str(target), chain)
    overlay(tree, written)
    return tree


def require_file(path: str) -> str:
    """Return the path of a config file that is there.

    Raises:
        ConfigError: it is not.
    """
    if not Path(path).is_file():
        raise ConfigError(f"config file '{path}' does not exist: give the path of a YAML file")
    return path


def _read_file(path: str) -> Tree:
    require_file(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file '{path}' cannot be read: {error}") from error
    return _mapping(text, f"config file '{path}'")


def _mapping(text: str, source: str) -> Tree:
    try:
        tree = deepcopy(_parsed(text))
    except (yaml.YAMLError, OmegaConfBaseException, OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{source} is not valid YAML: {one_line(error)}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{source} holds a {type(tree).__name__}: expected a mapping of sections")
    return {str(key): value for key, value in tree.items()}


@lru_cache(maxsize=64)
def _parsed(text: str) -> Any:
    """Return what a YAML text holds; kept, for every row of a comparison reads the file that it begins with."""
    return OmegaConf.to_container(OmegaConf.load(io.StringIO(text)))


def _resolve(tree: Tree, source: str, files: bool = True) -> Tree:
    if not _holds_marks(tree):
        return deepcopy(tree)
    try:
        with reading(files):
            resolved = OmegaConf.to_container(OmegaConf.create(tree), resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{source} cannot be resolved: {one_line(error)}") from error
    assert isinstance(resolved, dict), "a mapping resolves to a mapping"
    return {str(key): value for key, value in resolved.items()}


def _holds_marks(node: Any) -> bool:
    """Return whether there is an interpolation or `???` in a tree: without them it is resolved."""
    if isinstance(node, dict):
        return any(_holds_marks(key) or _holds_marks(value) for key, value in node.items())
    if isinstance(node, list):
        return any(map(_holds_marks, node))
    return isinstance(node, str) and ("${" in node or "???" in node)


def validate(model: type[ConfigT], tree: Tree) -> ConfigT:
    """Check `tree` against `model`.

    Raises:
        ConfigError: one sentence a problem, each with its dotted path and the nearest valid key.
    """
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        problems = [_explain(model, tree, detail) for detail in _without_echoes(model, tree, error.errors())]
        raise ConfigError("; ".join(dict.fromkeys(problems))) from error


def _without_echoes(model: type[BaseModel], tree: Tree, details: list[ErrorDetails]) -> list[ErrorDetails]:
    """Drop errors that only repeat an inner error, and those of union members that were not selected."""
    places = [tuple(_place(model, tree, detail["loc"])[0]) for detail in details]
    ours = {inner for inner, detail in zip(places, details, strict=True) if detail["type"] == "value_error"}

    def is_echo(location: tuple[str, ...], detail: ErrorDetails) -> bool:
        deeper = any(len(other) > len(location) and other[: len(location)] == location for other in places)
        return deeper or (location in ours and detail["type"] != "value_error")

    return [detail for inner, detail in zip(places, details, strict=True) if not is_echo(inner, detail)]


def _explain(model: type[BaseModel], tree: Tree, detail: ErrorDetails) -> str:
    parts, owners, others = _place(model, tree, detail["loc"])
    path = ".".join(parts)
    if detail["type"] == "extra_forbidden":
        return f"unknown config key '{path}'{_hint(parts, owners, others)}"
    if detail["type"] == "union_tag_invalid":
        tag, expected = detail["ctx"]["tag"], re.findall(r"'(.*?)'", detail["ctx"]["expected_tags"])
        return f"config key '{path}' names '{tag}': {meant(str(tag), expected)}"
    if detail["type"] == UNKNOWN:
        return f"config key '{path}' names '{detail['ctx']['name']}': {detail['ctx']['hint']}"
    if detail["type"] == "missing":
        return f"config key '{path}' is missing: it has no default, give it a value"
    if detail["type"] in ("value_error", "assertion_error"):
        text = str(detail.get("ctx", {}).get("error", detail["msg"]))
        return f"{path}: {text}" if path and not text.startswith(path) else text
    message = detail["msg"][0].lower() + detail["msg"][1:]
    return f"config key '{path}' is {detail['input']!r}: {message}"


def _hint(parts: list[str], owners: list[type[BaseModel]], others: list[type[BaseModel]]) -> str:
    """Return the nearest key of the section, or the choice that has the key, or all keys."""
    keys = sorted({key for owner in owners for key in owner.model_fields})
    if (len(parts) == 1 and "train" in keys) or parts[:-1] == ["train"]:
        keys += trainer_names.PATHS
    is_rank = parts[-1] in trainer_names.RANKS and "r" in keys
    near = ["r"] if is_rank else difflib.get_close_matches(parts[-1], keys, n=1, cutoff=0.5)
    if near:
        return f": did you mean '{'.'.join([*parts[:-1], near[0]])}'?"
    node = ".".join(parts[:-1])
    having = [f"{node}={kind.model_fields['name'].default}" for kind in others if parts[-1] in kind.model_fields]
    if having:
        return f": it belongs to {' and '.join(having)}"
    return f": {meant(parts[-1], keys)}"


Sections = list[type[BaseModel]]


def _place(model: type[BaseModel], tree: Any, loc: Sequence[int | str]) -> tuple[list[str], Sections, Sections]:
    """Return a pydantic location in the terms of the user's file.

    pydantic puts the chosen member of a union into the location (`method.lora.r`, `steps.int`), which the
    user's file does not contain.

    Returns:
        dotted parts, the sections that the last part belongs to, and those that were not chosen instead.
    """
    parts: list[str] = []
    owners: Sections = []
    left_out: Sections = []
    here, others, node, choice = [model], list[type[BaseModel]](), tree, None
    for part in loc:
        field = next((kind.model_fields[part] for kind in here if part in kind.model_fields), None)
        chosen = [kind for kind in here if _names(kind, part)]
        if field is None and len(here) > 1 and chosen:
            here, others = chosen, [kind for kind in here if kind not in chosen]
            continue
        written = _is_written(part, node)
        if field is None and not written:
            continue
        parts.append(str(part))
        owners, left_out = here, others
        if written and isinstance(node, list) and isinstance(part, str):
            node = next(item for item in node if name_of(item) == part)
        else:
            node = node[part] if written else None
        if field is not None:
            here, others, choice = sections_in(field.annotation), [], choice_in(field)
        section = choice.section(name_of(node) or part) if choice is not None else None
        if section is not None:
            here, others, choice = [section], here, None
    return parts, owners, left_out


def _is_written(part: int | str, node: Any) -> bool:
    """Return whether the user's tree has that key, place in a list, or name in a list of names."""
    if isinstance(node, dict):
        return part in node
    return isinstance(node, list) and (isinstance(part, int) or part in [name_of(item) for item in node])


def _names(kind: type[BaseModel], part: int | str) -> bool:
    """Return whether `part` is pydantic's name for this member of a union: its class name or the value of its tag."""
    tag = kind.model_fields.get("name")
    return part == kind.__name__ or (tag is not None and part in get_args(tag.annotation))


def sections_in(annotation: Any) -> list[type[BaseModel]]:
    """Return the section classes anywhere in a type annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [kind for argument in get_args(annotation) for kind in sections_in(argument)]


def as_tree(config: BaseModel) -> Tree:
    """Return the resolved config as plain JSON-able values."""
    return config.model_dump(mode="json", serialize_as_any=True)


def named(value: Any, default: str) -> Any:
    """Return a named node as a mapping with its `name`: a bare name, or keys of the default choice, are completed."""
    if isinstance(value, str):
        return {"name": value}
    return {"name": default, **value} if isinstance(value, dict) else value


def named_each(value: Any, known: Iterable[str]) -> Any:
    """Return a list of names, or of mappings with a `name`, as a mapping from name to settings; null settings are left
    out.

    Raises:
        ValueError: a name that is not `known`, twice, or not the one that its settings carry.
    """
    if isinstance(value, list | tuple):
        pairs = [(name_of(item), without_name(item)) for item in value]
    elif isinstance(value, dict):
        pairs = [(name, item) for name, item in value.items() if item is not None]
    else:
        return value
    by_name: Tree = {}
    for name, item in pairs:
        if name is None:
            raise ValueError(f"an entry with {item!r} has no name: expected some of {', '.join(known)}")
        if name not in known:
            raise ValueError(f"'{name}' is unknown: {meant(name, known)}")
        if name in by_name:
            raise ValueError(f"'{name}' occurs twice: give each name once")
        by_name[name] = {"name": name, **item} if isinstance(item, dict) else item
        if isinstance(item, dict) and item.get("name", name) != name:
            raise ValueError(f"the settings of '{name}' have the name '{item['name']}': expected the same name")
    return by_name


def to_yaml(config: BaseModel) -> str:
    """Return the resolved tree as YAML, ready to be loaded again."""
    return tree_to_yaml(as_tree(config))


def tree_to_yaml(tree: Tree) -> str:
    """Return what `OmegaConf.to_yaml` writes of a resolved tree, without the nodes that it would make first."""
    style: dict[str, Any] = {"default_flow_style": False, "allow_unicode": True, "sort_keys": False}
    return MARK + str(yaml.dump(_escape(tree), Dumper=_Dumper, **style))


class _Dumper(yaml.SafeDumper):
    """Quotes texts that readers take for something else: OmegaConf 1e3 for a number, YAML 1.1 y and n for truth."""


def _text_node(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    quoted = text in ("y", "Y", "n", "N")
    with suppress(ValueError):
        float(text)
        quoted = True
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="'" if quoted else None)


_Dumper.add_representer(str, _text_node)


def _escape(value: Any) -> Any:
    """Protect every literal `${` from interpolation."""
    if isinstance(value, dict):
        return {key: _escape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_escape(item) for item in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


UNKNOWN = "unknown_choice"
"""Type of pydantic's error for a name that is neither built in nor of a package."""


@dataclass(frozen=True)
class Choice:
    """An annotation of a union of built-in sections: a name that is none of theirs is looked up in packages.

    Attributes:
        names: all that can be chosen.
        section_of: name -> settings class; called with names of packages alone.
    """

    names: Names
    section_of: Callable[[str], type[BaseModel]]

    def section(self, name: object) -> type[BaseModel] | None:
        """Return the settings class of a name of a package; None for built-in names and unknown ones.

        Raises:
            PluginError: the package cannot be used.
        """
        if not isinstance(name, str) or name in self.names.builtin or name not in self.names:
            return None
        return self.section_of(name)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_wrap_validator_function(self._validated, handler(source))

    def _validated(self, value: Any, handler: core_schema.ValidatorFunctionWrapHandler) -> Any:
        tree = dict(value) if isinstance(value, BaseModel) else value
        name = tree.get("name") if isinstance(tree, dict) else None
        section = self.section(name)
        if section is not None:
            return section.model_validate(value)
        if isinstance(name, str) and name not in self.names.builtin:
            raise PydanticCustomError(UNKNOWN, "{hint}", {"name": name, "hint": meant(name, self.names)})
        return handler(value)


def choice_in(field: FieldInfo) -> Choice | None:
    """Return the choice in a field's annotation, or in that of its items; None: there is none."""
    parts = [*field.metadata, *_parts(field.annotation)]
    return next((part for part in parts if isinstance(part, Choice)), None)


def _parts(annotation: Any) -> list[Any]:
    return [annotation, *(part for argument in get_args(annotation) for part in _parts(argument))]


ALWAYS = ("RAYCL_DATA", "RAYCL_MODELS")
"""The variables of data and models in the shipped configs."""

_allowed: ContextVar[Collection[str]] = ContextVar("allowed environment variables", default=())
_lock = threading.Lock()


@contextmanager
def allowing(names: Collection[str]) -> Iterator[None]:
    """Allow config files to read these variables as well."""
    token = _allowed.set((*_allowed.get(), *names))
    try:
        yield
    finally:
        _allowed.reset(token)


@contextmanager
def reading(files: bool) -> Iterator[None]:
    """Restrict OmegaConf to the environment variables that are allowed.

    Args:
        files: the command named the config; False: it is a record, which reads no variable at all.
    """
    names = (*ALWAYS, *_allowed.get()) if files else ()

    def read(name: str, *default: Any) -> str | None:
        if name not in names:
            expected = f"expected {', '.join(names)}, or add --allow-env {name}" if files else "a record has none"
            raise ConfigError(f"it reads the environment variable '{name}', which may be a secret: {expected}")
        value: str | None = oc.env(name, *default)
        return value

    with _lock:  # OmegaConf's resolvers are global to the process
        OmegaConf.register_resolver("oc.env", read, replace=True)
        try:
            yield
        finally:
            OmegaConf.register_resolver("oc.env", oc.env, replace=True)
