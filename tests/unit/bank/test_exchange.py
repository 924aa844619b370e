"""Adapters in and out: PEFT's own folders, mixtures as one LoRA, merged models, `jobs/bank.py` as people type it."""

from __future__ import annotations

import copy
import json
import runpy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from tiny import on_main, save_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from raycl.adapters import AdapterStack
from raycl.adapters.card import CardMetadata
from raycl.adapters.state import combine, fold
from raycl.backbone import BackboneConfig, identity
from raycl.backbone.codec import capabilities_of
from raycl.bank import AdapterRef, Bank, NewSnapshot
from raycl.bank.manifest import ModelInfo, RouterInfo
from raycl.errors import AdapterError, BackboneError, BankError
from raycl.operations.banks.exchange import export_merged, export_peft, import_peft, mixed
from raycl.operations.banks.vllm import RANKS, allowed_rank, export_vllm, of_one_rank
from raycl.types import AdapterState, Mixture

REPO = Path(__file__).resolve().parents[3]
IDS = torch.tensor([[4, 5, 6, 7, 8, 9], [5, 4, 9, 9, 6, 7]])


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("llama", tmp_path_factory.mktemp("model") / "llama")


def fresh(llama: Path) -> Any:
    """Return the model as it was saved; it is read once."""
    return copy.deepcopy(_loaded(llama))


@cache
def _loaded(llama: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(llama).eval()


def peft_folder(llama: Path, folder: Path, seed: int = 0, **settings: Any) -> Tensor:
    """Return a LoRA made by PEFT with random values; returns its logits."""
    torch.manual_seed(seed)
    base = fresh(llama)
    model = get_peft_model(
        base, LoraConfig(**{"r": 3, "lora_alpha": 7, "target_modules": ["q_proj", "v_proj"], **settings})
    )
    for name, parameter in model.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(str(folder))
    return logits(model.eval())


def described(llama: Path) -> CardMetadata:
    return CardMetadata("decoder", capabilities_of("decoder"), str(llama))


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        result: Tensor = model(input_ids=IDS).logits
    return result


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"use_rslora": True},
        {"rank_pattern": {"v_proj": 5}, "alpha_pattern": {"v_proj": 11}},
        {"target_modules": ["q_proj", "down_proj", "gate_proj"]},
        {"use_dora": True, "modules_to_save": ["lm_head"]},
    ],
    ids=["plain", "rslora", "patterns", "ffn", "dora and a copy"],
)
def test_a_lora_made_elsewhere_comes_in_and_goes_out_with_equal_logits(
    llama: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    expected = peft_folder(llama, tmp_path / "theirs", **settings)
    bank, config = Bank.at(tmp_path / "bank"), BackboneConfig(name=str(llama))
    manifest = import_peft(bank, str(tmp_path / "theirs"), "guest", config, ["chat"])
    state = bank.fetch(manifest)
    model = fresh(llama)
    stack = AdapterStack(model, list(state.linears))
    stack.copy_modules(list(state.copies))
    stack.load("guest", state)
    with stack.activate(Mixture.same({"guest": 1.0}, 2)):
        torch.testing.assert_close(logits(model), expected, atol=1e-5, rtol=1e-4)
    export_peft(state, described(llama), str(tmp_path / "ours"))
    again = PeftModel.from_pretrained(fresh(llama), str(tmp_path / "ours"))
    torch.testing.assert_close(logits(again.eval()), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa', which changed the weights of the backbone"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices=.*only plain LoRA"),
        ({"bias": "all"}, "bias='all'"),
        ({"alora_invocation_tokens": [1, 2]}, r"alora_invocation_tokens=\[1, 2\]: only plain LoRA"),
    ],
)
def test_more_than_a_plain_lora_is_refused(llama: Path, tmp_path: Path, settings: dict[str, Any], said: str) -> None:
    peft_folder(llama, tmp_path / "theirs", **settings)
    with pytest.raises(AdapterError, match=said):
        import_peft(Bank.at(tmp_path / "bank"), str(tmp_path / "theirs"), "guest", BackboneConfig(name=str(llama)), [])
    with pytest.raises(BankError, match="is no PEFT adapter folder"):
        import_peft(Bank.at(tmp_path / "bank"), str(llama), "guest", BackboneConfig(name=str(llama)), [])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ([], "holds a list: expected an object"),
        ({"alpha_pattern": {"((a|a)*)*$": 3}}, r"the pattern '\(\(a\|a\)\*\)\*\$' in alpha_pattern"),
        ({"alpha_pattern": {"[": 3}}, r"the pattern '\[' in alpha_pattern"),
        ({"alpha_pattern": {"v_proj": "7"}}, "alpha_pattern.v_proj='7'"),
        ({"lora_alpha": float("nan")}, "lora_alpha=nan"),
        ({"a_setting_of_a_later_version": True}, "a_setting_of_a_later_version=True: only plain LoRA"),
    ],
)
def test_settings_that_are_none_of_peft_are_one_sentence(
    llama: Path, tmp_path: Path, settings: dict[str, Any] | list[str], said: str
) -> None:
    peft_folder(llama, tmp_path / "theirs")
    file = tmp_path / "theirs" / "adapter_config.json"
    tree = settings if isinstance(settings, list) else json.loads(file.read_text()) | settings
    file.write_text(json.dumps(tree))
    with pytest.raises(AdapterError, match=said):
        import_peft(Bank.at(tmp_path / "bank"), str(tmp_path / "theirs"), "guest", BackboneConfig(name=str(llama)), [])


