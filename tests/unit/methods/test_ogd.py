"""OGD: the basis and the projection by hand, and what they change in training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from phases import begin_phase, end_phase
from tiny import ENGINES, KINDS, Lab, exported, matrix, run, trace
from torch import Tensor

from raycl.errors import ConfigError
from raycl.methods.gradients.ogd import Ogd, OgdConfig, grown, outside
from raycl.storage import Storage
from raycl.training.assembly import build
from raycl.training.setup.checks import check
from raycl.training.workers.distributed import DistributedContext

WORLD = DistributedContext.alone(torch.device("cpu"))
OGD = {"name": "ogd", "rows": 5}


def named(*vectors: list[float]) -> dict[str, Tensor]:
    """Vectors of three entries, whose first is a parameter of its own: all is about the whole vector."""
    whole = torch.tensor(vectors)
    return {"a": whole[:, :1], "b": whole[:, 1:].reshape(-1, 1, 2)}


def one(vector: list[float]) -> dict[str, Tensor]:
    return {name: rows[0] for name, rows in named(vector).items()}


def joined(parts: dict[str, Tensor]) -> Tensor:
    """Return `[K, 3]` or `[3]`."""
    return torch.cat([parts["a"], parts["b"].squeeze(-2)], dim=-1)


def test_the_basis_is_orthonormal_and_duplicates_add_nothing() -> None:
    first = grown({}, named([3.0, 0.0, 4.0], [6.0, 0.0, 8.0], [0.0, 2.0, 0.0]))
    assert joined(first).flatten().tolist() == pytest.approx([0.6, 0, 0.8, 0, 1, 0])
    both = grown(first, named([1.0, 5.0, 0.0], [3.0, 7.0, 4.0]))
    assert joined(both).shape == (3, 3)
    assert torch.allclose(joined(both) @ joined(both).T, torch.eye(3), atol=1e-6)
    assert torch.equal(joined(both)[:2], joined(first)), "earlier columns stay as they are"
    assert joined(grown(both, named([1.0, 2.0, 3.0], [0.0, 0.0, 0.0]))).shape == (3, 3), "it spans everything"


def test_the_projection() -> None:
    basis = grown({}, named([3.0, 0.0, 4.0]))
    left = outside(one([1.0, 2.0, 3.0]), basis)
    assert joined(left).tolist() == pytest.approx([1 - 0.6 * 3, 2, 3 - 0.8 * 3])
    assert float(joined(basis)[0] @ joined(left)) == pytest.approx(0, abs=1e-6)
    assert joined(outside(left, basis)).tolist() == pytest.approx(joined(left).tolist()), "idempotent"
    assert joined(outside(one([-6.0, 0.0, -8.0]), basis)).tolist() == pytest.approx([0, 0, 0], abs=1e-6)
    assert joined(outside(one([1.0, 2.0, 3.0]), {})).tolist() == [1, 2, 3]


def test_many_nearly_parallel_gradients_stay_orthonormal() -> None:
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(1, 500, generator=draw) + 1e-3 * torch.randn(40, 500, generator=draw)
    columns = grown({}, {"p": torch.cat([rows, 3 * rows])})["p"]
    assert columns.shape == (40, 500), "duplicates add none, whatever rounding leaves of them"
    assert torch.allclose(columns @ columns.T, torch.eye(40), atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_along_what_is_left_keeps_the_outputs_of_stored_rows(lab: Lab, kind: str) -> None:
    """To first order, the true logits of the first task's rows move by far less than along the gradient itself."""
    context, _ = build(lab.config(kind, {"name": "ogd", "rows": 100, "learner": "finetune"}), WORLD)
    method, backbone = context.method, context.backbone
    assert isinstance(method, Ogd)
    first = begin_phase(context, 0)
    end_phase(context, first)
    assert all(len(columns) == len(next(iter(method._basis.values()))) for columns in method._basis.values())
    second = begin_phase(context, 1)
    if kind == "bert":
        assert backbone.head is not None and backbone.head.labels == ["blue", "red", "cat", "dog"]
        assert method._basis["head.weight"].shape[1] == 4 and not bool(method._basis["head.weight"][:, 2:].any())
    gradients = second.gradients([(context.stream.tasks[1], second.stored_rows(context.stream.tasks[1]))])
    left = method.transform_gradients(gradients)
    batch = first._collate([(context.stream.tasks[0], first.stored_rows(context.stream.tasks[0]))])(range_of(14), 14)
    own = dict(backbone.named_parameters())

    @torch.no_grad()
    def moved(by: dict[str, Tensor]) -> float:
        """Return the change of the summed logits for a step of length 0.002."""
        size = 0.002 / torch.cat([value.flatten() for value in by.values()]).norm()
        before = backbone.true_logits(batch)
        for name, value in by.items():
            own[name] -= size * value
        after = backbone.true_logits(batch)
        for name, value in by.items():
            own[name] += size * value
        return abs(float(after - before))

    assert moved(left) < moved(gradients) / 5 and joined_norm(left) > 0.05 * joined_norm(gradients)


def range_of(count: int) -> Any:
    return torch.arange(count).numpy()


def joined_norm(gradients: dict[str, Tensor]) -> float:
    return float(torch.cat([value.flatten() for value in gradients.values()]).norm())


def finished(lab: Lab, folder: Path, method: Any, **sections: Any) -> Storage:
    storage = Storage.at(folder)
    run(lab.config("bert", method, **sections), storage)
    return storage


def test_one_task_is_the_learners_own_bit_for_bit(lab: Lab, tmp_path: Path) -> None:
    item = {"stream": {"tasks": lab.tasks[:1]}}
    plain, result = (finished(lab, tmp_path / str(n), m, **item) for n, m in enumerate(("lora", OGD)))
    assert trace(result) == trace(plain) and matrix(result) == matrix(plain) and exported(result) == exported(plain)


@pytest.mark.parametrize("learner", ["lora", "l2p"])
def test_every_step_is_orthogonal_to_the_basis(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, learner: str
) -> None:
    """Gradients in each step of the second task are orthogonal to it; under SGD weights move in no other direction."""
    shares: list[float] = []
    transform = Ogd.transform_gradients

    def observed(method: Ogd, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        used, basis = transform(method, gradients), method._basis
        if basis:
            along = sum(basis[name].flatten(1) @ used[name].flatten() for name in basis)
            assert isinstance(along, Tensor) and len(along) == 5
            shares.append(float(along.norm()) / joined_norm({name: used[name] for name in basis}))
        return used

    monkeypatch.setattr(Ogd, "transform_gradients", observed)
    finished(lab, tmp_path, {**OGD, "learner": learner}, train={"optimizer": "sgd", "learning_rate": 0.1})
    assert len(shares) == 4 and max(shares) < 1e-5


def test_what_it_cannot_work_with_is_refused(lab: Lab) -> None:
    for engine in ("zero3", "fsdp"):
        with pytest.raises(ConfigError, match=r"method 'ogd' computes gradients of its own, which engine"):
            check(lab.config("bert", "ogd", ENGINES[engine]))


def test_the_first_phase_depends_on_the_rows() -> None:
    """They are measured at its end."""
    assert OgdConfig(rows=2).cache_key(0, ("a", "b")) != OgdConfig(rows=3).cache_key(0, ("a", "b"))
    assert not OgdConfig().rereads_rows
