"""Sections of which a `name` chooses one, where the choice is larger than the built-in ones: packages add to it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel, GetCoreSchemaHandler
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError, core_schema

from raycl.errors import meant
from raycl.plugins import Names

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
