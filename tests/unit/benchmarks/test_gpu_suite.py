"""The suite for GPUs, without one: every part tiny and without heavy packages; wrong results are no figures."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from fork_server import Call, ForkServer
from light_suite import LARGE_BANK
from torch import Tensor

from benchmarks.figures import Figure
from benchmarks.gpu import suite
from benchmarks.gpu.battery import Battery, compare
from benchmarks.gpu.parts import routing
from benchmarks.gpu.report import markdown
from benchmarks.gpu.setup import Case, Setup
from benchmarks.gpu.suite import PARTS, Part, run_part
from benchmarks.gpu.timing import ONCE, Contender, Times, quartiles, take_turns
from benchmarks.serving.banks import drawn_router
from raycl.errors import ConfigError, WrongResultError
from raycl.types import Mixture

REPO = Path(__file__).resolve().parents[3]
CPU = torch.device("cpu")
BLOCKED = ("ray", "deepspeed", "faiss", "wandb", "optuna", "fastapi", "starlette", "uvicorn")


def options(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    suite.add_flags(parser)
    return parser.parse_args(["--tiny", "--device", "cpu", "--minutes", "60", *flags])


def tiny() -> Setup:
    return Setup(CPU, tiny=True)


def measured(part: str, case: str = "") -> list[Figure]:
    """Return the figures of a part's cases whose names hold `case`, failures included."""
    figures: list[Figure] = []
    setup, whole = tiny(), next(item for item in PARTS if item.name == part)
    chosen = [item for item in whole.cases(setup) if case in item.name]
    run_part(Listed(part, 1, "", cases_of=lambda _: chosen), setup, 60.0, figures.append)
    return figures


class Listed(Part):
    """A part of given cases."""

    def __init__(self, name: str, share: int, about: str, cases_of: Callable[[Setup], list[Case]]) -> None:
        super().__init__(name, share, about)
        object.__setattr__(self, "_cases_of", cases_of)

    def cases(self, setup: Setup) -> list[Case]:
        result: list[Case] = self._cases_of(setup)  # type: ignore[attr-defined]
        return result


# ---- everything, tiny ----------------------------------------------------------------------------------------------


def test_every_part_runs_tiny_without_the_heavy_packages(fork_server: ForkServer, tmp_path: Path) -> None:
    file, log, cache = (tmp_path / name for name in ("gpu.json", "log", "cache"))
    fork_server.run([Call("light_suite:main", (file, BLOCKED), log)], 280, RAYCL_CACHE=str(cache))
    tree = json.loads(file.read_text())
    names = [figure["name"] for figure in tree["figures"]]
    assert list(dict.fromkeys(name.partition(",")[0] for name in names)) == [part.name for part in PARTS]
    assert tree["settings"]["finished"] and tree["missed"] == [] and tree["notes"] == []
    assert all(figure["value"] is not None for figure in tree["figures"])
    assert all(name in log.read_text() for name in names), "each figure is logged when it is known"
    assert not cache.exists(), "nothing is left in the user's cache"
    page = markdown(tree)
    assert all(f"## {part.name}" in page for part in PARTS) and "Targets missed:\n\n- none\n" in page


def test_a_gpu_is_required_and_large_models_do_not_run_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"torch finds no GPU here.*--tiny --device cpu"):
        suite.measure(options("--device", "cuda"))
    large = options()
    large.tiny = False
    with pytest.raises(ConfigError, match="takes hours: add --tiny"):
        suite.measure(large)


# ---- a fast wrong answer is an error -------------------------------------------------------------------------------


def wrong_add(y: Tensor, x: Tensor, a: Tensor, b: Tensor, gate: Tensor, activation: str = "") -> Tensor:
    """Return the mixture layer without the gate."""
    return y + torch.nn.functional.linear(torch.nn.functional.linear(x, a), b.T)


def wrong_gradient(g_NO: Tensor, x_ND: Tensor, rows: Any, *given: Any) -> Tensor:
    """Return twice the gradient, where rows are chosen."""
    return g_NO.T @ x_ND if rows is None else 2 * (g_NO.T @ x_ND)


def wrong_search(similar: Tensor, slots: Tensor, config: Any) -> tuple[Tensor, Tensor]:
    """Return the same weights for all slots."""
    ids = torch.unique(slots)
    return ids, torch.full((len(slots), len(ids)), 1 / len(ids))


WRONG = [
    ("linears", "7B, o", "raycl.adapters.layer.add_shared", wrong_add),
    ("decoding", "prefill", "raycl.adapters.layer.add_shared", wrong_add),
    ("masking", "T5 large, finetune", "raycl.kernels.row_gradient.weight_gradient", wrong_gradient),
    ("routing", "keys", "raycl.routing.slots.sparse_weights", wrong_search),
]


