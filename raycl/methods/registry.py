"""The tables of methods and gradient modifiers, and the config types built from them; packages add to them.

Why literal: the same on every worker, no import side effects, and a name that is missing is visible in a diff. Names
that are not in a table are looked up in the entry points of installed packages (`raycl.plugins`).
"""

import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, Union, get_args

from pydantic import Field

from raycl.config import Section, validate
from raycl.config.sections import Choice
from raycl.errors import PluginError, meant
from raycl.methods.base import Method, MethodConfig
from raycl.methods.modifier import GradientModifier, ModifierConfig
from raycl.plugins import Kind, Names, find, load

ClassT = TypeVar("ClassT")

LEARNERS: dict[str, str] = {
    "finetune": "raycl.methods.finetune:Finetune",
    "osft": "raycl.methods.osft:Osft",
    "lora": "raycl.methods.single_adapter:Lora",
    "inclora": "raycl.methods.lora.inclora:IncLora",
    "olora": "raycl.methods.lora.olora:OLora",
    "ella": "raycl.methods.lora.ella:Ella",
    "moram": "raycl.methods.lora.moram:Moram",
    "inflora": "raycl.methods.lora.inflora:InfLora",
    "gainlora": "raycl.methods.lora.gainlora:GainLora",
    "sdlora": "raycl.methods.lora.sdlora:SdLora",
    "slao": "raycl.methods.lora.slao:Slao",
    "gorp": "raycl.methods.lora.gorp:Gorp",
    "treelora": "raycl.methods.lora.treelora:TreeLora",
    "moelora": "raycl.methods.lora.moelora:MoeLora",
    "adapter": "raycl.methods.single_adapter:SeqAdapter",
    "prompt": "raycl.methods.single_adapter:SeqPrompt",
    "l2p": "raycl.methods.prompts.l2p:L2p",
    "progprompt": "raycl.methods.prompts.progprompt:ProgPrompt",
    "saber": "raycl.methods.prompts.saber:Saber",
    "mocl": "raycl.methods.prompts.mocl:Mocl",
    "idbr": "raycl.methods.replay.idbr:Idbr",
    "lfpt5": "raycl.methods.prompts.lfpt5:Lfpt5",
    "epi": "raycl.methods.prompts.epi:Epi",
    "slm": "raycl.methods.slm.slm:Slm",
    "sapt": "raycl.methods.sapt.sapt:Sapt",
    "demix": "raycl.methods.demix:Demix",
    "das": "raycl.methods.masks.das:Das",
    "hat": "raycl.methods.masks.hat:Hat",
    "hat-adapter": "raycl.methods.masks.hat_adapter:HatAdapter",
}
"""Method name -> class."""

WRAPPERS: dict[str, str] = {
    "replay": "raycl.methods.replay.replay:Replay",
    "agem": "raycl.methods.gradients.agem:Agem",
    "gem": "raycl.methods.gradients.gem:Gem",
    "ogd": "raycl.methods.gradients.ogd:Ogd",
    "lwf": "raycl.methods.regularization.lwf:Lwf",
    "sdft": "raycl.methods.sdft:Sdft",
    "ewc": "raycl.methods.regularization.ewc:Ewc",
    "mbpa++": "raycl.methods.replay.mbpa:Mbpa",
    "der++": "raycl.methods.replay.der:Der",
    "forever": "raycl.methods.replay.forever:Forever",
}
"""Name of a method around another one (its `learner`) -> class."""

METHODS: dict[str, str] = {**LEARNERS, **WRAPPERS}
"""All of them."""

DEFAULT_METHOD = "lora"
"""The method of a run, and the learner of a method around another one, where a config names none."""

MODIFIERS: dict[str, str] = {
    "migu": "raycl.methods.migu.migu:Migu",
    "fggm": "raycl.methods.masks.fggm:Fggm",
}
"""Gradient modifier name -> class; a run takes any number of them with its one method."""


METHOD_NAMES = Names("method", METHODS)
MODIFIER_NAMES = Names("modifier", MODIFIERS)
"""Built-in names and those of packages."""


def method_class(name: str) -> type[Method]:
    """Return the class behind a name: of `METHODS`, else of an installed package.

    Raises:
        PluginError: neither has it, or the package cannot be used.
    """
    return _class_of("method", METHOD_NAMES, METHODS, name, Method)


def modifier_class(name: str) -> type[GradientModifier]:
    """Return the class behind a name: of `MODIFIERS`, else of an installed package.

    Raises:
        PluginError: neither has it, or the package cannot be used.
    """
    return _class_of("modifier", MODIFIER_NAMES, MODIFIERS, name, GradientModifier)


def method_config(tree: Mapping[str, Any]) -> MethodConfig:
    """Return the settings of a method from a run's config.

    Raises:
        ConfigError: they are no settings of that method in this version.
    """
    config: MethodConfig = validate(method_class(str(tree["name"])).Config, dict(tree))
    return config


def _class_of(kind: Kind, names: Names, table: Mapping[str, str], name: str, base: type[ClassT]) -> type[ClassT]:
    if name in table:
        module, _, attribute = table[name].partition(":")
        named_class = getattr(importlib.import_module(module), attribute)
        assert issubclass(named_class, base), f"'{table[name]}' is no {base.__name__}"
    else:
        named_class = load(kind, name, base)
    if named_class is None:
        raise PluginError(f"unknown {kind} '{name}': {meant(name, names)}; is its package installed here?")
    config = named_class.Config
    field = config.model_fields.get("name")
    if field is None or get_args(field.annotation) != (name,):
        raise PluginError(
            f"{find(kind, name)} has the settings {config.__module__}.{config.__name__}: expected their field name: "
            f'Literal["{name}"] = "{name}"'
        )
    chosen: type[ClassT] = named_class
    return chosen


def _learner_section(name: str) -> type[MethodConfig]:
    """Return the settings class of a method that is around no other."""
    section = method_class(name).Config
    if "learner" in section.model_fields:
        raise PluginError(f"method.learner is '{name}', a method around another one: expected one that learns, as lora")
    return section


if TYPE_CHECKING:
    MethodChoice = MethodConfig
    LearnerChoice = MethodConfig
    ModifierChoice = ModifierConfig
else:

    def __getattr__(attribute: str) -> Any:
        """Return `LearnerChoice`, `MethodChoice` or `ModifierChoice`: config classes, distinguished by their `name`."""
        if attribute == "LearnerChoice":
            return _union(Names("method", LEARNERS), _learner_section)
        if attribute == "MethodChoice":
            return _union(METHOD_NAMES, lambda name: method_class(name).Config)
        if attribute == "ModifierChoice":
            return _union(MODIFIER_NAMES, lambda name: modifier_class(name).Config)
        raise AttributeError(attribute)


def _union(names: Names, section_of: Callable[[str], type[Section]]) -> Any:
    """Return the union of the built-in settings classes, and with them those of packages."""
    builtin: list[Any] = [section_of(name) for name in names.builtin]
    if len(builtin) == 1:
        return Annotated[builtin[0], Choice(names, section_of)]
    return Annotated[Union[tuple(builtin)], Field(discriminator="name"), Choice(names, section_of)]  # noqa: UP007
