"""The state of an adapter: checks against a model, mixtures as one adapter, folding into plain weights.

A mixture of LoRAs is one LoRA of the ranks added up, exactly: A's rows stand below each other, B's columns beside each
other. (Averaging A and B, or a truncated SVD, is 50-370 % off.)
"""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn

from raycl.adapters.experts import linear_at
from raycl.adapters.layer import adapted_norms, plain_weight
from raycl.errors import AdapterError
from raycl.progress import counted_off
from raycl.types import AdapterState, Mixture

Shapes = Mapping[str, tuple[int, int]]
"""Path of a linear -> inputs and outputs."""


NO_SUM = (
    "is a DoRA (use_dora) or has copies of modules (modules_to_save), which is no sum with others: expected it alone "
    "with weight 1"
)
"""The end of a message about such an adapter."""


def check_fits(name: str, state: AdapterState, shapes: Shapes) -> None:
    """Check that every linear of the adapter exists in the model and has its shape.

    Raises:
        AdapterError: a linear is missing or has another shape; the message names adapter, linear and shapes.
    """
    for path, (a, b) in state.linears.items():
        if path not in shapes:
            raise AdapterError(
                f"adapter '{name}' adapts '{path}', which is not among the {len(shapes)} linears with adapters here: "
                f"attach its targets too (here: {', '.join(list(shapes)[:3])}, ...)"
            )
        inputs, outputs = shapes[path]
        if a.dim() != 2 or b.dim() != 2 or a.shape[0] != b.shape[1]:
            raise AdapterError(
                f"adapter '{name}', '{path}': A {list(a.shape)} and B {list(b.shape)} do not make a LoRA"
            )
        if (a.shape[1], b.shape[0]) != (inputs, outputs):
            raise AdapterError(
                f"adapter '{name}', '{path}' maps {a.shape[1]} to {b.shape[0]} features, but the model's linear maps "
                f"{inputs} to {outputs}: it was made for another backbone"
            )
        norms = state.magnitudes.get(path, b[:, 0])
        if norms.shape != (outputs,) or not bool(torch.isfinite(norms).all()):
            raise AdapterError(
                f"adapter '{name}', '{path}' has magnitudes {list(norms.shape)}: expected {outputs} finite numbers"
            )
        if not (a.dtype.is_floating_point and bool(torch.isfinite(a).all()) and bool(torch.isfinite(b).all())):
            raise AdapterError(f"adapter '{name}', '{path}' holds values that are not finite numbers")


def check_copies(name: str, state: AdapterState, modules: Mapping[str, nn.Module]) -> None:
    """Check that every copied module exists in the model and has its shape.

    Args:
        modules: path -> module.

    Raises:
        AdapterError: a module is missing or has another shape.
    """
    for path, weight in state.copies.items():
        own = modules[path].weight if path in modules else None
        expected = list(own.shape) if isinstance(own, Tensor) else "no such module"
        if expected != list(weight.shape) or not bool(torch.isfinite(weight).all()):
            raise AdapterError(
                f"adapter '{name}' has a copy {list(weight.shape)} of '{path}', and the model has {expected}: expected "
                "finite numbers of the same shape"
            )


def check_alone(mixture: Mixture, names: Collection[str]) -> None:
    """Check that those of `names`, which have magnitudes, are each the only adapter of an example, with weight 1.

    Raises:
        AdapterError: one is not.
    """
    for column, name in enumerate(mixture.names):
        if name in names:
            weights_B, others_B = mixture.weights[:, column], (mixture.weights != 0).sum(1)
            if bool(((weights_B != 0) & ((weights_B != 1) | (others_B > 1))).any()):
                raise AdapterError(f"adapter '{name}' {NO_SUM}")


def check_increment(what: str, state: AdapterState) -> None:
    """Check that the adapter changes weights alone, so that it can be folded and written as a LoRA.

    Args:
        what: the adapter's name in the message.

    Raises:
        AdapterError: it has a non-linearity between A and B.
    """
    if state.activation:
        raise AdapterError(
            f"{what} has activation '{state.activation}' between A and B, expected none: a non-linear adapter is no "
            "weight increment and cannot be combined, folded or exported as a LoRA; answer with its snapshot instead"
        )