@pytest.mark.parametrize(("part", "case", "function_name", "wrong"), WRONG, ids=[case[0] for case in WRONG])
def test_a_wrong_result_is_a_failure_and_no_figure(
    monkeypatch: pytest.MonkeyPatch, part: str, case: str, function_name: str, wrong: Any
) -> None:
    if part == "routing":
        banks = cycle([drawn_router(LARGE_BANK, routing.SLOTS, routing.GROUPS, routing.TOP_K) for _ in range(2)])
        monkeypatch.setattr(routing, "drawn_router", lambda *sizes: next(banks))  # indexes are built once for both runs
    right = measured(part, case)
    assert right and all(figure.ok is not False for figure in right)
    monkeypatch.setattr(function_name, wrong)
    *before, failure = measured(part, case)
    assert len(before) < len(right) and failure.ok is False
    assert "WrongResultError" in failure.detail and "are left out" in failure.detail


def test_a_token_that_is_not_the_best_one_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches that forget where they are still give tokens as fast."""
    from raycl.generation.static_cache import StaticKVCache

    forward = StaticKVCache._forward

    def lost(slots: StaticKVCache) -> None:
        slots._positions.zero_()
        forward(slots)

    monkeypatch.setattr(StaticKVCache, "_forward", lost)
    (failure,) = measured("decoding", "3 rows")
    assert failure.ok is False and "behind the best one of a plain pass" in failure.detail


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_captured_steps_may_differ_by_rounding_and_no_more(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of wrong graphs are those of decoders that are wrong: a mixture, weights or places of another time."""
    from benchmarks.gpu.parts.decoding import Decoder, Models, check_graphs
    from raycl.generation.static_cache import StaticKVCache

    class Typed(Setup):
        dtype = property(lambda self: dtype)  # type: ignore[assignment]

    models, prompts = Models(Typed(CPU, tiny=True)), [[5, 6, 7], [8, 9, 10]]
    host, mixture = models.mixed["q, v"], models.mixture("q, v", 2)

    def logits(ids: Tensor | None, weights: Tensor = mixture.weights, backbone: Any = host.backbone) -> Any:
        decoder = Decoder(backbone, prompts, 6, host, replace(mixture, weights=weights))
        with torch.no_grad(), ExitStack() as opened:
            decoder.open(opened)
            return decoder, decoder.ids() if ids is None else decoder.logits(ids)

    first, ids = logits(None)
    result = logits(ids)[1]
    check_graphs("right", first, ids, result)
    noise = torch.randn(result.shape, generator=torch.Generator().manual_seed(0)).to(result.dtype)
    rounded = result + noise * result.float().std().to(result.dtype) * (1e-6 if dtype == torch.float32 else 1e-3)
    check_graphs("another kernel", first, ids, rounded)
    stale_row = result.clone()
    stale_row[-1, 1] = result[-2, 1]
    wrong = [logits(ids, mixture.weights.flip(1) * 3)[1], logits(ids, mixture.weights * 0)[1], stale_row]
    forward = StaticKVCache._forward
    monkeypatch.setattr(StaticKVCache, "_forward", lambda slots: (slots._positions.fill_(3), forward(slots)))
    for stale in (*wrong, logits(ids)[1]):
        monkeypatch.setattr(StaticKVCache, "_forward", forward)
        with pytest.raises(WrongResultError, match=r"captured steps lie .* of the logits' norm from eager ones"):
            check_graphs("wrong", first, ids, stale)


def test_a_stream_that_trains_differently_misses_its_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    battery, run = Battery(tmp_path), Battery.run
    seen: list[int | None] = []

    def second_differs(self: Battery, config: Any, device: torch.device, after: int | None = None) -> Any:
        seen.append(after)
        result = run(self, config, device, after)
        loss, norm = result.steps[-1]
        return result if len(seen) != 2 else replace(result, steps=(*result.steps[:-1], (1.01 * loss, norm)))

    assert compare(battery, "bert", "migu, lora", "float32", CPU).value == 0
    monkeypatch.setattr(Battery, "run", second_differs)
    figure = compare(battery, "bert", "migu, lora", "float32", CPU)
    assert figure.ok is False and figure.value == pytest.approx(10, rel=0.01) and "loss 0.01 of 0.001" in figure.detail
    assert seen[:2] == [None, None] and seen[2] == 7, "the third run is killed in the second task and resumed"


# ---- time, memory, packages ----------------------------------------------------------------------------------------


def figures_of(*values: float) -> Callable[[float], Iterator[Figure]]:
    return lambda seconds: (Figure(f"number {value:g}", value) for value in values)


def broken(error: BaseException) -> Callable[[float], Iterator[Figure]]:
    def work(seconds: float) -> Iterator[Figure]:
        yield Figure("before", 1.0)
        raise error

    return work


def run_cases(*cases: Case, seconds: float = 60.0) -> tuple[list[Figure], Setup]:
    figures: list[Figure] = []
    setup = tiny()
    run_part(Listed("part", 1, "", lambda _: list(cases)), setup, seconds, figures.append)
    return figures, setup


def test_out_of_memory_is_noted_and_the_next_case_runs() -> None:
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB.\nmore")
    cases, setup = run_cases(Case("large", broken(error)), Case("small", figures_of(2.0)))
    assert [figure.name for figure in cases] == ["part, before", "part, number 2"]
    assert setup.notes == ["part, large: out of memory, left out (CUDA out of memory. Tried to allocate 20 GiB.)"]


