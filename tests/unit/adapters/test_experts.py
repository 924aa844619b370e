"""LoRA on the parameters that experts share (`target_parameters`): beside PEFT, in mixtures, and in PEFT's folder."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from axes import sampled
from peft import LoraConfig as PeftConfig
from peft import PeftModel, get_peft_model
from tiny import save_model
from torch import Tensor
from transformers import AutoModelForCausalLM, GptOssConfig, MixtralConfig, NemotronHConfig, Qwen3MoeConfig

from raycl.adapters import AdapterStack
from raycl.adapters.card import CardMetadata
from raycl.adapters.experts import expert_names
from raycl.adapters.state import combine, fold
from raycl.backbone import BackboneConfig
from raycl.backbone.codec import capabilities_of
from raycl.bank import Bank
from raycl.errors import AdapterError, BackboneError, ConfigError
from raycl.methods.registry import method_config
from raycl.methods.single_adapter import LoraConfig
from raycl.operations.banks.exchange import export_merged, export_peft, import_peft, read_peft
from raycl.operations.banks.vllm import of_one_rank
from raycl.types import AdapterState, Mixture

IDS = torch.tensor([[4, 5, 6, 7, 8, 9], [5, 4, 9, 9, 6, 7], [8, 8, 4, 5, 5, 6]])
SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}
ONE = {**SMALL, "num_key_value_heads": 1, "head_dim": 8, "num_experts_per_tok": 2, "initializer_range": 0.3}
MODELS: dict[str, Any] = {
    "mixtral": MixtralConfig(**ONE, num_local_experts=4),
    "qwen3": Qwen3MoeConfig(**ONE, num_experts=5, moe_intermediate_size=12, decoder_sparse_step=1),
    "gpt-oss": GptOssConfig(**ONE, num_local_experts=3, layer_types=["full_attention"] * 2),  # transposed, with biases
    "nemotron": NemotronHConfig(
        **ONE, layers_block_type=["attention", "moe"], n_routed_experts=4, moe_intermediate_size=12, mamba_num_heads=2
    ),  # no gate
}
NAMES = ["experts.up_proj", "experts.gate_up_proj", "experts.down_proj"]


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random mixture-of-experts model beside a tokenizer."""
    where = save_model("llama", tmp_path_factory.mktemp("model") / str(request.param))
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(MODELS[request.param]).save_pretrained(where)
    return where


def loaded(folder: Path) -> Any:
    """Return the model as it was saved; it is read once."""
    return copy.deepcopy(_loaded(folder))


@cache
def _loaded(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        result: Tensor = model(input_ids=IDS).logits
    return result


def names_of(folder: Path) -> list[str]:
    model = loaded(folder)
    return [name for name in NAMES if any(path.endswith(name) for path, _ in model.named_parameters())]


def by_peft(folder: Path, seed: int = 0, **settings: Any) -> Any:
    """Return PEFT's model with random values."""
    torch.manual_seed(seed)
    given = {"r": 3, "lora_alpha": 6, "target_modules": ["q_proj"], "target_parameters": names_of(folder), **settings}
    model = get_peft_model(loaded(folder), PeftConfig(**given)).eval()
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def adapter(folder: Path, tmp_path: Path, seed: int = 0, **settings: Any) -> tuple[AdapterState, Tensor]:
    """Return an adapter that PEFT wrote, read by raycl, and PEFT's logits."""
    model = by_peft(folder, seed, **settings)
    model.save_pretrained(str(tmp_path / f"theirs{seed}"))
    state, _ = read_peft(tmp_path / f"theirs{seed}", "guest", BackboneConfig(name=str(folder)))
    return state, logits(model)


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rslora, experts alone": {"use_rslora": True, "target_modules": []},
    "patterns": {"rank_pattern": {"experts.down_proj": 2}, "alpha_pattern": {"experts.down_proj": 7}},
    "one parameter": {"target_parameters": ["experts.down_proj"]},
}


@pytest.mark.parametrize(
    ("folder", "name"), sampled([(model, name) for model in MODELS for name in SETTINGS]), indirect=["folder"]
)
def test_an_adapter_of_peft_comes_in_and_goes_out_with_equal_logits(folder: Path, tmp_path: Path, name: str) -> None:
    state, expected = adapter(folder, tmp_path, **SETTINGS[name])
    close = {"atol": 1e-4, "rtol": 1e-4}
    assert (logits(loaded(folder)) - expected).abs().max() > 0.1
    stack = AdapterStack(model := loaded(folder), list(state.linears))
    plain = logits(model)
    torch.testing.assert_close(plain, logits(loaded(folder)))
    stack.load("guest", state)
    with stack.activate(Mixture.same({"guest": 1.0}, 3)):
        torch.testing.assert_close(logits(model), expected, **close)
    stack.detach()
    assert torch.equal(logits(model), logits(loaded(folder)))
    assert [path for path, _ in model.named_modules()] == [path for path, _ in loaded(folder).named_modules()]
    fold(merged := loaded(folder), state)
    torch.testing.assert_close(logits(merged), expected, **close)
    card = CardMetadata("decoder", capabilities_of("decoder"), str(folder))
    export_peft(state, card, str(tmp_path / "ours"))
    again = PeftModel.from_pretrained(loaded(folder), str(tmp_path / "ours")).eval()
    torch.testing.assert_close(logits(again), expected, **close)
    export_merged(state, card, BackboneConfig(name=str(folder)), str(tmp_path / "merged"))
    whole, report = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not any(report.values())
    torch.testing.assert_close(logits(whole.eval()), expected, **close)


