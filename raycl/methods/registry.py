"""The two literal tables of what a run can be made of, and the config types built from them.

Why literal: the same on every worker, no import side effects, and a name that is missing is visible in a diff.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Annotated, Any, Union

from pydantic import Field

from raycl.methods.base import Method, MethodConfig

METHODS: dict[str, str] = {
    "finetune": "raycl.methods.finetune:Finetune",
    "lora": "raycl.methods.lora:Lora",
    "inclora": "raycl.methods.inclora:IncLora",
    "olora": "raycl.methods.olora:OLora",
    "slm": "raycl.methods.slm:Slm",
    "replay": "raycl.methods.replay:Replay",
    "separate": "raycl.methods.reference:Separate",
    "joint": "raycl.methods.reference:Joint",
}
"""Method name -> class."""

REFERENCES = ("separate", "joint")
"""Methods that wrap another one (their `learner`) to give an upper reference."""

WRAPPERS = ("replay", *REFERENCES)
"""All methods with a `learner`, which is none of them."""


def method_class(name: str) -> type[Method]:
    """The class behind a name of `METHODS`."""
    module, _, attribute = METHODS[name].partition(":")
    found = getattr(importlib.import_module(module), attribute)
    assert isinstance(found, type) and issubclass(found, Method), f"METHODS['{name}'] is not a Method"
    return found


if TYPE_CHECKING:
    MethodChoice = MethodConfig
    LearnerChoice = MethodConfig
else:

    def __getattr__(attribute: str) -> Any:
        """`LearnerChoice` and `MethodChoice`: unions of config classes, told apart by their `name`."""
        if attribute == "LearnerChoice":
            return _union([name for name in METHODS if name not in WRAPPERS])
        if attribute == "MethodChoice":
            return _union(list(METHODS))
        raise AttributeError(attribute)


def _union(names: list[str]) -> Any:
    configs = tuple(method_class(name).Config for name in names)
    return Annotated[Union[configs], Field(discriminator="name")]  # noqa: UP007  built at run time