PATH = "base_model.model.model.layers.0.self_attn.v_proj.lora_{}.weight"


@pytest.mark.parametrize("sides", [{"A": (0, 16), "B": (16, 0)}, {"A": (), "B": (16, 1)}], ids=["rank 0", "a number"])
def test_tensors_that_make_no_lora_are_one_sentence(llama: Path, tmp_path: Path, sides: dict[str, Any]) -> None:
    peft_folder(llama, tmp_path / "theirs")
    tensors = {PATH.format(side): torch.zeros(shape) for side, shape in sides.items()}
    save_file(tensors, tmp_path / "theirs" / "adapter_model.safetensors")
    with pytest.raises(AdapterError, match="expected two matrices of rank 1 or more"):
        import_peft(Bank.at(tmp_path / "bank"), str(tmp_path / "theirs"), "guest", BackboneConfig(name=str(llama)), [])


@pytest.mark.parametrize(
    ("labels", "shapes", "said"),
    [
        ({"a": 1}, {}, "expected a list of labels"),
        (["a", "a"], {}, "names a label twice"),
        (["a", "b"], {}, "expected {'weight': "),
        (["a", "b"], {"weight": (2, 3), "bias": (2,)}, "'weight': .2, 3.* expected {'weight': "),
    ],
)
def test_a_label_head_that_does_not_fit_is_one_sentence(
    llama: Path, tmp_path: Path, labels: Any, shapes: dict[str, Any], said: str
) -> None:
    peft_folder(llama, tmp_path / "theirs")
    (tmp_path / "theirs" / "labels.json").write_text(json.dumps(labels))
    head = {part: torch.zeros(shape) for part, shape in shapes.items()}
    save_file(head, tmp_path / "theirs" / "label_head.safetensors")
    with pytest.raises(BankError, match=said):
        import_peft(Bank.at(tmp_path / "bank"), str(tmp_path / "theirs"), "guest", BackboneConfig(name=str(llama)), [])


