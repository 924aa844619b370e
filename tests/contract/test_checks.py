"""The checks for authors of packages pass on raycl's own classes and on others, and fail where a rule is broken."""

from __future__ import annotations

import pytest
from toy_plugins import ByLength, Forgetful, LengthRouter, Namesake, Nesterov, Scale, Toy

from raycl.methods.lora.inclora import IncLora
from raycl.routing.router import Router
from raycl.routing.routers import SumRouter, TaskRouter
from raycl.testing import check_method, check_modifier, check_optimizer, check_router
from raycl.testing.checks import installed
from raycl.types import Mixture, RouterState

OWNERS = {"a": ("a",), "b": ("b",)}


class Alternating(SumRouter):
    """The weight depends on where in the batch a text stands."""

    def route(self, texts: object, tasks: object) -> Mixture:
        mixture = super().route(texts, tasks)  # type: ignore[arg-type]
        mixture.weights[1:] = 0.5
        return mixture


@pytest.mark.parametrize(("method", "kind"), [(Toy, "llama"), (IncLora, "bert")])
def test_methods_that_keep_the_contract_pass(method: type, kind: str) -> None:
    check_method(method, kinds=(kind,))


def test_a_router_that_reads_texts_gets_them_though_its_method_reads_none() -> None:
    with installed("router", "length", LengthRouter):
        check_method(ByLength, kinds=("t5",))


def test_a_method_that_forgets_its_state_fails() -> None:
    with pytest.raises(AssertionError, match="losses, gradient norms or rates differ: is all that shapes"):
        check_method(Forgetful, kinds=("bert",))


def test_a_method_with_the_name_of_another_one_fails() -> None:
    with pytest.raises(AssertionError, match=r"method 'finetune' is raycl.*, not toy_plugins:Namesake: rename yours"):
        check_method(Namesake)


def test_modifiers_and_optimizers_pass() -> None:
    check_modifier(Scale, methods=("lora",), kinds=("bert",))
    check_optimizer(Nesterov, "toy-nesterov", methods=("lora",))


def test_a_modifier_that_changes_nothing_fails() -> None:
    with pytest.raises(AssertionError, match="modifier 'toy-scale' changes nothing on bert with lora"):
        check_modifier(Scale, {"factor": 1.0}, methods=("lora",), kinds=("bert",))


@pytest.mark.parametrize("router", [SumRouter, TaskRouter])
def test_routers_pass(router: type[Router]) -> None:
    check_router(router, {SumRouter: "sum", TaskRouter: "task"}[router], RouterState(""), OWNERS)


def test_a_router_that_looks_at_the_batch_fails() -> None:
    with pytest.raises(AssertionError, match="alone has other weights than in a batch"):
        check_router(Alternating, "alternating", RouterState(""), OWNERS)
