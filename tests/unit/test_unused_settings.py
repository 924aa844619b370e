"""Settings without effect beside others are errors where the user wrote them; what raycl wrote loads unchanged."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from raycl import config as configs
from raycl.errors import ConfigError
from raycl.operations.sweep.comparison import load_comparison, plan
from raycl.operations.sweep.definition.sweep_config import load_sweep
from raycl.serve.settings import load_serve_config
from raycl.training.setup.run_config import fingerprint, load_config


def file(folder: Path, tree: Any) -> str:
    """Return a YAML file that a person wrote."""
    path = folder / "written.yaml"
    path.write_text(yaml.safe_dump(tree))
    return str(path)


CASES = {
    "method.arm.weight=2": ("method.ablation=arm", ["method=sapt"]),
    "method.arm.every=2": ("method.arm.weight=0", ["method=sapt"]),
    "method.selector.steps=9": ("method.ablation=none", ["method=sapt"]),
    "method.generator.steps=9": ("method.arm.source=real", ["method=sapt"]),
    "method.prompt_length=5": ("method.value=lora", ["method=sapt"]),
    "method.target_modules=[ffn]": ("method.value=prompt", ["method=sapt"]),
    "method.stop_grad_old_blocks=true": ("method.value=prompt", ["method=sapt"]),
    "method.a_init_std=0.5": ("method.value=prompt", ["method=slm"]),
    "method.lambda_1=0.3": ("method.base=inflora", ["method=gainlora"]),
    "method.threshold=0.9": ("method.base=olora", ["method=gainlora", "method.base=olora"]),
    "method.arm.batch=2": ("stream.schedule=separate", ["stream.schedule=separate", "method=sapt"]),
    "modifiers.migu.cluster_by=sequential": ("modifiers.migu.clusters=null", ["modifiers=[migu]"]),
    "method.attention_learning_rate=0.001": (
        "stream.schedule=separate",
        ["stream.schedule=separate", "method=sapt"],
    ),
    "train.epochs_by_task.topic=2": ("stream.schedule=joint", ["method=lora"]),
    "method.r_by_task.topic=2": ("stream.schedule=joint", ["method=sapt"]),
    "train.warmup_ratio=0.1": ("train.warmup_steps=5", ["train.lr_scheduler=linear"]),
    "checkpoint.export=each": ("method=lora", []),
    "backbone.revision=v2": ("backbone.name=minilm, which is no model of the hub", ["method=lora"]),
    "method.encoder.revision=v2": ("method.encoder.name=minilm, which is no model of the hub", ["method=slm"]),
    "tracking.project=mine": ("tracking.tracker=none", []),
    "bank.dir=/tmp/bank": ("bank.publish=false", []),
    "bank.sample_days=3": ("method=lora", []),
    "bank.revise=topic": ("bank.start=null", []),
    "bank.revise_from=new": ("bank.revise=null", []),
}


@pytest.mark.parametrize("override", CASES)
def test_an_unused_setting_is_refused_with_the_reason(override: str, tmp_path: Path) -> None:
    reason, before = CASES[override]
    is_known = "null" in reason or "hub" in reason or reason.startswith(("method=", "method.name"))
    decides = [] if is_known else [reason]
    setting = re.escape(override)
    with pytest.raises(
        ConfigError, match=rf"{setting} acts on nothing beside {reason}: leave it out, or change the other"
    ):
        load_config(None, [*before, *decides, override])
    tree: dict[str, Any] = {}
    for item in (*before, *decides, override):
        configs.apply_override(tree, item)
    with pytest.raises(ConfigError, match=rf"written\.yaml': {setting} acts on nothing beside {reason}"):
        load_config(file(tmp_path, tree), [])


@pytest.mark.parametrize(
    ("reason", "method"),
    [
        ("method.ablation=shared_attention", "sapt"),
        *(("stream.schedule=separate", name) for name in ("sapt", "inclora", "olora", "inflora", "gainlora", "sdlora")),
    ],
)
def test_gradients_are_stopped_beside_earlier_adapters_alone(reason: str, method: str) -> None:
    with pytest.raises(ConfigError, match=rf"method\.stop_grad_old_blocks=true acts on nothing beside {reason}"):
        load_config(None, [f"method={method}", reason, "method.stop_grad_old_blocks=true"])


SAPT = {"method": {"name": "sapt", "arm": {"weight": 2.0, "every": 2}}}


@pytest.mark.parametrize("override", ["method.ablation=arm", "stream.schedule=separate"])
def test_an_override_may_switch_off_what_the_file_sets(override: str, tmp_path: Path) -> None:
    load_config(file(tmp_path, SAPT), [override])
    with pytest.raises(ConfigError, match=r"method\.arm\.every=3 acts on nothing"):
        load_config(file(tmp_path, SAPT), [override, "method.arm.every=3"])
    alone = SAPT["method"] | {"ablation": "arm"}
    with pytest.raises(ConfigError, match=r"method\.arm\.every=2 acts on nothing"):
        load_config(file(tmp_path, {"method": alone}), [override])


def test_a_file_that_needs_its_overrides_is_held_to_all_it_sets(tmp_path: Path) -> None:
    path = file(tmp_path, SAPT | {"stream": {"name": "${stream.root}"}})
    with pytest.raises(ConfigError, match=r"method\.arm\.every=2 acts on nothing"):
        load_config(path, ["method.ablation=arm", "stream.root=/data"])


@pytest.mark.parametrize(
    "overrides",
    [
        ["method=sapt", "method.arm.weight=2", "method.arm.every=2"],
        ["method=sapt", "method.ablation=alignment", "method.selector.steps=9"],
        ["method=sapt", "method.value=prompt", "method.prompt_length=5"],
        ["stream.schedule=joint", "method=sapt", "method.attention_learning_rate=1e-3"],
        ["method=replay", "method.learner=finetune", "checkpoint.export=each"],
        ["tracking.tracker=wandb", "tracking.project=mine"],
        ["method=sapt", "method.arm.files=null"],
    ],
)
def test_used_settings_are_accepted(overrides: list[str]) -> None:
    load_config(None, overrides)


MODELS = {
    "encoder": {"model_type": "bert", "architectures": ["BertModel"]},
    "encoder-decoder": {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]},
    "decoder": {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
}
HEADLESS = "which has no label head"
SILENT = "which generates no text"


def model(folder: Path, kind: str) -> str:
    """Return a local model of that kind, as far as its kind goes."""
    (folder / "config.json").write_text(json.dumps(MODELS[kind]))
    return str(folder)


@pytest.mark.parametrize(
    ("kind", "override", "why", "before"),
    [
        ("decoder", "backbone.pooling=cls", HEADLESS, []),
        ("encoder-decoder", "backbone.pooling=cls", HEADLESS, []),
        ("encoder", "backbone.bos=none", "only decoder-only models read inputs without it", []),
        ("decoder", "train.head_learning_rate=0.5", HEADLESS, []),
        ("decoder", "train.label_loss=task", HEADLESS, []),
        ("decoder", "method.head_rule=logit", HEADLESS, ["method=sapt"]),
        ("encoder-decoder", "method.head_rule=logit", HEADLESS, ["method=slm"]),
        ("decoder", "method.head=own", HEADLESS, ["method=inclora"]),
        ("decoder", "method.head=own", HEADLESS, ["method=olora"]),
        ("decoder", "method.learner.head=own", HEADLESS, ["method=replay", "method.learner=inclora"]),
        ("encoder", "stream.max_target_tokens=8", SILENT, []),
        ("encoder", "eval.max_new_tokens=8", SILENT, []),
    ],
)
def test_a_setting_that_the_backbones_kind_does_not_use(
    kind: str, override: str, why: str, before: list[str], tmp_path: Path
) -> None:
    """A setting that is refused is taken where the backbone is of a kind that reads it."""
    name = model(tmp_path, kind)
    with pytest.raises(ConfigError, match=rf"{override} acts on nothing beside .*{why}.*: leave it out, or change"):
        load_config(None, [*before, override, f"backbone.name={name}"])
    other = model(tmp_path, "decoder" if kind == "encoder" else "encoder")
    config = load_config(None, [*before, override, f"backbone.name={other}"])
    path = tmp_path / "config.yaml"
    path.write_text(configs.to_yaml(config))
    model(tmp_path, kind)
    assert fingerprint(load_config(str(path), [])) == fingerprint(config), "what raycl wrote loads unchanged"


def test_attention_prunes_no_weights_where_scores_of_label_heads_are_added(tmp_path: Path) -> None:
    given = ["method=sapt", "method.attention.pruning_threshold=0.1", f"backbone.name={model(tmp_path, 'encoder')}"]
    load_config(None, given)
    with pytest.raises(
        ConfigError, match=r"method\.attention\.pruning_threshold=0\.1 acts on nothing beside method\.head_rule=log"
    ):
        load_config(None, [*given, "method.head_rule=logit"])


def test_the_backbone_of_a_generator_has_no_label_head_either(tmp_path: Path) -> None:
    writer = [f"method.generator.backbone.name={model(tmp_path, 'decoder')}", "method.generator.backbone.pooling=cls"]
    with pytest.raises(ConfigError, match=rf"method\.generator\.backbone\.pooling=cls .* {HEADLESS}"):
        load_config(None, ["method=sapt", "method.arm.source=generated", *writer])


def test_the_kind_that_a_person_named_counts(tmp_path: Path) -> None:
    name = [f"backbone.name={model(tmp_path, 'encoder')}", "train.head_learning_rate=0.5"]
    load_config(None, name)
    with pytest.raises(ConfigError, match=rf"beside backbone\.kind=decoder, {HEADLESS}"):
        load_config(None, [*name, "backbone.kind=decoder"])


def test_the_kind_of_a_hub_backbone_is_known_once_it_is_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    given = ["backbone.name=mine/llama", "train.head_learning_rate=0.5"]
    load_config(None, given)
    cached = tmp_path / "models--mine--llama"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("abc")
    (cached / "snapshots" / "abc").mkdir(parents=True)
    model(cached / "snapshots" / "abc", "decoder")
    with pytest.raises(ConfigError, match=rf"train\.head_learning_rate=0\.5 .*name=mine/llama, .*{HEADLESS}"):
        load_config(None, given)


def test_a_backbone_whose_kind_cannot_be_read_is_left_to_later_checks(tmp_path: Path) -> None:
    given = [f"backbone.name={tmp_path}", "train.head_learning_rate=0.5"]
    load_config(None, given)
    (tmp_path / "config.json").write_text("{")
    load_config(None, given)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}))
    load_config(None, given)


def test_a_sweep_over_backbones_leaves_out_what_one_of_them_does_not_read(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    names = [model(tmp_path / "a", "encoder"), model(tmp_path / "b", "decoder")]
    space = {"backbone.name": {"grid": names}, "train.head_learning_rate": {"grid": [0.1, 0.5]}}
    tree: dict[str, Any] = {"name": "mine", "space": space, "search": "grid"}
    assert load_sweep(file(tmp_path, tree)).trials() == [
        *({"backbone.name": names[0], "train.head_learning_rate": rate} for rate in (0.1, 0.5)),
        {"backbone.name": names[1]},
    ]
    tree = {**tree, "base": {"backbone": {"name": names[1]}}, "space": {"train.head_learning_rate": {"grid": [0.1]}}}
    with pytest.raises(ConfigError, match=rf"space 'train\.head_learning_rate' acts on nothing .*{HEADLESS}"):
        load_sweep(file(tmp_path, tree))


def test_what_raycl_wrote_loads_unchanged(tmp_path: Path) -> None:
    """It holds every default, those of idle settings too; what is typed beside it counts."""
    given = load_config(None, ["method=sapt", "method.ablation=arm", "seed=7"])
    path = tmp_path / "config.yaml"
    path.write_text(configs.to_yaml(given))
    assert fingerprint(load_config(str(path), [])) == fingerprint(given)
    with pytest.raises(ConfigError, match=r"config\.yaml': method\.arm\.weight=2 acts on nothing"):
        load_config(str(path), ["method.arm.weight=2"])


def test_the_endpoints_settings() -> None:
    with pytest.raises(ConfigError, match=r"the config: route_prefix=/a acts on nothing beside ingress=direct"):
        load_serve_config(None, ["bank=b", "ingress=direct", "route_prefix=/a"])
    with pytest.raises(ConfigError, match=r"follow\.gated=true acts on nothing beside follow\.enabled=false"):
        load_serve_config(None, ["bank=b", "follow.enabled=false", "follow.gated=true"])
    load_serve_config(None, ["bank=b", "follow.gated=true"])


BASE = {"method": "sapt", "stream": {"name": "builtin"}}


@pytest.mark.parametrize(
    ("base", "row", "message"),
    [
        ({"output": {"dir": "x"}}, [], r"base\.output\.dir=x acts on nothing beside --dir and the run's name"),
        ({"seed": 3}, [], r"base\.seed=3 acts on nothing beside seeds"),
        ({}, ["output.name=x"], r"runs\.a\.set of output\.name=x acts on nothing beside --dir"),
        ({}, ["seed=3"], r"runs\.a\.set of seed=3 acts on nothing beside seeds"),
        (
            {"tracking": {"project": "x"}},
            [],
            r"base\.tracking\.project=x acts on nothing beside tracking\.tracker=none",
        ),
        ({}, ["method.ablation=arm", "method.arm.weight=2"], r"runs\.a: method\.arm\.weight=2 acts on nothing beside"),
    ],
)
def test_a_comparison_ignores_nothing(base: dict[str, Any], row: list[str], message: str, tmp_path: Path) -> None:
    tree = {"name": "mine", "base": {**BASE, **base}, "runs": {"a": {"set": row}, "b": {}}}
    with pytest.raises(ConfigError, match=message):
        load_comparison(file(tmp_path, tree))


@pytest.mark.parametrize(
    ("single", "row", "message"),
    [
        (
            ["stream.schedule=separate"],
            ["method=inclora"],
            r"'alone' is another setting; it differs in method\.name: repeat",
        ),
        (
            ["stream.schedule=separate", "train.learning_rate=0.1"],
            [],
            r"runs\.mine\.singles: 'alone' is another setting; it differs in train\.learning_rate: repeat",
        ),
        ([], [], r"'alone' is a run under stream\.schedule=sequential: expected separate"),
    ],
)
def test_a_row_is_compared_with_its_own_single_tasks(
    single: list[str], row: list[str], message: str, tmp_path: Path
) -> None:
    """Found before any run starts; a wrapper is compared with its learner."""
    runs = {"alone": {"set": single}, "mine": {"set": row, "singles": "alone"}}
    with pytest.raises(ConfigError, match=message):
        load_comparison(file(tmp_path, {"name": "mine", "base": BASE, "runs": runs}))
    good = {
        "alone": {"set": ["method=lora", "stream.schedule=separate"]},
        "mine": {"set": ["method=replay"], "singles": "alone"},
    }
    load_comparison(file(tmp_path, {"name": "mine", "base": BASE, "runs": good}))


def test_what_all_rows_of_a_comparison_share_acts_in_one_of_them(tmp_path: Path) -> None:
    base = {"method": {"name": "sapt", "arm": {"weight": 2}}}
    tree = {"name": "mine", "base": base, "runs": {"a": {"set": ["method.ablation=arm"]}, "b": {}}}
    assert len(plan(load_comparison(file(tmp_path, tree)), "runs")) == 2


@pytest.mark.parametrize(
    ("base", "space", "message"),
    [
        ({"output": {"name": "x"}}, {}, r"base\.output\.name=x acts on nothing beside --dir and the sweep's name"),
        ({"launch": {"workers": 2}}, {}, r"base\.launch\.workers=2 acts on nothing beside resources\.workers"),
        (
            {},
            {"launch.workers": {"grid": [1, 2]}},
            r"space 'launch\.workers' acts on nothing beside resources\.workers",
        ),
        (
            {"tracking": {"project": "x"}},
            {},
            r"base\.tracking\.project=x acts on nothing beside tracking\.tracker=none",
        ),
        ({}, {"method.selector.steps": {"grid": [1, 2]}}, r"space 'method\.selector\.steps' acts on nothing beside"),
    ],
)
def test_a_sweep_ignores_nothing(base: dict[str, Any], space: dict[str, Any], message: str, tmp_path: Path) -> None:
    ranks = {"method.r": {"grid": [2, 4]}}
    with pytest.raises(ConfigError, match=message):
        load_sweep(file(tmp_path, {"name": "mine", "base": {**BASE, **base}, "space": ranks | space}))


def test_an_unused_dimension_is_one_trial(tmp_path: Path) -> None:
    space = {"method.ablation": {"grid": ["none", "arm"]}, "method.arm.weight": {"grid": [0.1, 0.5, 2.0]}}
    base = {**BASE, "method": {"name": "sapt", "arm": {"every": 2}}}
    sweep = load_sweep(file(tmp_path, {"name": "mine", "base": base, "space": space, "search": "grid"}))
    assert sweep.trials() == [
        *({"method.ablation": "none", "method.arm.weight": weight} for weight in (0.1, 0.5, 2.0)),
        {"method.ablation": "arm"},
    ]
    drawn = {**space, "method.arm.weight": {"uniform": [0.1, 2.0]}}
    tree = {"name": "mine", "base": base, "space": drawn, "samples": 5}
    trials = load_sweep(file(tmp_path, tree)).trials()
    assert len(trials) == 6 and trials.count({"method.ablation": "arm"}) == 1


@pytest.mark.parametrize("samples", [1, 3])
def test_repeated_samples_of_a_grid_stay(samples: int, tmp_path: Path) -> None:
    tree = {"name": "mine", "base": BASE, "space": {"seed": {"grid": [1, 2]}}, "samples": samples}
    assert len(load_sweep(file(tmp_path, tree)).trials()) == 2 * samples


REPO = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("path", sorted(REPO.glob("jobs/configs/compare/*.yaml")), ids=lambda path: path.name)
def test_the_comparisons_that_come_with_raycl_hold_no_unused_settings(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, kind in (("mini-llama", "decoder"), ("mini-t5", "encoder-decoder")):
        (tmp_path / name).mkdir()
        model(tmp_path / name, kind)
    for name in ("RAYCL_DATA", "RAYCL_MODELS"):
        monkeypatch.setenv(name, str(tmp_path))
    comparison = load_comparison(str(path))
    rows = [row for row in comparison.runs.values() if row.fused is None]
    runs = sum(len(comparison.seeds if row.seeds is None else row.seeds) for row in rows)
    stated = {int(count) for count in re.findall(r"^#.*\b(\d+) runs\b", path.read_text(), re.MULTILINE)}
    assert rows and stated <= {runs}, "its head counts other runs than it has"


@pytest.mark.parametrize("path", sorted(REPO.glob("jobs/configs/*.yaml")), ids=lambda path: path.name)
def test_the_runs_that_come_with_raycl_hold_no_unused_settings(path: Path) -> None:
    load_config(str(path), [])