def bank_of_two(llama: Path, tmp_path: Path) -> tuple[Bank, dict[str, AdapterState]]:
    bank, config = Bank.at(tmp_path / "bank"), BackboneConfig(name=str(llama))
    for seed, name in enumerate(("one", "two")):
        peft_folder(llama, tmp_path / name, seed, r=2 + seed)
        import_peft(bank, str(tmp_path / name), name, config, [name])
    manifests = [bank.manifest(_ref(name)) for name in ("one", "two")]
    facts = ModelInfo(name=str(llama), sha256=identity(config), kind="decoder")
    on_main(bank, bank.snapshot(NewSnapshot(manifests, facts, RouterInfo(kind="task"))))
    return bank, {manifest.name: bank.fetch(manifest) for manifest in manifests}


def _ref(name: str) -> AdapterRef:
    return AdapterRef(name=name, version=1)


def test_a_mixture_is_exactly_one_lora_and_exactly_one_merged_model(llama: Path, tmp_path: Path) -> None:
    bank, states = bank_of_two(llama, tmp_path)
    snapshot = bank.open(1)
    weights = {"one": 0.7, "two": -0.4}
    model = fresh(llama)
    stack = AdapterStack(model, list(states["one"].linears))
    for name, state in states.items():
        stack.load(name, state)
    with stack.activate(Mixture.same(weights, 2)):
        expected = logits(model)
    state = mixed(bank, snapshot, weights)
    export_peft(state, described(llama), str(tmp_path / "peft"))
    loaded = PeftModel.from_pretrained(fresh(llama), str(tmp_path / "peft"))
    torch.testing.assert_close(logits(loaded.eval()), expected, atol=1e-5, rtol=1e-5)
    export_merged(state, described(llama), BackboneConfig(name=str(llama)), str(tmp_path / "merged"))
    merged, facts = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not any(facts.values())
    torch.testing.assert_close(logits(merged.eval()), expected, atol=1e-5, rtol=1e-5)
    with pytest.raises(BankError, match="is not empty: name a new folder"):
        export_peft(state, described(llama), str(tmp_path / "peft"))


def test_output_words_that_are_the_input_embeddings_become_weights_of_their_own(tmp_path: Path) -> None:
    """An adapter on them changes what is written, not how words are read; T5 scales what tied ones read."""
    folder, low = save_model("gpt2", tmp_path / "gpt2"), torch.randn(2, 32, generator=torch.Generator().manual_seed(1))
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    head = model.lm_head
    assert head.weight is model.get_input_embeddings().weight
    state = AdapterState({"lm_head": (low, torch.ones(head.out_features, 2).cumsum(0))}, 0.3)
    stack = AdapterStack(model, ["lm_head"])
    stack.load("one", state)
    with stack.activate(Mixture.same({"one": 1.0}, 2)):
        expected = logits(model)
    export_merged(state, described(folder), BackboneConfig(name=str(folder)), str(tmp_path / "merged"))
    merged, facts = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not any(facts.values())
    torch.testing.assert_close(logits(merged.eval()), expected, atol=1e-4, rtol=1e-5)
    words = torch.randn(head.out_features, 32, generator=torch.Generator().manual_seed(2))
    for number, path in enumerate(("lm_head", "transformer.wte")):  # a copy of either leaves the other
        copied = AdapterState({"transformer.h.0.mlp.c_fc": (low, torch.ones(128, 2))}, 0.3, copies={path: words})
        model = AutoModelForCausalLM.from_pretrained(folder).eval()
        stack = AdapterStack(model, list(copied.linears))
        stack.copy_modules([path])
        stack.load("one", copied)
        with stack.activate(Mixture.same({"one": 1.0}, 2)):
            expected = logits(model)
        export_merged(copied, described(folder), BackboneConfig(name=str(folder)), str(tmp_path / str(number)))
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / str(number)).eval()
        torch.testing.assert_close(logits(merged), expected, atol=1e-4, rtol=1e-5)
    t5 = save_model("t5", tmp_path / "t5")
    with pytest.raises(BackboneError, match="changes 'lm_head', whose weights T5ForConditionalGeneration shares with"):
        export_merged(state, described(t5), BackboneConfig(name=str(t5)), str(tmp_path / "scaled"))
    assert not (tmp_path / "scaled").exists()