def test_any_other_error_counts_as_a_missed_target_and_the_next_case_runs() -> None:
    cases, _ = run_cases(Case("bad", broken(RuntimeError("an illegal\nmemory access"))), Case("good", figures_of(2.0)))
    assert [figure.ok for figure in cases] == [None, False, None]
    assert cases[1].name == "part, bad: failures" and cases[1].detail == "RuntimeError: an illegal memory access"


def test_skipped_cases_and_missing_packages_are_reported() -> None:
    needs = Case("theirs", figures_of(1.0), needs=("no_such_package",))
    cases, setup = run_cases(needs, Case("second", figures_of(2.0)), Case("third", figures_of(3.0)), seconds=-1.0)
    assert find_spec("no_such_package") is None and cases == []
    assert setup.notes == [
        "part, theirs: left out, since no_such_package is not installed",
        "part: not reached within its time: second, third; give more --minutes",
    ]


def test_a_cut_run_keeps_the_figures_so_far(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    cut = Listed("limits", 1, "", lambda _: [Case("a", figures_of(1.0, 2.0)), Case("b", broken(KeyboardInterrupt()))])
    chosen = options("--json", str(file), "--only", "limits")
    with pytest.raises(KeyboardInterrupt):
        suite.measure(chosen, (cut,))
    tree = json.loads(file.read_text())
    assert [figure["value"] for figure in tree["figures"]] == [1.0, 2.0, 1.0]
    assert tree["settings"]["finished"] is False and list(tmp_path.iterdir()) == [file]


def test_a_run_keeps_to_its_minutes_and_names_what_it_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that takes longer than its time leaves less to the next ones, and too little is left for the last."""
    now, given = [0.0], {}

    def taking(name: str, spent: float, **settings: Any) -> Part:
        def run(seconds: float) -> Iterator[Figure]:
            given[name] = seconds
            now[0] += spent
            yield Figure("number", 1.0)

        listed = Listed(name, 40, "", lambda _: [Case("a", run)])
        for key, value in settings.items():
            object.__setattr__(listed, key, value)
        return listed

    monkeypatch.setattr("benchmarks.gpu.suite.time.monotonic", lambda: now[0])
    parts = (taking("limits", 30), taking("serving", 50), taking("large", 90, least_s=90))
    chosen = options("--only", "limits", "serving", "large", "--minutes", "2")
    chosen.tiny = False
    monkeypatch.setattr(suite, "_device", lambda options: CPU)
    report = suite.measure(chosen, parts)
    assert given == {"limits": pytest.approx((120 - 12) / 3), "serving": pytest.approx((120 - 12 - 30) / 2)}
    assert report.notes == ("large: left out, since 40 s of the time are left and it takes 90; give more --minutes",)
    assert now[0] < 120 and report.settings["finished"]


def test_contenders_take_turns_and_are_warmed_up() -> None:
    calls: list[str] = []
    runs = {
        "a": Contender(lambda: calls.append("a")),
        "b": Contender(lambda: calls.append("b"), lambda: calls.append("-")),
    }
    times = take_turns(runs, CPU, 0.0, ONCE)
    assert calls == ["a", "a", "-", "b", "-", "b", "a", "-", "b"]
    assert all(len(item.seconds) == 1 and item.peak_gib is None for item in times.values())
    assert Times((2.0, 9.0)).over(Times((1.0, 3.0))) == (2.0, 3.0) and quartiles((1.0, 2.0, 3.0, 4.0, 5.0)) == (
        2.0,
        4.0,
    )


# ---- the page ------------------------------------------------------------------------------------------------------


def test_the_page_in_docs_is_made_from_the_figures_in_docs() -> None:
    made = markdown(suite._read(REPO / "docs" / "gpu.json"))
    assert (REPO / "docs" / "gpu.md").read_text() == made


def test_the_parts_are_listed_with_their_minutes_and_reports_are_written(tmp_path: Path) -> None:
    listed = suite.without_measuring(options("--list", "--minutes", "10"))
    assert listed is not None and len(listed.splitlines()) == len(PARTS) + 1
    assert sum(float(line.split()[1]) for line in listed.splitlines()) == pytest.approx(10, abs=0.5)
    page = tmp_path / "gpu.md"
    assert str(page) in str(suite.without_measuring(options("--report", str(page))))
    assert "There are no figures yet" in page.read_text()
    (tmp_path / "gpu.json").write_text('{"name": "stream"}')
    with pytest.raises(ConfigError, match="no JSON of `benchmark gpu`"):
        suite.without_measuring(options("--report", str(page)))
    assert suite.without_measuring(options()) is None


def test_a_mixture_keeps_its_names_on_another_device() -> None:
    mixture = Mixture(("a",), torch.ones(2, 1)).on(torch.device("meta"))
    assert mixture.names == ("a",) and mixture.weights.device.type == "meta"
