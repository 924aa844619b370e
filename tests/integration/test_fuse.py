"""`raycl bank fuse`: one adapter out of those of all tasks, with PEFT's numbers, which is served and scored."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import Complete, Taught, opened
from torch import Tensor, nn

from raycl.bank import Bank
from raycl.bank.branches import head_of
from raycl.cli import main as cli
from raycl.errors import AdapterError, BankError
from raycl.operations.banks.fusion import FusionSettings, How, fuse, fused_state
from raycl.storage import Storage
from raycl.types import AdapterState


def states(count: int = 3, rank: int = 2, labels: bool = False) -> dict[str, AdapterState]:
    """Return adapters of one linear of random numbers."""
    draw = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw)

    made = {}
    for number in range(count):
        head: dict[str, Any] = {}
        if labels:
            head = {"labels": ("same", f"own{number}"), "head_weight": drawn(2, 4), "head_bias": drawn(2)}
        made[f"t{number}"] = AdapterState({"lin": (drawn(rank, 7), drawn(6, rank))}, 2.0, **head)
    return made


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(7, 6, bias=False)

    def forward(self, x: Tensor) -> Any:
        return self.lin(x)


def by_peft(held: dict[str, AdapterState], weights: dict[str, float], how: str, density: float, rank: int) -> Tensor:
    """Return the update that PEFT's `add_weighted_adapter` makes of the same LoRAs."""
    model: Any = None
    for name, state in held.items():
        config = LoraConfig(r=state.rank, lora_alpha=2 * state.rank, target_modules=["lin"])
        if model is None:
            model = get_peft_model(Plain(), config, adapter_name=name)
        else:
            model.add_adapter(name, config)
        layer = model.base_model.model.lin
        layer.lora_A[name].weight.data.copy_(state.linears["lin"][0])
        layer.lora_B[name].weight.data.copy_(state.linears["lin"][1])
    kinds = {"ties": "ties_svd", "dare": "dare_linear_svd"}
    torch.manual_seed(0)
    model.add_weighted_adapter(
        list(held), list(weights.values()), "fused", kinds.get(how, "svd"), svd_rank=rank, density=density
    )
    delta: Tensor = model.base_model.model.lin.get_delta_weight("fused")
    return delta.detach()


@pytest.mark.parametrize("how", get_args(How))
@pytest.mark.parametrize("rank", [2, 6])
def test_updates_are_pefts(monkeypatch: pytest.MonkeyPatch, how: Any, rank: int) -> None:
    """Entries that DARE drops are the same ones on both sides: PEFT draws the starts of LoRAs before them."""
    calls: list[int] = []

    def drawn(p: Tensor) -> Tensor:
        calls.append(len(calls) % 3)
        return (torch.rand(p.shape, generator=torch.Generator().manual_seed(calls[-1])) < p).float()

    monkeypatch.setattr(torch, "bernoulli", drawn)
    held = states()
    settings = FusionSettings(how, density=0.4, rank=rank)
    weights = settings.weights({"t0": None, "t1": 0.7, "t2": None})
    assert weights["t1"] == 0.7 and weights["t0"] == (1.0 if how in ("arithmetic", "ties") else 1 / 3)
    state, lost = fused_state(held, weights, settings, is_summed=False)
    low, high = state.linears["lin"]
    expected = by_peft(held, weights, how, 0.4, rank)
    torch.testing.assert_close(high @ low, expected, atol=1e-5, rtol=1e-4)
    assert (lost < 1e-6) is (rank == 6) and state.rank == rank


@pytest.mark.parametrize("how", ["average", "arithmetic"])
def test_sums_are_exact_and_ranks_add_up(how: Any) -> None:
    held = states()
    settings = FusionSettings(how)
    weights = settings.weights(dict.fromkeys(held))
    state, lost = fused_state(held, weights, settings, is_summed=False)
    low, high = state.linears["lin"]
    expected = sum(weights[name] * 2 * b @ a for name, (a, b) in ((n, s.linears["lin"]) for n, s in held.items()))
    torch.testing.assert_close(high @ low, expected)
    assert state.rank == 6 and lost == 0


def test_label_rows_are_joined() -> None:
    held = states(labels=True)
    for is_summed in (False, True):
        state, _ = fused_state(held, dict.fromkeys(held, 1.0), FusionSettings("average"), is_summed)
        assert state.labels == ("same", "own0", "own1", "own2")
        assert state.head_weight is not None and state.head_bias is not None
        rows = torch.stack([other.head_weight[0] for other in held.values() if other.head_weight is not None])
        torch.testing.assert_close(state.head_weight[0], rows.sum(0) if is_summed else rows.mean(0))
        assert held["t2"].head_bias is not None
        assert torch.equal(state.head_bias[3], held["t2"].head_bias[1])


@pytest.mark.parametrize(("kind", "method"), [("llama", "inclora"), ("bert", "separate")])
def test_a_fused_snapshot_is_scored_and_answers(
    complete: Complete, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, method: str
) -> None:
    done = complete(kind, method, "torch")
    folder = tmp_path / "bank"
    copied = Storage.at(str(folder))
    source = done.storage.sub("bank")
    for path in Path(source.root).rglob("*"):
        if path.is_file():
            copied.write(str(path.relative_to(source.root)), path.read_bytes())
    assert cli.main(["bank", "fuse", str(folder), "--how", "ties", "--density", "0.5"]) == 0
    printed = capsys.readouterr().out
    assert "branch 'fused-ties' points at snapshot" in printed and "colour" in printed and "difference" in printed
    bank = Bank(copied)
    snapshot = head_of(bank, "fused-ties")
    (entry,) = snapshot.adapters
    assert entry.name == "fused-ties" and set(entry.tasks) == {"colour", "animal"}
    assert snapshot.router.kind == "single" and opened(bank, snapshot).router.route(["a"], None).names == (
        "fused-ties",
    )
    assert cli.main(["bank", "fuse", str(folder), "--how", "ties"]) == 1
    assert "branch 'fused-ties' points at snapshot" in capsys.readouterr().err
    assert cli.main(["bank", "fuse", str(folder), "--how", "dare", "--density", "0"]) == 1
    assert "--density is 0" in capsys.readouterr().err


def test_what_cannot_be_fused_is_said(taught: Taught, complete: Complete) -> None:
    done = taught("bert", "adapter")
    bank = Bank(done.storage.sub("bank"))
    snapshot = bank.newest()
    assert snapshot is not None
    with pytest.raises(BankError, match=r"has 1 adapter to fuse \(adapter\): expected two or more"):
        fuse(bank, snapshot, FusionSettings("ties"), {}, "fused")
    bottleneck = AdapterState(states()["t0"].linears, activation="relu")
    with pytest.raises(AdapterError, match="non-linear adapter is no weight increment"):
        fused_state({"a": bottleneck, "b": bottleneck}, {"a": 1.0, "b": 1.0}, FusionSettings("ties"), False)
    prompts = AdapterState(prompt=torch.zeros(2, 4))
    with pytest.raises(AdapterError, match="adapter 'a' is no LoRA"):
        fused_state({"a": prompts, "b": prompts}, {"a": 1.0, "b": 1.0}, FusionSettings("ties"), False)