def combine(
    weights: Mapping[str, float], states: Mapping[str, AdapterState], head_rule: str = "probability"
) -> AdapterState:
    """Return a fixed mixture as one adapter of scale 1.

    Args:
        weights: adapter -> weight; zero leaves it out.
        head_rule: rule of the label heads (`raycl.adapters.head.Rule`); only `logit` and `sum` make several heads one
            linear head.

    Raises:
        AdapterError: parts that do not add up to one adapter: several label heads, soft prompts, non-linear adapters,
            DoRAs.
    """
    used = {name: weight for name, weight in weights.items() if weight != 0}
    for name in used:
        if states[name].is_alone:
            raise AdapterError(f"adapter '{name}' {NO_SUM}")
    with_prompt = [name for name in used if states[name].prompt is not None]
    if with_prompt and len(used) > 1:
        raise AdapterError(f"{', '.join(with_prompt)}: soft prompts cannot be put into one LoRA with other adapters")
    parts: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for name, weight in used.items():
        check_increment(f"adapter '{name}'", states[name])
        for path, (a, b) in states[name].linears.items():
            parts.setdefault(path, []).append((a.float(), b.float() * (weight * states[name].scale)))
    linears = {
        path: (torch.cat([a for a, _ in pairs]), torch.cat([b for _, b in pairs], dim=1))
        for path, pairs in parts.items()
    }
    heads = [name for name in used if states[name].labels]
    if heads and head_rule in ("logit", "sum"):
        prompt = states[with_prompt[0]].prompt if with_prompt else None
        of_heads = used if head_rule == "logit" else dict.fromkeys(used, 1.0)
        return AdapterState(linears, 1.0, prompt, *_summed_heads(of_heads, states))
    if len(heads) > 1:
        raise AdapterError(
            f"{', '.join(heads)} each bring a label head, and a mixture of heads is not one linear head: "
            "export one adapter, or leave the heads out"
        )
    if not heads:
        return AdapterState(linears, prompt=states[with_prompt[0]].prompt if with_prompt else None)
    state = states[heads[0]]
    return AdapterState(linears, 1.0, state.prompt, state.labels, state.head_weight, state.head_bias)


def _summed_heads(
    weights: Mapping[str, float], states: Mapping[str, AdapterState]
) -> tuple[tuple[str, ...], Tensor, Tensor]:
    """Return labels, weight `[C, D]` and bias `[C]` of the one head whose logits are the weighted sum of all."""
    with_head = {name: states[name] for name in weights if states[name].labels}
    labels = list(dict.fromkeys(label for state in with_head.values() for label in state.labels))
    width = next(state.head_weight.shape[1] for state in with_head.values() if state.head_weight is not None)
    weight, bias = torch.zeros(len(labels), width), torch.zeros(len(labels))
    for name, state in with_head.items():
        assert state.head_weight is not None and state.head_bias is not None
        rows = torch.tensor([labels.index(label) for label in state.labels])
        weight.index_add_(0, rows, state.head_weight.float(), alpha=weights[name])
        bias.index_add_(0, rows, state.head_bias.float(), alpha=weights[name])
    return tuple(labels), weight, bias


def fold(model: nn.Module, state: AdapterState) -> None:
    """Add `scale * B A` to the model's plain weights, in float32, and scale the rows that have magnitudes.

    No other layer may share a weight that it changes (`raycl.backbone.linears`).

    Raises:
        AdapterError: the adapter does not fit, or holds what no weight can (a prompt, a non-linearity).
    """
    if state.prompt is not None:
        raise AdapterError("a soft prompt cannot be folded into weights: export the adapter itself")
    check_increment("the adapter", state)
    check_copies("exported", state, dict(model.named_modules()))
    for path, copy in state.copies.items():
        weight = model.get_submodule(path).weight
        assert isinstance(weight, Tensor)
        weight.data.copy_(copy)
    for path, (a, b) in counted_off(state.linears.items(), "folding linears"):
        try:
            base = linear_at(model, path)
            weight = base.weight
        except AttributeError as error:
            raise AdapterError(
                f"the model has no linear '{path}': the adapter was made for another backbone"
            ) from error
        assert isinstance(weight, Tensor)
        delta = state.scale * (b.float() @ a.float())
        if path in state.magnitudes:
            norms = adapted_norms(base, a, b, state.scale)
            ratio = (state.magnitudes[path].to(norms) / norms)[:, None]
            delta = ratio * delta.to(norms.device) + (ratio - 1) * plain_weight(base)
        delta = delta if isinstance(base, nn.Linear) else delta.T
        if delta.shape != weight.shape:
            raise AdapterError(
                f"'{path}' has weights {list(weight.shape)}, the adapter's update is {list(delta.shape)}"
            )
        with torch.no_grad():
            weight.copy_(weight.float() + delta.to(weight.device))
