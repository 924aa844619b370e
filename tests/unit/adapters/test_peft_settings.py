"""The settings of a LoRA are PEFT's: the same start, the same training, and the same adapter in PEFT's folder."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import PeftModel, get_peft_model
from tiny import ENGINES, Lab, save_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from raycl.adapters import AdapterStack
from raycl.adapters.card import CardMetadata
from raycl.adapters.rows import StaticRows
from raycl.adapters.state import combine, fold
from raycl.backbone import BackboneConfig
from raycl.backbone.codec import capabilities_of
from raycl.backbone.roles import linear_names
from raycl.errors import AdapterError, BackboneError, ConfigError
from raycl.methods.registry import method_config
from raycl.methods.single_adapter import LoraConfig
from raycl.operations.banks.exchange import export_peft, read_peft
from raycl.training.setup.checks import check
from raycl.types import AdapterState, Mixture

IDS = torch.tensor([[4, 5, 6, 7, 8, 9], [5, 4, 9, 9, 6, 7]])
SETTINGS: dict[str, dict[str, Any]] = {
    "rslora": {"use_rslora": True},
    "gaussian": {"init_lora_weights": "gaussian"},
    "patterns": {
        "rank_pattern": {r"layers\.0\..*q_proj": 5, "v_proj": 2, "q_proj": 4},
        "alpha_pattern": {"k_proj": 1, r"layers\.1\.self_attn\.v_proj": 11},
    },
    "patterns and rslora": {
        "rank_pattern": {"self_attn|v_proj": 2},
        "alpha_pattern": {"q_proj": 3},
        "use_rslora": True,
    },
    "dora": {"use_dora": True},
    "dora and rslora": {"use_dora": True, "use_rslora": True, "rank_pattern": {"v_proj": 2}},
    "copies": {"modules_to_save": ["lm_head", "embed_tokens"]},
    "copies and dora": {"modules_to_save": ["lm_head"], "use_dora": True},
    "pissa": {"init_lora_weights": "pissa", "alpha_pattern": {"v_proj": 11}},
    "olora": {"init_lora_weights": "olora", "rank_pattern": {"v_proj": 2}},
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("llama", tmp_path_factory.mktemp("model") / "llama")


def loaded(llama: Path) -> Any:
    """Return the model as it was saved; it is read once."""
    return copy.deepcopy(_loaded(llama))


@cache
def _loaded(llama: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(llama).eval()


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        result: Tensor = model(input_ids=IDS).logits
    return result


def config_of(**settings: Any) -> LoraConfig:
    paths = ("q_proj", "k_proj", "v_proj")
    return LoraConfig(**{"r": 3, "lora_alpha": 6, "target_modules": paths, **settings})


def train(model: Any, parameters: list[nn.Parameter]) -> None:
    optimizer = torch.optim.SGD(parameters, lr=0.5)
    for _ in range(4):
        model(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def trained_by_peft(llama: Path, settings: dict[str, Any]) -> Any:
    config = config_of()
    torch.manual_seed(0)
    made = PeftConfig(r=config.r, lora_alpha=6, target_modules=list(config.target_modules), **settings)
    model = get_peft_model(loaded(llama), made)
    assert torch.allclose(logits(model.eval()), logits(loaded(llama)), atol=1e-5)
    train(model, [parameter for parameter in model.parameters() if parameter.requires_grad])
    return model


def trained(llama: Path, settings: dict[str, Any]) -> tuple[AdapterState, Tensor]:
    """Return the adapter that these settings train, and the logits in training."""
    model, config = loaded(llama).requires_grad_(False), config_of(**settings)
    stack = AdapterStack(model, linear_names(model, config.target_modules))
    torch.manual_seed(0)
    config.begin_training(stack, ["lora"])
    with stack.activate(Mixture.same({"lora": 1.0}, 2)):
        torch.testing.assert_close(logits(model), logits(loaded(llama)), atol=1e-5, rtol=1e-5)
        train(model, [parameter for parameter in model.parameters() if parameter.requires_grad])
        result = logits(model)
    values = {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    return stack.trainable_states(values)["lora"], result


@pytest.mark.parametrize("name", SETTINGS)
def test_training_and_the_exported_adapter_are_those_of_peft(llama: Path, tmp_path: Path, name: str) -> None:
    expected = logits(trained_by_peft(llama, SETTINGS[name]))
    assert not torch.allclose(expected, logits(loaded(llama)), atol=1e-2)
    state, in_training = trained(llama, SETTINGS[name])
    close = {"atol": 1e-4, "rtol": 1e-4}
    torch.testing.assert_close(in_training, expected, **close)
    stack = AdapterStack(model := loaded(llama), list(state.linears))
    stack.copy_modules(list(state.copies))
    stack.load("lora", state)
    with stack.activate(Mixture.same({"lora": 1.0}, 2)):
        torch.testing.assert_close(logits(model), expected, **close)
    fold(merged := loaded(llama), state)
    torch.testing.assert_close(logits(merged), expected, **close)
    card = CardMetadata("decoder", capabilities_of("decoder"), str(llama))
    export_peft(state, card, str(tmp_path / "ours"))
    again = PeftModel.from_pretrained(loaded(llama), str(tmp_path / "ours")).eval()
    torch.testing.assert_close(logits(again), expected, **close)
    read, _ = read_peft(tmp_path / "ours", "lora", BackboneConfig(name=str(llama)))
    fold(merged := loaded(llama), read)
    torch.testing.assert_close(logits(merged), expected, **close)


@pytest.mark.parametrize("start", ["pissa", "olora"])
def test_a_start_that_peft_converted_is_imported(llama: Path, tmp_path: Path, start: str) -> None:
    model = trained_by_peft(llama, {"init_lora_weights": start})
    config = PeftConfig(r=3, lora_alpha=6, target_modules=list(config_of().target_modules), init_lora_weights=start)
    first = get_peft_model(loaded(llama), config)
    first.peft_config["default"].init_lora_weights = True
    first.save_pretrained(str(tmp_path / "first"))
    folder = tmp_path / "converted"
    model.save_pretrained(str(folder), path_initial_model_for_weight_conversion=str(tmp_path / "first"))
    read, _ = read_peft(folder, "lora", BackboneConfig(name=str(llama)))
    fold(merged := loaded(llama), read)
    torch.testing.assert_close(logits(merged), logits(model), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["dora", "copies", "copies and dora"])
def test_what_is_no_sum_is_used_alone(llama: Path, name: str) -> None:
    state, expected = trained(llama, SETTINGS[name])
    plain, _ = trained(llama, {})
    stack = AdapterStack(model := loaded(llama), list(state.linears))
    stack.copy_modules(list(state.copies))
    stack.load("dora", state)
    stack.load("plain", plain)
    mixture = Mixture(("dora", "plain"), torch.tensor([[1.0, 0.0], [0.0, 0.5]]))
    with stack.activate(mixture):  # each example of a batch has its own
        result = logits(model)
    torch.testing.assert_close(result[0], expected[0], atol=1e-5, rtol=1e-5)
    with stack.activate(Mixture.same({"plain": 0.5}, 2)):
        torch.testing.assert_close(result[1], logits(model)[1], atol=1e-5, rtol=1e-5)
    copying = [name for name, state in stack.states.items() if state.copies]
    with stack.activate(mixture, static=StaticRows(stack.pool, 8, 2, list(stack.layers), copying)):
        torch.testing.assert_close(logits(model), result, atol=1e-5, rtol=1e-5)
    for weights in ({"dora": 0.5}, {"dora": 1.0, "plain": 0.5}):
        with pytest.raises(AdapterError, match=r"'dora' is a DoRA .* expected it alone with weight 1"):
            stack.activate(Mixture.same(weights, 2)).__enter__()
        with pytest.raises(AdapterError, match="'dora' is a DoRA"):
            combine(weights, {"dora": state, "plain": plain})


@pytest.mark.parametrize(
    ("method", "settings", "said"),
    [
        ("sapt", {"use_dora": True}, "use_dora is not supported by this method: expected some of use_rslora, rank"),
        ("olora", {"rank_pattern": {"query": 4}}, "rank_pattern is not supported"),
        ("inflora", {"init_lora_weights": "gaussian"}, "init_lora_weights=gaussian is not supported"),
        ("inclora", {"init_lora_weights": "pissa"}, "init_lora_weights=pissa is not supported"),
        ("lora", {"init_lora_weights": "pissa", "use_dora": True}, "are not supported together"),
        ("sapt", {"modules_to_save": ["lm_head"]}, "modules_to_save is not supported by this method"),
        ("lora", {"layers_to_transform": [0]}, "layers_to_transform is not supported: "),
        ("lora", {"init_lora_weights": "eva"}, "init_lora_weights"),
        ("lora", {"rank_pattern": {"query": 0}}, "rank_pattern"),
    ],
)
def test_what_a_method_cannot_train_is_one_sentence(method: str, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        method_config({"name": method, **settings})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"rank_pattern": {"w_proj": 2}}, "target 'w_proj' matches no linear"),
        ({"modules_to_save": ["head"]}, "no module is called 'head': expected lm_head, model.embed_tokens"),
        ({"modules_to_save": ["q_proj"]}, "'model.layers.0.self_attn.q_proj' is a StackedLora: expected an embedding"),
        ({"init_lora_weights": "olora", "r": 4096}, "init_lora_weights=olora has r=4096 on a weight of rank"),
    ],
)
def test_settings_that_do_not_fit_the_backbone_are_one_sentence(
    llama: Path, settings: dict[str, Any], said: str
) -> None:
    config = config_of(**settings)
    model = loaded(llama)
    stack = AdapterStack(model, linear_names(model, config.target_modules))
    with pytest.raises(BackboneError, match=said):
        config.begin_training(stack, ["lora"])


@pytest.mark.parametrize("engine", ["zero3", "fsdp"])
@pytest.mark.parametrize("settings", [{"use_dora": True}, {"init_lora_weights": "olora"}])
def test_engines_that_shard_the_backbone_are_refused(lab: Lab, settings: dict[str, Any], engine: str) -> None:
    with pytest.raises(
        ConfigError,
        match=r"method 'lora' reads the backbone's weights \(use_dora, init_lora_weights, target_parameters\)",
    ):
        check(lab.config("llama", {"name": "lora", **settings}, ENGINES[engine]))
