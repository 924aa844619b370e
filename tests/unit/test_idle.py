"""Settings that act on nothing beside others are said where a person wrote them; what raycl wrote loads as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from raycl import config as configs
from raycl.errors import ConfigError
from raycl.run.assembly import fingerprint, load_config
from raycl.serve.settings import load_serve_config
from raycl.sweep.comparison import load_comparison, plan
from raycl.sweep.config import load_sweep


def file(folder: Path, tree: Any) -> str:
    """A YAML file that a person wrote."""
    path = folder / "written.yaml"
    path.write_text(yaml.safe_dump(tree))
    return str(path)


CASES = {
    "method.arm.weight=2": ("method.ablation=arm", ["method=sapt"]),
    "method.arm.every=2": ("method.arm.weight=0", ["method=sapt"]),
    "method.selector.steps=9": ("method.ablation=none", ["method=sapt"]),
    "method.writer.steps=9": ("method.arm.source=real", ["method=sapt"]),
    "method.prompt_length=5": ("method.value=lora", ["method=sapt"]),
    "method.targets=[ffn]": ("method.value=prompt", ["method=sapt"]),
    "method.a_init_std=0.5": ("method.value=prompt", ["method=slm"]),
    "method.learner.arm.every=2": ("method.name=separate", ["method=separate", "method.learner=sapt"]),
    "modifiers.migu.cluster_samples=9": ("modifiers.migu.clusters=null", ["modifiers=[migu]"]),
    "train.attention_learning_rate=1e-3": ("method=lora", []),
    "train.warmup_ratio=0.1": ("train.warmup_steps=5", ["train.lr_scheduler=linear"]),
    "checkpoint.export=each": ("method=lora", []),
    "tracking.project=mine": ("tracking.backend=none", []),
    "bank.dir=/tmp/bank": ("bank.publish=false", []),
}


@pytest.mark.parametrize("override", CASES)
def test_an_idle_setting_is_said_with_what_makes_it_so(override: str, tmp_path: Path) -> None:
    reason, before = CASES[override]
    decides = [reason] if "null" not in reason and not reason.startswith(("method=", "method.name")) else []
    path = override.partition("=")[0]
    with pytest.raises(
        ConfigError, match=rf"{path} acts on nothing beside {reason}: leave it out, or change the other"
    ):
        load_config(None, [*before, *decides, override])
    tree: dict[str, Any] = {}
    for one in (*before, *decides, override):
        configs.apply_override(tree, one)
    with pytest.raises(ConfigError, match=rf"written\.yaml': {path} acts on nothing beside {reason}"):
        load_config(file(tmp_path, tree), [])


@pytest.mark.parametrize(
    "overrides",
    [
        ["method=sapt", "method.arm.weight=2", "method.arm.every=2"],
        ["method=sapt", "method.ablation=alignment", "method.selector.steps=9"],
        ["method=sapt", "method.value=prompt", "method.prompt_length=5"],
        ["method=joint", "method.learner=sapt", "train.attention_learning_rate=1e-3"],
        ["method=replay", "method.learner=finetune", "checkpoint.export=each"],
        ["tracking.backend=wandb", "tracking.project=mine"],
        ["method=sapt", "method.arm.files=null"],
    ],
)
def test_what_acts_is_taken(overrides: list[str]) -> None:
    load_config(None, overrides)


def test_what_raycl_wrote_loads_unchanged(tmp_path: Path) -> None:
    """It holds every default, those of idle settings too; what is typed beside it counts."""
    given = load_config(None, ["method=sapt", "method.ablation=arm", "seed=7"])
    path = tmp_path / "config.yaml"
    path.write_text(configs.to_yaml(given))
    assert fingerprint(load_config(str(path), [])) == fingerprint(given)
    with pytest.raises(ConfigError, match=r"config\.yaml': method\.arm\.weight acts on nothing"):
        load_config(str(path), ["method.arm.weight=2"])


def test_the_endpoints_settings() -> None:
    with pytest.raises(ConfigError, match=r"the config: router_replicas acts on nothing beside layout=colocated"):
        load_serve_config(None, ["bank=b", "router_replicas=2"])
    with pytest.raises(ConfigError, match=r"follow\.gated acts on nothing beside follow\.enabled=false"):
        load_serve_config(None, ["bank=b", "follow.enabled=false", "follow.gated=true"])
    load_serve_config(None, ["bank=b", "layout=split", "router_replicas=2", "follow.gated=true"])


BASE = {"method": "sapt", "stream": {"name": "builtin"}}


@pytest.mark.parametrize(
    ("base", "row", "message"),
    [
        ({"output": {"dir": "x"}}, [], r"base\.output\.dir acts on nothing beside --dir and the run's name"),
        ({"seed": 3}, [], r"base\.seed acts on nothing beside seeds"),
        ({}, ["output.name=x"], r"runs\.a\.set of output\.name acts on nothing beside --dir"),
        ({}, ["seed=3"], r"runs\.a\.set of seed acts on nothing beside seeds"),
        ({"tracking": {"project": "x"}}, [], r"base\.tracking\.project acts on nothing beside tracking\.backend=none"),
        ({}, ["method.ablation=arm", "method.arm.weight=2"], r"runs\.a: method\.arm\.weight acts on nothing beside"),
    ],
)
def test_a_comparison_ignores_nothing(base: dict[str, Any], row: list[str], message: str, tmp_path: Path) -> None:
    tree = {"name": "mine", "base": {**BASE, **base}, "runs": {"a": {"set": row}, "b": {}}}
    with pytest.raises(ConfigError, match=message):
        load_comparison(file(tmp_path, tree))


def test_what_all_rows_of_a_comparison_share_acts_in_one_of_them(tmp_path: Path) -> None:
    base = {"method": {"name": "sapt", "arm": {"weight": 2}}}
    tree = {"name": "mine", "base": base, "runs": {"a": {"set": ["method.ablation=arm"]}, "b": {}}}
    assert len(plan(load_comparison(file(tmp_path, tree)), "runs")) == 2


@pytest.mark.parametrize(
    ("base", "space", "message"),
    [
        ({"output": {"name": "x"}}, {}, r"base\.output\.name acts on nothing beside --dir and the sweep's name"),
        ({"launch": {"workers": 2}}, {}, r"base\.launch\.workers acts on nothing beside resources\.workers"),
        (
            {},
            {"launch.workers": {"grid": [1, 2]}},
            r"space 'launch\.workers' acts on nothing beside resources\.workers",
        ),
        ({"tracking": {"project": "x"}}, {}, r"base\.tracking\.project acts on nothing beside tracking\.backend=none"),
        ({}, {"method.selector.steps": {"grid": [1, 2]}}, r"space 'method\.selector\.steps' acts on nothing beside"),
    ],
)
def test_a_sweep_ignores_nothing(base: dict[str, Any], space: dict[str, Any], message: str, tmp_path: Path) -> None:
    ranks = {"method.rank": {"grid": [2, 4]}}
    with pytest.raises(ConfigError, match=message):
        load_sweep(file(tmp_path, {"name": "mine", "base": {**BASE, **base}, "space": ranks | space}))


def test_a_dimension_that_a_choice_leaves_idle_is_one_trial(tmp_path: Path) -> None:
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
def test_trials_that_are_alike_by_themselves_stay(samples: int, tmp_path: Path) -> None:
    tree = {"name": "mine", "base": BASE, "space": {"seed": {"grid": [1, 2]}}, "samples": samples}
    assert len(load_sweep(file(tmp_path, tree)).trials()) == 2 * samples


REPO = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("path", sorted(REPO.glob("sweeps/*.yaml")), ids=lambda path: path.name)
def test_the_sweeps_that_come_with_raycl_hold_nothing_idle(path: Path) -> None:
    assert load_sweep(str(path)).space


@pytest.mark.parametrize("path", sorted(REPO.glob("jobs/configs/compare/*.yaml")), ids=lambda path: path.name)
def test_nor_do_the_comparisons(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAYCL_DATA", "RAYCL_MODELS"):
        monkeypatch.setenv(name, "/data")
    assert load_comparison(str(path)).runs


@pytest.mark.parametrize("path", sorted(REPO.glob("jobs/configs/*.yaml")), ids=lambda path: path.name)
def test_nor_do_the_runs(path: Path) -> None:
    load_config(str(path), [])
