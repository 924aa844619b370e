"""`attention.query` means the same in every family, and a wrong target is answered with what there is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from raycl.backbone.roles import GROUPS, ROLES, is_linear, linear_names, without_role
from raycl.errors import BackboneError
from raycl.testing.tiny_models import tiny_model

BERT = "encoder.layer.{}."
EXPECTED = {
    "bert": {
        "attention.query": [BERT + "attention.self.query"],
        "attention.key": [BERT + "attention.self.key"],
        "attention.value": [BERT + "attention.self.value"],
        "attention.out": [BERT + "attention.output.dense"],
        "ffn": [BERT + "intermediate.dense", BERT + "output.dense"],
        "ffn.in": [BERT + "intermediate.dense"],
        "ffn.out": [BERT + "output.dense"],
    },
    "llama": {
        "attention.query": ["model.layers.{}.self_attn.q_proj"],
        "attention.key": ["model.layers.{}.self_attn.k_proj"],
        "attention.value": ["model.layers.{}.self_attn.v_proj"],
        "attention.out": ["model.layers.{}.self_attn.o_proj"],
        "ffn": [f"model.layers.{{}}.mlp.{name}_proj" for name in ("gate", "up", "down")],
        "ffn.in": [f"model.layers.{{}}.mlp.{name}_proj" for name in ("gate", "up")],
        "ffn.out": ["model.layers.{}.mlp.down_proj"],
    },
    "gpt2": {
        "attention.qkv": ["transformer.h.{}.attn.c_attn"],
        "attention.out": ["transformer.h.{}.attn.c_proj"],
        "ffn": ["transformer.h.{}.mlp.c_fc", "transformer.h.{}.mlp.c_proj"],
        "ffn.in": ["transformer.h.{}.mlp.c_fc"],
        "ffn.out": ["transformer.h.{}.mlp.c_proj"],
    },
}
T5 = [
    *(f"encoder.block.{layer}.layer.0.SelfAttention" for layer in range(2)),
    *(
        f"decoder.block.{layer}.layer.{layer_path}"
        for layer in range(2)
        for layer_path in ("0.SelfAttention", "1.EncDecAttention")
    ),
]
CASES = [
    *(
        (kind, role, [name.format(i) for i in range(2) for name in names])
        for kind in EXPECTED
        for role, names in EXPECTED[kind].items()
    ),
    *(("t5", f"attention.{role}", [f"{path}.{role[0]}" for path in T5]) for role in ("query", "key", "value", "out")),
    *(
        (
            "t5",
            role,
            [
                f"{side}.block.{i}.layer.{layer_path}.DenseReluDense.{name}"
                for side, layer_path in (("encoder", 1), ("decoder", 2))
                for i in range(2)
                for name in names
            ],
        )
        for role, names in (("ffn", ("wi", "wo")), ("ffn.in", ("wi",)), ("ffn.out", ("wo",)))
    ),
]


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    return {kind: tiny_model(kind, 20) for kind in ("bert", "t5", "llama", "gpt2")}


@pytest.mark.parametrize(("kind", "role", "names"), CASES)
def test_a_role_is_exactly_these_layers(models: dict[str, Any], kind: str, role: str, names: list[str]) -> None:
    assert sorted(linear_names(models[kind], [role])) == sorted(names)


@pytest.mark.parametrize("kind", ["bert", "t5", "llama", "gpt2"])
def test_a_kind_is_all_of_its_roles_and_no_layer_has_two_roles(models: dict[str, Any], kind: str) -> None:
    collected = {}
    for role in ROLES:
        try:
            collected[role] = set(linear_names(models[kind], [role]))
        except BackboneError:
            continue
    assert sum(map(len, collected.values())) == len(set().union(*collected.values()))
    for kind_of_role in GROUPS:
        mine = set().union(*(names for role, names in collected.items() if role.startswith(f"{kind_of_role}.")))
        assert set(linear_names(models[kind], [kind_of_role])) == mine


ONE = {"vocab_size": 20, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2}
BART = {f"{side}_{what}": 2 for side in ("encoder", "decoder") for what in ("layers", "attention_heads", "ffn_dim")}
NAMED: dict[str, tuple[Any, dict[str, Any]]] = {
    "phi": (AutoModelForCausalLM, ONE),
    "deepseek_v3": (AutoModelForCausalLM, {**ONE, "n_routed_experts": 8, "first_k_dense_replace": 2}),
    "gpt_neo": (AutoModelForCausalLM, {**ONE, "num_layers": 2, "attention_types": [[["global"], 2]]}),
    "mpt": (AutoModelForCausalLM, {"vocab_size": 20, "d_model": 8, "n_layers": 2, "n_heads": 2}),
    "gpt_neox": (AutoModelForCausalLM, ONE),
    "opt": (AutoModelForCausalLM, {**ONE, "ffn_dim": 12, "word_embed_proj_dim": 8}),
    "led": (AutoModelForSeq2SeqLM, {**BART, "vocab_size": 20, "d_model": 8}),
    "bart": (AutoModelForSeq2SeqLM, {**BART, "vocab_size": 20, "d_model": 8}),
    "albert": (AutoModel, {**ONE, "embedding_size": 8}),
    "deberta-v2": (AutoModel, ONE),
    "distilbert": (AutoModel, {"vocab_size": 20, "dim": 8, "hidden_dim": 12, "n_layers": 2, "n_heads": 2}),
    "modernbert": (AutoModel, {**ONE, "pad_token_id": 0}),
    "mpnet": (AutoModel, ONE),
    "xlm": (AutoModel, {"vocab_size": 20, "n_words": 20, "emb_dim": 8, "n_layers": 2, "n_heads": 2}),
}
"""Architecture -> its loader and sizes."""


@pytest.mark.parametrize("architecture", NAMED)
def test_every_linear_of_a_layer_has_one_role(architecture: str) -> None:
    loader, sizes = NAMED[architecture]
    with torch.device("meta"):
        model = loader.from_config(AutoConfig.for_model(architecture, **sizes))
    assert without_role(model) == []
    by_role = [set(names) for role in ROLES if (names := _found(model, role))]
    assert sum(map(len, by_role)) == len(set().union(*by_role)), "no linear has two"
    assert all(len(linear_names(model, [kind])) > 1 for kind in GROUPS)


def _found(model: Any, role: str) -> list[str]:
    try:
        return linear_names(model, [role])
    except BackboneError:
        return []


def test_linears_that_no_role_reaches_are_listed() -> None:
    with torch.device("meta"):
        mixtral = AutoModelForCausalLM.from_config(AutoConfig.for_model("mixtral", **ONE, num_local_experts=2))
        mamba = AutoModelForCausalLM.from_config(
            AutoConfig.for_model("mamba", vocab_size=20, hidden_size=8, num_hidden_layers=2)
        )
    assert without_role(mixtral) == [f"model.layers.*.mlp.experts.{name}_proj" for name in ("down", "gate_up")]
    assert without_role(mamba) == [f"backbone.layers.*.mixer.{name}_proj" for name in ("dt", "in", "out", "x")]


def test_regular_expressions_choose_by_the_end_of_the_path(models: dict[str, Any]) -> None:
    assert linear_names(models["bert"], [r"layer\.1\..*query"]) == ["encoder.layer.1.attention.self.query"]
    assert linear_names(models["bert"], ["dense", "query"])[0] == "encoder.layer.0.attention.self.query"
    with pytest.raises(BackboneError):
        linear_names(models["bert"], ["uery"])


def test_all_linear_is_every_linear_but_the_head(models: dict[str, Any]) -> None:
    """A pooler belongs to the head, and what is named beside the word is added."""
    for kind, head in (("llama", "lm_head"), ("bert", "pooler.dense")):
        every = [name for name, module in models[kind].named_modules() if is_linear(module)]
        assert linear_names(models[kind], ["all-linear"]) == [name for name in every if name != head]
        assert linear_names(models[kind], ["all-linear", head]) == every and head in every


def test_an_unknown_target_is_answered_with_roles_and_layers(models: dict[str, Any]) -> None:
    with pytest.raises(BackboneError) as caught:
        linear_names(models["llama"], ["attention.qery"])
    text = str(caught.value)
    assert text.startswith("target 'attention.qery' matches no linear layer: expected a role (attention.query, ")
    assert "model.layers.*.self_attn.q_proj" in text and "lm_head" in text