def test_a_non_linear_adapter_cannot_be_exported(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bank, states = bank_of_two(llama, tmp_path)
    bent = replace(
        states["one"], activation="relu", labels=("a",), head_weight=IDS[:1].float(), head_bias=torch.ones(1)
    )
    said = "has activation 'relu' between A and B, expected none"
    with pytest.raises(AdapterError, match=f"adapter 'one' {said}"):
        combine({"one": 1.0, "two": 0.5}, {**states, "one": bent})
    assert combine({"one": 0.0, "two": 0.5}, {**states, "one": bent}).rank == 3
    with pytest.raises(AdapterError, match=f"the adapter {said}"):
        fold(fresh(llama), bent)
    snapshot = bank.open(1)
    on_main(
        bank,
        bank.snapshot(NewSnapshot([bank.publish("one", bent, snapshot.backbone)], snapshot.backbone, snapshot.router)),
    )
    main = runpy.run_path(str(REPO / "jobs" / "bank.py"))["main"]
    for number, how in enumerate(([], ["--merged"], ["--without-head"], ["--without-head", "--merged"])):
        for adapters in ("one", "one=0.5"):
            folder = tmp_path / f"out{number}"
            command = ["export", bank.storage.uri, "--adapters", adapters, "--to", str(folder), *how]
            assert main(command) == 1
            error = capsys.readouterr().err
            assert said in error and error.count("\n") == 1, error
            assert not folder.exists()


def test_export_for_vllm(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A mixture of ranks 2 and 3 is one adapter, the same for PEFT; each by itself is one too."""
    bank, states = bank_of_two(llama, tmp_path)
    snapshot, weights = bank.open(1), {"one": 0.7, "two": -0.4}
    vllm = export_vllm(bank, snapshot, {"mixture": weights}, str(tmp_path / "out"), "s3://bucket/adapters", "H100")
    config = json.loads((tmp_path / "out" / "mixture" / "adapter_config.json").read_text())
    assert "rank_pattern" not in config and config["r"] == sum(state.rank for state in states.values())
    assert vllm.rank == next(rank for rank in RANKS if rank >= config["r"])
    base = fresh(llama)
    stack = AdapterStack(base, list(states["one"].linears))
    for name, state in states.items():
        stack.load(name, state)
    with stack.activate(Mixture.same(weights, 2)):
        expected = logits(base)
    loaded = PeftModel.from_pretrained(fresh(llama), str(tmp_path / "out" / "mixture"))
    torch.testing.assert_close(logits(loaded.eval()), expected, atol=1e-5, rtol=1e-5)
    assert vllm.models == {"mixture": "llama:mixture"}
    odd = AdapterState({"a": (torch.ones(2, 4), torch.ones(3, 2)), "b": (torch.ones(1, 4), torch.ones(3, 1))}, 2.0)
    even = of_one_rank(odd)
    assert {len(low) for low, _ in even.linears.values()} == {2} and even.scale == 2.0
    for path, (low, high) in odd.linears.items():
        assert torch.equal(even.linears[path][1] @ even.linears[path][0], high @ low)

    main = runpy.run_path(str(REPO / "jobs" / "bank.py"))["main"]
    export = ["export", bank.storage.uri, "--json", "--engine", "vllm", "--to"]
    assert main([*export, str(tmp_path / "all")]) == 0  # by the task id: each adapter by itself
    printed = json.loads(capsys.readouterr().out)
    assert printed["models"] == {"one": "llama:one", "two": "llama:two"} and printed["config"] is None
    assert main([*export, str(tmp_path / "all")]) == 1
    assert "is not empty" in capsys.readouterr().err
    assert main([*export, str(tmp_path / "new"), "--served-from", "/mnt/adapters"]) == 1
    assert "Ray loads adapters from s3://" in capsys.readouterr().err
    with pytest.raises(BankError, match="'big' has rank 600, and vLLM takes at most 512"):
        allowed_rank({"small": 3, "big": 600})
    with pytest.raises(AdapterError, match=r"is a DoRA .* and vLLM and llama\.cpp serve plain LoRAs"):
        of_one_rank(replace(odd, magnitudes={"a": torch.ones(3), "b": torch.ones(3)}))
    t5 = snapshot.model_copy(update={"backbone": snapshot.backbone.model_copy(update={"kind": "encoder-decoder"})})
    with pytest.raises(BankError, match="vLLM serves decoder-only models"):
        export_vllm(bank, t5, {"mixture": weights}, str(tmp_path / "t5"))


def test_ray_accepts_the_config_for_vllm(llama: Path, tmp_path: Path) -> None:
    """Against Ray's own schema of a model; that of the application imports vLLM."""
    from ray.llm._internal.serve.core.configs.llm_config import LLMConfig, LoraConfig
    from ray.serve.schema import ServeDeploySchema

    bank, _ = bank_of_two(llama, tmp_path)
    mixtures = {name: {name: 1.0} for name in ("one", "two")}
    export_vllm(bank, bank.open(1), mixtures, str(tmp_path / "out"), "s3://bucket/adapters/", "H100")
    tree = yaml.safe_load((tmp_path / "out" / "serve.yaml").read_text())
    (application,) = ServeDeploySchema.model_validate(tree).applications
    assert application.import_path == "ray.serve.llm:build_openai_app"
    model = LLMConfig.model_validate(application.args["llm_configs"][0])
    assert model.model_id == "llama" and model.accelerator_type == "H100"
    assert isinstance(model.lora_config, LoraConfig)
    assert model.lora_config.dynamic_lora_loading_path == "s3://bucket/adapters"
    assert model.lora_config.max_num_adapters_per_replica == 2
    assert model.engine_kwargs["enable_lora"] and model.engine_kwargs["max_lora_rank"] == 8


def test_export_by_the_command(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bank, _ = bank_of_two(llama, tmp_path)
    main = runpy.run_path(str(REPO / "jobs" / "bank.py"))["main"]

    def job(*arguments: str) -> tuple[int, str, str]:
        status = main([arguments[0], bank.storage.uri, *arguments[1:]])
        return status, *capsys.readouterr()

    status, out, _ = job("list")
    assert status == 0 and "one" in out and "task" in out
    status, out, _ = job("verify", "--json")
    assert status == 0 and json.loads(out)["problems"] == []
    status, _, error = job("show", "three")
    assert status == 1 and "has no adapter 'three'" in error and error.count("\n") == 1
    assert job("export", "--adapters", "one=0.5,two=0.5", "--to", str(tmp_path / "out"))[0] == 0
    assert (tmp_path / "out" / "adapter_config.json").exists()
    Path(bank.storage.path(bank.manifest(_ref("one")).tensors.file)).write_bytes(b"x")
    status, out, _ = job("verify")
    assert status == 1 and "tensors of one@1 are damaged" in out
    lines = out.splitlines()
    assert lines[-1] == "1 problem" and lines[0].startswith("2 adapters, 1 snapshot, 2 files of tensors, ")


@pytest.mark.parametrize(
    "command",
    [
        ["list"],
        ["show", "1"],
        ["verify"],
        ["export", "--to", "out"],
        ["prune"],
        ["diff", "1", "2"],
        ["forget", "task"],
        ["list", "--json"],
    ],
    ids=" ".join,
)
def test_a_missing_bank_gives_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    main = runpy.run_path(str(REPO / "jobs" / "bank.py"))["main"]
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "snapshots.txt").write_text("a file of somebody's")
    for name in ("nowhere", "empty", "other"):
        assert main([command[0], str(tmp_path / name), *command[1:]]) == 1
        said = capsys.readouterr()
        assert said.out == "" and said.err.count("\n") == 1, said
        assert f"there is no bank at '{tmp_path / name}'" in said.err
    assert not (tmp_path / "nowhere").exists()
