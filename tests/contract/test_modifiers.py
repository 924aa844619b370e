"""Gradient modifiers compose with every method on every engine: streams run, stop, continue, and engines agree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from axes import FULL, sampled
from complete_runs import CRASHES
from crash_copies import copied_after, left_after
from tiny import ENGINES, SAMPLE, TASKS, WITH_WEIGHTS, Complete, Lab, Stop, exported, family, matrix, run, trace

from raycl import config as configs
from raycl.errors import ConfigError, RunError
from raycl.methods.modifier import Modifiers
from raycl.metrics.run_results import read_results
from raycl.operations.report.phase_summaries import OutputRows
from raycl.operations.report.tables import output_rows_table
from raycl.storage import Storage
from raycl.storage.records import hashed
from raycl.training.setup.checks import read_singles
from raycl.training.setup.run_config import RunConfig

MIGU = {"name": "migu", "threshold": 0.7, "skip_first_task": False}
ALL_CASES = [
    *(("bert", method, "torch") for method in WITH_WEIGHTS),
    *((kind, method, "torch") for kind in ("t5", "llama") for method in ("lora", "finetune")),
    *(("bert", method, engine) for engine in ENGINES if engine != "torch" for method in ("lora", "finetune")),
]
SHARED = [(kind, method, "torch") for kind, method in SAMPLE if method in WITH_WEIGHTS]
"""Cases of complete runs that other suites look at too."""
CASES = sampled(
    ALL_CASES if FULL else [*SHARED, *(case for case in ALL_CASES if case[2] != "torch")],
    keep=[("bert", "finetune", "torch"), ("bert", "separate", "torch")],
    needed=lambda case: (case[0], family(case[1]), case[2]),
)


def masked(lab: Lab, kind: str, method: Any, engine: str, **settings: Any) -> Any:
    sections = {name: settings.pop(name) for name in ("train", "backbone", "eval", "stream") if name in settings}
    method = lab.slots() if method == "slm" else method
    return lab.config(kind, method, ENGINES[engine], modifiers=[{**MIGU, **settings}], **sections)


@pytest.fixture(scope="module")
def complete_masked(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(kind, method, engine, settings) -> storage of its complete run."""
    done: dict[str, Storage] = {}

    def get(kind: str, method: str, engine: str, **settings: Any) -> Storage:
        settings = {name: value for name, value in settings.items() if value is not False}
        key = f"{kind}-{method}-{engine}-{settings}"
        if key not in done:
            done[key] = Storage.at(tmp_path_factory.mktemp(f"{kind}-{method}-{engine}"))
            with copied_after(done[key], *CRASHES):
                run(masked(lab, kind, method, engine, **settings), done[key])
        return done[key]

    return get


@pytest.mark.parametrize(("kind", "method", "engine"), CASES)
def test_modifiers_resume_bit_for_bit_with_every_method(
    lab: Lab, complete_masked: Any, complete: Complete, tmp_path: Path, kind: str, method: str, engine: str
) -> None:
    whole = complete_masked(kind, method, engine)
    results = whole.read_json("results.json")
    assert results["finished"]
    kept = OutputRows.of(results)
    assert kept.tasks == results["phases"] and all(kept.masked) and all(0 < share < 100 for share in kept.norm_kept)
    assert "norm kept" in str(output_rows_table(results))
    storage = left_after(whole, max(after for after in CRASHES if after < len(trace(whole))), tmp_path)
    run(masked(lab, kind, method, engine), storage)
    assert trace(storage) == trace(whole)
    assert matrix(storage) == matrix(whole)
    assert exported(storage) == exported(whole)
    assert storage.read_json("results.json")["phase_summaries"] == results["phase_summaries"]
    if method != "slm":  # another engine's losses would differ from these by rounding alone
        steps = zip(trace(whole), trace(complete(kind, method, "torch").storage), strict=True)
        assert any(mine != pytest.approx(other, abs=1e-4, rel=1e-3) for mine, other in steps), "the mask did nothing"


