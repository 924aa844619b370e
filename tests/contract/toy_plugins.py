"""A method, a gradient modifier and an optimizer that are in no table, as authors of packages write them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.optim import SGD, Optimizer

from raycl.methods.base import MethodConfig
from raycl.methods.finetune import Finetune
from raycl.methods.lora.inclora import IncLora, IncLoraSettings
from raycl.methods.modifier import GradientModifier, ModifierConfig
from raycl.routing.router import Need, Owners, Router
from raycl.routing.sentence_encoder import SentenceEncoder
from raycl.training.optimizers.base import Group, OptimizerKind, ParameterSpec, StateTensor
from raycl.types import Batch, Mixture, Phase, RouterState


class ToyConfig(MethodConfig):
    """All weights, as finetune."""

    name: Literal["toy-finetune"] = "toy-finetune"


class Toy(Finetune):
    """It keeps the contract."""

    Config: ClassVar[type[MethodConfig]] = ToyConfig


class Namesake(Finetune):
    """It has the name of another method, which a run would find in its place."""


class ForgetfulConfig(MethodConfig):
    """Counts steps."""

    name: Literal["forgetful"] = "forgetful"


class Forgetful(Finetune):
    """Its penalty depends on a number that no checkpoint has."""

    Config: ClassVar[type[MethodConfig]] = ForgetfulConfig
    calls = 0

    def penalty(self, batch: object, output: object) -> Tensor:
        """Grows from call to call."""
        self.calls += 1
        return self.calls * 1e-3 * next(iter(self.backbone.parameters())).square().mean()


class ScaleConfig(ModifierConfig):
    """Gradients times a factor."""

    name: Literal["toy-scale"] = "toy-scale"
    factor: float = Field(0.5, ge=0, description="what gradients are multiplied by")


class Scale(GradientModifier):
    """All gradients are scaled."""

    Config = ScaleConfig

    def begin_task(self, phase: Phase, only: bool, resumed: bool) -> None:
        """All trained parameters are changed."""
        trained = [name for name, parameter in self.method.backbone.named_parameters() if parameter.requires_grad]
        self.parameter_names = self.names = tuple(trained)

    def __call__(self, name: str, gradient: Tensor) -> Tensor:
        """Return the scaled gradient."""
        return gradient.mul_(self.config.factor)


class Nesterov(OptimizerKind):
    """Gradient descent with Nesterov's momentum."""

    def build(self, groups: list[Group]) -> Optimizer:
        """Torch's."""
        return SGD(groups, lr=self.train.learning_rate, momentum=0.9, nesterov=True)

    def state(self, parameter: ParameterSpec) -> dict[str, StateTensor]:
        """Return the running sum of gradients."""
        return {"momentum_buffer": StateTensor(tuple(parameter.shape))}


class LengthRouter(Router):
    """A text goes to an adapter by its number of words."""

    needs: ClassVar[frozenset[Need]] = frozenset({"text"})
    chooses = True

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)

    @classmethod
    def restored(cls, state: RouterState, owners: Owners, encoders: Sequence[SentenceEncoder] = ()) -> LengthRouter:
        """Over the adapters that are left."""
        return cls([name for name in state.settings["order"] if name in owners])

    def route(self, texts: Sequence[str], tasks: Sequence[str] | None) -> Mixture:
        """One-hot."""
        columns = torch.tensor([len(text.split()) % len(self.names) for text in texts])
        return Mixture(self.names, torch.nn.functional.one_hot(columns, len(self.names)).float())


class ByLengthConfig(IncLoraSettings):
    """A LoRA for each task, chosen by the length of a text."""

    name: Literal["by-length"] = "by-length"


class ByLength(IncLora):
    """It reads no texts in training, and its router does."""

    Config: ClassVar[type[MethodConfig]] = ByLengthConfig

    def route(self, batch: Batch) -> Mixture:
        """The adapter that is trained."""
        return Mixture.same({self._task: 1.0}, len(batch))

    def _router(self) -> RouterState:
        return RouterState("length", {"order": list(self._learned)})