def test_gradients_are_those_of_peft(folder: Path, tmp_path: Path) -> None:
    """Equal values give equal outputs and gradients, without the gradient of a whole stack of experts."""
    theirs = by_peft(folder)
    theirs.save_pretrained(str(tmp_path / "theirs"))
    state, _ = read_peft(tmp_path / "theirs", "guest", BackboneConfig(name=str(folder)))
    config = LoraConfig(r=3, lora_alpha=6, target_modules=("q_proj",), target_parameters=tuple(names_of(folder)))
    model = loaded(folder).requires_grad_(False)
    stack = AdapterStack(model, config.adapted(model))
    config.begin_training(stack, ["lora"])
    assert set(stack.layers) == set(state.linears)
    linears = {path: (a, b / config.scaling) for path, (a, b) in state.linears.items()}
    stack.fill({"lora": AdapterState(linears, config.scaling)})
    with stack.activate(Mixture.same({"lora": 1.0}, 3)):
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
    expected = theirs(input_ids=IDS, labels=IDS).loss
    expected.backward()
    torch.testing.assert_close(loss, expected)
    for parameter in theirs.parameters():
        if parameter.grad is not None:
            parameter.data = parameter.grad
    theirs.save_pretrained(str(tmp_path / "gradients"))
    gradients, _ = read_peft(tmp_path / "gradients", "guest", BackboneConfig(name=str(folder)))
    for path, layer in stack.layers.items():
        low, high = layer.lora_A, layer.lora_B
        assert low is not None and high is not None and low.grad is not None and high.grad is not None
        torch.testing.assert_close(low.grad, gradients.linears[path][0], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(high.grad * config.scaling, gradients.linears[path][1], atol=1e-5, rtol=1e-4)


def test_each_row_has_its_own_mixture(folder: Path, tmp_path: Path) -> None:
    states = {name: adapter(folder, tmp_path, seed, r=2 + seed)[0] for seed, name in enumerate(("one", "two"))}
    rows = [{"one": 1.0, "two": 0.0}, {"one": 0.3, "two": -0.6}, {"one": 0.0, "two": 0.0}]
    weights = torch.tensor([list(row.values()) for row in rows])
    stack = AdapterStack(model := loaded(folder), list(states["one"].linears))
    for name, state in states.items():
        stack.load(name, state)
    with stack.activate(Mixture(("one", "two"), weights)):
        result = logits(model)
    order = torch.tensor([[0, 0, 0, 2, 2, 2], [1, 1, 1, 1, 1, 1], [2, 2, 2, 2, 2, 2]])
    with stack.activate(Mixture(("one", "two"), weights), examples=order):
        torch.testing.assert_close(logits(model)[1:], result[1:], atol=1e-5, rtol=1e-5)
    for number, row in enumerate(rows):
        fold(merged := loaded(folder), combine(row, states))
        torch.testing.assert_close(result[number], logits(merged)[number], atol=1e-4, rtol=1e-4)


def test_it_is_published_and_imported(folder: Path, tmp_path: Path) -> None:
    expected, _ = adapter(folder, tmp_path)
    bank = Bank.at(tmp_path / "bank")
    manifest = import_peft(bank, str(tmp_path / "theirs0"), "guest", BackboneConfig(name=str(folder)), ["chat"])
    state = bank.fetch(manifest)
    assert manifest.rank == 3 and state.linears.keys() == expected.linears.keys()
    assert all(torch.equal(state.linears[path][1], pair[1]) for path, pair in expected.linears.items())
    with pytest.raises(AdapterError, match=r"adapts experts \(target_parameters\), and vLLM and llama\.cpp serve"):
        of_one_rank(state)
    path = next(path for path in state.linears if path.endswith("[1]"))
    without = AdapterState({name: pair for name, pair in state.linears.items() if name != path})
    card = CardMetadata("decoder", capabilities_of("decoder"), str(folder))
    with pytest.raises(AdapterError, match=r"experts of '.*_proj': expected all, with one rank"):
        export_peft(without, card, str(tmp_path / "part"))


def test_what_is_no_experts_parameter_is_one_sentence(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(
        BackboneError, match=r"'gate.weight' names no parameter that experts share: expected the end of"
    ):
        expert_names(loaded(folder), ["gate.weight"])
    with pytest.raises(ConfigError, match="target_parameters is not supported by this method: expected some of"):
        method_config({"name": "inflora", "target_parameters": ["experts.down_proj"]})
    with pytest.raises(ConfigError, match="use_dora and target_parameters are not supported together"):
        method_config({"name": "lora", "use_dora": True, "target_parameters": ["experts.down_proj"]})
    with pytest.raises(ConfigError, match="target_modules is empty: expected one linear or more, or target_parameters"):
        method_config({"name": "lora", "target_modules": []})
    llama = save_model("llama", tmp_path / "llama")
    with pytest.raises(BackboneError, match="LlamaForCausalLM has none: name linears in target_modules"):
        expert_names(loaded(llama), ["experts.down_proj"])