@pytest.mark.parametrize(("kind", "method", "engine"), [case for case in CASES if case[2] != "torch"])
@pytest.mark.parametrize("mask_update", [False, True])
def test_every_engine_gives_the_losses_of_plain_torch(
    complete_masked: Any, kind: str, method: str, engine: str, mask_update: bool
) -> None:
    plain, result = (trace(complete_masked(kind, method, name, mask_update=mask_update)) for name in ("torch", engine))
    for mine, other in zip(result, plain, strict=True):
        assert mine == pytest.approx(other, abs=1e-4, rel=1e-3)


@pytest.mark.parametrize(
    ("method", "engine"),
    sampled([(m, e) for m in ("lora", "finetune") for e in ("torch", "zero0", "zero2", "zero3")]),
)
def test_a_threshold_of_zero_is_plain_training(
    complete_masked: Any, complete: Complete, method: str, engine: str
) -> None:
    plain = complete("bert", method, engine).storage
    masked = complete_masked("bert", method, engine, threshold=0.0)
    assert trace(masked) == trace(plain)
    assert exported(masked) == exported(plain)


@pytest.mark.parametrize(
    ("engine", "dtype"),
    sampled(
        [*((e, "float32") for e in ENGINES), *((e, "bfloat16") for e in ENGINES if e != "zero0")],
        keep=[("zero2", "float32"), ("zero2", "bfloat16")],
    ),
)
def test_the_optimizer_saw_the_mask_in_every_engine_and_precision(
    lab: Lab, tmp_path: Path, engine: str, dtype: str
) -> None:
    """The run checks it itself, here with moments of earlier steps too: it is left and continues."""
    sections = {"backbone": {"dtype": dtype}, "train": {"micro_batch_size": 2}, "stream": {"tasks": lab.tasks[:1]}}
    config = masked(lab, "bert", "finetune", engine, **sections)
    with pytest.raises(Stop):
        run(config, Storage.at(tmp_path), after=3)
    run(config, Storage.at(tmp_path))
    assert len(trace(Storage.at(tmp_path))) == 4


def test_an_engine_that_ignores_edited_gradients_is_refused(lab: Lab, tmp_path: Path) -> None:
    """ZeRO 1 in bfloat16 with float32 accumulation copies gradients before they can be edited."""
    copying = {"name": "deepspeed", "zero_stage": 1, "extra": {"data_types": {"grad_accum_dtype": "fp32"}}}
    tree = lab.tree("bert", "finetune", copying, backbone={"dtype": "bfloat16"}, modifiers=[MIGU])
    with pytest.raises(RunError, match=r"the optimizer saw a gradient in \d+ of \d+ masked weights of 'model.encoder"):
        run(configs.validate(RunConfig, tree), Storage.at(tmp_path))
    assert not Storage.at(tmp_path).list("checkpoints")
    run(configs.validate(RunConfig, {**tree, "modifiers": []}), Storage.at(tmp_path / "plain"))


def test_an_edit_after_clipping_would_be_seen(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that forgets the modifiers on torch: the check is no formality there either."""
    monkeypatch.setattr(Modifiers, "__call__", lambda self, name, gradient: gradient)
    with pytest.raises(RunError, match="this engine ignores edited gradients"):
        run(masked(lab, "bert", "finetune", "torch"), Storage.at(tmp_path))


def test_scores_of_tasks_trained_alone_are_of_the_same_modifiers(
    lab: Lab, complete_masked: Any, tmp_path: Path
) -> None:
    alone = {"singles": complete_masked("bert", "separate", "torch").uri}
    scores = read_singles(masked(lab, "bert", "lora", "torch", eval=alone))
    assert scores is not None and list(scores) == list(TASKS)
    older = Storage.at(tmp_path)
    results = read_results(alone["singles"])
    del results["config"]["stream"]["train_rows_by_task"]
    older.write_json("results.json", hashed(results))
    assert read_singles(masked(lab, "bert", "lora", "torch", eval={"singles": older.uri})) == scores
    for other in (
        lab.config("bert", "lora", eval=alone),
        masked(lab, "bert", "lora", "torch", threshold=0.4, eval=alone),
    ):
        with pytest.raises(ConfigError, match=r"is another setting; it differs in modifiers"):
            read_singles(other)
