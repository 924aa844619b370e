"""Tasks of different sizes in one stack: each adapter has a rank and a scale of its own."""

from __future__ import annotations

from pathlib import Path

import torch
from test_sapt import WORLD, started
from tiny import Lab, run

from raycl.bank import Bank
from raycl.methods.sapt.sapt import Sapt
from raycl.storage import Storage
from raycl.training.assembly import build


def test_tasks_of_different_ranks_have_scales_of_their_own(lab: Lab, tmp_path: Path) -> None:
    """y = W h + sum_i alpha_i (32 / r_i) B_i A_i h, in training, after a restart, and in the bank."""
    ranks = {"r": 2, "r_by_task": {"animal": 5}}
    method, batch = started(lab, "llama", **ranks)
    assert (method.stack.states["colour"].scale, method.stack.trainable_scale) == (16.0, 6.4)
    path, layer = next(iter(method.stack.layers.items()))
    x = torch.randn(4, 3, layer.inputs, generator=torch.Generator().manual_seed(3))
    mixture = method.route(batch)
    with torch.no_grad(), method.stack.activate(mixture):
        result, bare = layer(x), layer.base(x)
    low, high = method.stack.states["colour"].linears[path]
    assert low.shape[0] == 2 and layer.lora_A is not None and layer.lora_B is not None and len(layer.lora_A) == 5
    by_name = dict(zip(mixture.names, mixture.weights.detach().unbind(1), strict=True))
    wanted = bare + by_name["colour"][:, None, None] * 16.0 * (x @ low.T @ high.T)
    wanted += by_name["animal"][:, None, None] * 6.4 * (x @ layer.lora_A.T @ layer.lora_B.T)
    torch.testing.assert_close(result, wanted, atol=1e-5, rtol=1e-4)
    values, tensors = method.state_dict()
    context, _ = build(lab.config("llama", {"name": "sapt", **ranks}), WORLD)
    context.method.load_state_dict(values, tensors)
    assert isinstance(context.method, Sapt)
    assert (context.method.stack.states["colour"].scale, context.method.stack.trainable_scale) == (16.0, 6.4)
    storage = Storage.at(tmp_path)
    run(lab.config("llama", {"name": "sapt", **ranks}), storage)
    newest = Bank(storage.sub("bank")).newest()
    assert newest is not None
    assert {adapter.name: (adapter.rank, adapter.scale) for adapter in newest.adapters} == {
        "colour": (2, 16.0),
        "animal": (5, 6.4),
    }
