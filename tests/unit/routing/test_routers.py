"""The two routers over slots, the sentence encoder, and what a snapshot keeps of them."""

from __future__ import annotations

import copy
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn_routers import drawn_router
from tiny import Lab
from torch import Tensor
from transformers import RobertaConfig, RobertaModel

from raycl.errors import BankError, RetrievalError
from raycl.methods.slm.slm import newest_rows, plane, text_plane
from raycl.routing import statistics
from raycl.routing.code_index import EXACT_UP_TO, KeyIndex
from raycl.routing.routers import make_router, without
from raycl.routing.sentence_encoder import EncoderConfig, SentenceEncoder
from raycl.routing.slot_keys import KeyConfig
from raycl.routing.slot_weights import RetrievalConfig, slot_weights
from raycl.routing.slots import KINDS, Kind, SlotRouter
from raycl.routing.statistics import DIRECTIONS, BareTexts, Discriminant, NearestTasks, Statistics
from raycl.types import Mixture, RouterState

TASKS = {"one": 0, "two": 1, "three": 2}
KEYS = KeyConfig(groups=2, slots=3, rate=5e-3, steps=300)


def texts_of(task: str, count: int = 80, seed: int = 0) -> Tensor:
    """Return queries around a centre of the task, in a covariance that all share."""
    draw = torch.Generator().manual_seed(100 + TASKS[task])
    centre = torch.randn(1, 16, generator=draw)
    noise = torch.Generator().manual_seed(seed + TASKS[task])
    return centre + 0.5 * torch.randn(count, 16, generator=noise)


def studied(kind: Kind, tasks: list[str], **settings: object) -> SlotRouter:
    """Return a router of its own that has learned the tasks in this order; they are learned once in this file."""
    return copy.deepcopy(_studied(kind, tuple(tasks), tuple(settings.items())))


@cache
def _studied(kind: Kind, tasks: tuple[str, ...], settings: tuple[tuple[str, object], ...]) -> SlotRouter:
    router = SlotRouter(kind, 2, RetrievalConfig.model_validate({"top_k": 2, **dict(settings)}))
    for task in tasks:
        router.fit(task, texts_of(task), KEYS, seed=TASKS[task])
    return router


def share(router: SlotRouter, task: str) -> float:
    """Return the mean weight on a task's own slots, for texts that were not studied."""
    mixture = router.route(texts_of(task, 50, seed=9))
    mine = [column for column, name in enumerate(mixture.names) if name.startswith(f"{task}.")]
    return float(mixture.weights[:, mine].sum(1).mean())


@pytest.mark.parametrize("kind", ["keys", "discriminant"])
def test_texts_find_their_task(kind: Kind) -> None:
    router = studied(kind, list(TASKS))
    assert router.route(texts_of("one", 2)).names == tuple(f"{task}.{slot}" for task in TASKS for slot in range(3))
    for task in TASKS:
        assert share(router, task) > (0.95 if kind == "discriminant" else 0.6)


@pytest.mark.parametrize("kind", ["keys", "discriminant"])
def test_stored_statistics_route_the_same(kind: Kind) -> None:
    router, queries = studied(kind, list(TASKS)), texts_of("two", 20, seed=3)
    state = RouterState(kind, router.settings(), router.tensors())
    again = SlotRouter.restored(state)
    assert again.route(queries).names == router.route(queries).names
    assert torch.equal(again.route(queries).weights, router.route(queries).weights)
    smaller = SlotRouter.restored(without(state, "two"))
    assert smaller.tasks == ["one", "three"]
    fresh = studied(kind, ["one", "three"])
    assert torch.equal(smaller.route(queries).weights, fresh.route(queries).weights), "as if it had never been learned"


@pytest.mark.parametrize("kind", ["keys", "discriminant"])
def test_the_confusion_has_the_weight_of_dev_texts_on_each_task(kind: Kind) -> None:
    router = studied(kind, list(TASKS))
    router.hold_out("one", torch.cat([texts_of("one", 30, seed=5), texts_of("two", 10, seed=6)]))
    router.hold_out("three", texts_of("three", 8, seed=7))
    confusion = router.confusion()
    assert list(confusion[kind]) == ["one", "three"], "tasks without dev texts are left out"
    for task, dev_BC in router.dev.items():
        router.kind = kind
        mixture = router.route(dev_BC)
        for other in TASKS:
            own = [number for number, name in enumerate(mixture.names) if name.startswith(f"{other}.")]
            weight = 100 * float(mixture.weights[:, own].sum(1).mean())
            assert confusion[kind][task].get(other, 0.0) == pytest.approx(weight, abs=0.05), (task, other)
    shares = router.own_shares(confusion)
    assert shares == router.own_shares()
    assert shares[kind] == {task: confusion[kind][task][task] for task in ("one", "three")}
    assert 65 < shares["discriminant"]["one"] < 80, "a quarter of its texts are another task's"
    assert {kind: set(by_task) for kind, by_task in shares.items()} == {kind: {"one", "three"} for kind in shares}


def test_the_router_that_gives_other_tasks_weight_is_not_selected() -> None:
    """Both kinds find each text's task, but keys give the best slot of the other task a third of the weight too."""
    keys, router = torch.tensor([[1.0, 0.0, 0.0], [0.6, 0.8, 0.0]]), SlotRouter("keys", 1, RetrievalConfig(top_k=2))
    draw = torch.Generator().manual_seed(0)
    for key_C, task in zip(keys, ("one", "two"), strict=True):
        texts_BC = key_C + 0.01 * torch.randn(40, 3, generator=draw)
        router.add(task, key_C[None, None], Statistics.of(texts_BC))
        router.hold_out(task, texts_BC)
    for number, texts_BC in enumerate(router.dev.values()):
        assert all(bool((router.task_weights(kind, texts_BC).argmax(1) == number).all()) for kind in KINDS)
    shares = router.own_shares()
    assert shares["keys"]["one"] == pytest.approx(100 / 1.6, abs=1) and shares["discriminant"]["one"] > 99
    router.select()
    assert router.kind == "discriminant"
    alone = SlotRouter("keys", 1, RetrievalConfig(top_k=2))
    alone.take("one", router)
    alone.select()
    assert alone.kind == "keys", "the paper's where they are equal"


def test_statistics_do_not_depend_on_the_order_of_tasks() -> None:
    queries = texts_of("one", 30, seed=4)
    forward, backward = (
        studied("discriminant", ["one", "two", "three"]),
        studied("discriminant", ["three", "two", "one"]),
    )
    weights = [
        dict(zip(mixture.names, mixture.weights.T, strict=True))
        for mixture in (forward.route(queries), backward.route(queries))
    ]
    for name, column in weights[0].items():
        torch.testing.assert_close(column, weights[1][name], atol=1e-5, rtol=1e-4)


def test_discriminant_is_linear_discriminant_analysis() -> None:
    from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

    queries = torch.cat([torch.nn.functional.normalize(texts_of(task), dim=1) for task in TASKS]).double()
    labels = [number for number in TASKS.values() for _ in range(80)]
    mine = Discriminant({task: Statistics.of(texts_of(task)) for task in TASKS})
    theirs = LinearDiscriminantAnalysis(solver="lsqr", priors=[1 / 3] * 3).fit(queries.numpy(), labels)
    fresh = torch.cat([texts_of(task, 40, seed=7) for task in TASKS])
    best = mine.scores(fresh).argmax(1)
    expected = torch.from_numpy(theirs.predict(torch.nn.functional.normalize(fresh, dim=1).numpy()))
    assert float((best == expected).float().mean()) > 0.98, "but for the ridge"


@pytest.mark.parametrize("width", [16, DIRECTIONS + 8, 3 * DIRECTIONS + 50])
def test_outlines_of_bare_texts_find_the_task(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the directions in which texts vary most, a difference of tasks counts little.

    The widest texts have more dimensions than are read: 96 here, for 1024 of them take a second.
    """
    monkeypatch.setattr(statistics, "WIDEST", 3 * DIRECTIONS)
    names, draw = tuple(TASKS), torch.Generator().manual_seed(0)
    loud, centres = torch.full((width,), 0.5), torch.randn(3, width, generator=draw)
    loud[:3] = 6 * width**0.5
    learned, fresh = (30 + centres[:, None] + loud * torch.randn(3, 90, width, generator=draw) for _ in range(2))
    bare = BareTexts()
    assert bare.weights(names, fresh[0]) is None and bare.weights((), fresh[0]) is None
    for name, queries in zip(names, learned, strict=True):
        bare.add(name, queries)
    mixture = bare.weights(names, fresh.flatten(0, 1))
    assert mixture is not None and mixture.names == names
    torch.testing.assert_close(mixture.weights.sum(1), torch.ones(270))
    right = mixture.weights.argmax(1) == torch.arange(3).repeat_interleave(90)
    means = learned.mean(1)
    nearest = torch.cdist(fresh.flatten(0, 1), means).argmin(1) == torch.arange(3).repeat_interleave(90)
    assert float(right.float().mean()) > 0.9 > 0.7 > float(nearest.float().mean())
    item = bare.weights(names, fresh[1, :1])
    assert item is not None
    torch.testing.assert_close(item.weights, mixture.weights[90:91])
    again = BareTexts.of({**bare.tensors(), "key/one": centres[0]})
    weights = again.weights(names, fresh.flatten(0, 1))
    assert weights is not None and torch.equal(weights.weights, mixture.weights)
    assert again.weights((*names, "four"), fresh[0]) is None, "of a task without an outline nothing is known"
    left = without(RouterState("attention", {}, bare.tensors()), "two").tensors
    assert left.keys() == {name for name in bare.tensors() if not name.endswith("/two")}


def test_bare_texts_of_no_task_are_found_by_their_distance() -> None:
    draw = torch.Generator().manual_seed(0)
    centres = torch.randn(3, 16, generator=draw)
    near, dev, other = (centres[:, None] + 0.3 * torch.randn(3, 90, 16, generator=draw) for _ in range(3))
    bare = BareTexts()
    for number, name in enumerate(("one", "two")):
        bare.add(name, near[number], dev[number][:40])
    queries = torch.cat([other[0], other[2]])
    rated = bare.rated(Mixture(("one",), torch.ones(180, 1)), queries)
    assert rated.ood_distances is not None and rated.ood_scores is not None
    unknown = rated.ood_distances > bare.calibrated().threshold(0.05)
    assert float(unknown[:90].float().mean()) < 0.15 < 0.95 < float(unknown[90:].float().mean())
    assert float(rated.ood_scores[90:].mean()) > 0.95
    again = BareTexts.of(bare.tensors()).rated(Mixture(("one",), torch.ones(180, 1)), queries)
    assert again.ood_distances is not None and torch.equal(again.ood_distances, rated.ood_distances)
    bare.add("one", near[0])
    bare.add("two", near[1])
    assert bare.rated(rated, queries) is rated, "nothing to compare with"
    with pytest.raises(RetrievalError, match="keeps no dev texts"):
        bare.calibrated()


def test_texts_of_no_task_are_far_away() -> None:
    mine = Discriminant({task: Statistics.of(texts_of(task)) for task in ("one", "two")})
    near, far = (mine.relative_distances(queries) for queries in (texts_of("one", 40, seed=8), texts_of("three", 40)))
    assert float(near.median()) < float(far.median()) and float((far > near.quantile(0.9)).float().mean()) > 0.8


def test_with_the_task_id_its_task_is_the_only_candidate() -> None:
    """SLM-TI equals SLM where all slots of the task are chosen and no others."""
    router = studied("keys", list(TASKS))
    queries = texts_of("one", 3)
    told = router.route(queries, ["two", "one", "three"]).weights
    for row, task in enumerate(["two", "one", "three"]):
        alone = studied("keys", [task])
        mine = slice(3 * TASKS[task], 3 * TASKS[task] + 3)
        torch.testing.assert_close(told[row, mine], alone.route(queries[row : row + 1]).weights[0])
        assert float(told[row].sum()) == pytest.approx(1) and float(told[row, mine].sum()) == pytest.approx(1)
    with pytest.raises(RetrievalError, match="no keys of four: expected some of one, two, three"):
        router.route(queries, ["four"] * 3)
    with pytest.raises(RetrievalError, match="no task has been learned yet"):
        SlotRouter("keys", 2, RetrievalConfig()).route(queries)


@pytest.fixture(scope="module")
def minilm() -> Callable[[str], tuple[Tensor, ...]]:
    """The hidden states of all layers of the packaged encoder, as transformers computes them for one text."""
    from transformers import AutoModel, AutoTokenizer

    from raycl.backbone.model_files import folder_of

    tokenizer, model = (kind.from_pretrained(folder_of("minilm")) for kind in (AutoTokenizer, AutoModel))

    def states(text: str) -> tuple[Tensor, ...]:
        with torch.no_grad():
            found: tuple[Tensor, ...] = model(
                **tokenizer([text], return_tensors="pt"), output_hidden_states=True
            ).hidden_states
        return found

    return states


@pytest.mark.parametrize(("layer", "number"), [("last", -1), ("auto", 4), (0, 0)])
def test_the_packaged_encoder_gives_means_over_real_tokens(
    tmp_path: Path, minilm: Callable[[str], tuple[Tensor, ...]], layer: Any, number: int
) -> None:
    encoder = SentenceEncoder(EncoderConfig(max_tokens=16, layer=layer), tmp_path)
    texts = ["a short one", "", "a longer text about the price of bread in the city " * 4, "a short one"]
    queries = encoder.embed(texts)
    assert queries.shape == (4, encoder.width) and torch.equal(queries[0], queries[3])
    assert encoder.truncated == 1
    torch.testing.assert_close(encoder._computed(texts[:1])[0], queries[0], atol=1e-5, rtol=1e-4)
    cosine = torch.nn.functional.cosine_similarity(minilm(texts[0])[number].mean(1), queries[:1])
    assert float(cosine) == pytest.approx(1, abs=1e-6)


def test_many_texts_are_encoded_once_by_all_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [f"text number {number % 7}" for number in range(10)]
    distinct = texts[:7]
    single = SentenceEncoder(EncoderConfig())
    parts = [single.embed(distinct[rank::2]) for rank in range(2)]
    for rank in range(2):
        encoder, seen = SentenceEncoder(EncoderConfig(), tmp_path), []
        encoder.embed_all(texts, (rank, 2), lambda part, seen=seen: seen.append(part) or [(held, 1) for held in parts])  # type: ignore[misc]
        assert len(seen) == 1 and torch.allclose(seen[0][0], parts[rank], atol=1e-5)
        assert encoder.truncated == 2, "every worker's count, once"
    again = SentenceEncoder(EncoderConfig(), tmp_path)
    monkeypatch.setattr(again, "_computed", lambda texts: pytest.fail(f"{texts} were encoded again"))
    queries = again.embed_all(texts, (0, 2), lambda part: [(held, 0) for held in parts])
    torch.testing.assert_close(queries, single.embed(texts), atol=1e-5, rtol=1e-4)
    (tmp_path / "file").touch()
    without = SentenceEncoder(EncoderConfig(), tmp_path / "file" / "folder")
    monkeypatch.setattr(without, "_computed", single.embed)
    assert torch.equal(without.embed_all(texts, (0, 1), lambda part: [part]), single.embed(texts)), "nothing is kept"


def test_an_encoder_that_breaks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = SentenceEncoder(EncoderConfig())
    monkeypatch.setattr(encoder, "_passed", lambda texts: torch.full((len(texts), 384), torch.nan))
    with pytest.raises(RetrievalError, match="not finite for the text 'hello'"):
        encoder.embed(["hello"])


def test_a_missing_layer_is_an_error() -> None:
    with pytest.raises(RetrievalError, match=r"encoder.layer=7, but 'minilm' has layers 0 to 6: name one of them"):
        SentenceEncoder(EncoderConfig(layer=7)).embed(["hello"])


def test_another_encoder_than_the_keys_were_made_with_is_refused() -> None:
    router = studied("keys", ["one"])
    encoder = EncoderConfig().model_dump(mode="json")
    state = RouterState("keys", router.settings(), router.tensors(), encoder, "0" * 64)
    with pytest.raises(RetrievalError, match=r"computed with 'minilm' \(000000000000\)"):
        make_router(state, {})
    with pytest.raises(BankError, match="must name its sentence encoder"):
        make_router(replace(state, encoder=None), {})
    with pytest.raises(BankError, match="unknown router kind 'oracle': expected one of 14"):
        make_router(replace(state, kind="oracle"), {})


@pytest.mark.parametrize(("kind", "more"), [("keys", 1), ("keys", 3), ("discriminant", 1), ("discriminant", 3)])
def test_a_large_bank_is_searched_with_the_same_weights(kind: Kind, more: int) -> None:
    """The weights are equal where tasks have different numbers of slots, too."""
    router, texts = drawn_router(kind, 1500, more=more)
    texts = texts[: 200 if kind == "keys" else 20]
    similar, owner = router.similar(texts), router.joined_on(texts.device).owner
    names = [slot for task in router.tasks for slot in router.slots(task)]
    assert len(names) > EXACT_UP_TO, "codes are compared"
    dense = slot_weights(similar, router.config)
    if kind == "discriminant":
        chances = router.discriminant.nearest(texts, 2).chances(2, 1500)
        dense = torch.zeros_like(dense)
        for task in chances.any(0).nonzero().flatten().tolist():
            mine = (owner == task).expand(len(texts), -1)
            dense += chances[:, task, None] * slot_weights(similar, router.config, mine)
    sparse = router.route(texts)
    assert len(sparse.names) < len(names)
    spread = torch.zeros_like(dense)
    columns = {name: column for column, name in enumerate(names)}
    spread[:, [columns[name] for name in sparse.names]] = sparse.weights
    equal = torch.isclose(spread, dense, atol=1e-5, rtol=1e-4).all(1).float().mean()
    assert float(equal) >= (1.0 if kind == "discriminant" else 0.97), "some of the nearest keys may be missed"
    few = router.route(texts[:2])
    assert len(few.names) <= 2 * 2 * (2 + more), "only slots that a text selected have a column"


@pytest.mark.parametrize("scope", ["instance", "batch"])
@pytest.mark.parametrize("similarity", ["cosine", "softmax"])
@pytest.mark.parametrize(
    ("rule", "per_group"), [("group_union", False), ("group_union", True), ("group_mean", False), ("vote", False)]
)
def test_a_discriminant_weighs_slots_as_its_rule_says_within_each_task(
    rule: str, per_group: bool, similarity: str, scope: str
) -> None:
    """Under every rule: the weights with the task given, times how probable the task is."""
    router, texts = drawn_router("discriminant", 12, more=3)
    router.config = RetrievalConfig.model_validate({"rule": rule, "similarity": similarity, "scope": scope})
    router.per_group = per_group
    similar, owner = router.similar(texts), router.joined_on(texts.device).owner
    chances = router.discriminant.nearest(texts, 2).chances(2, 12)
    expected = torch.zeros_like(router.route(texts).weights)
    for task in range(12):
        mine = (owner == task).expand(len(texts), -1)
        expected += chances[:, task, None] * slot_weights(similar, router.config, mine, per_group)
    torch.testing.assert_close(router.route(texts).weights, expected, atol=1e-6, rtol=1e-5)


def test_the_approximate_index_finds_what_it_promises() -> None:
    router, texts = drawn_router("keys", 1500)
    parts = texts.view(-1, 2, 8)
    keys = torch.cat(list(router.keys().values()))
    exact, index = KeyIndex(keys[:EXACT_UP_TO], 2), KeyIndex(keys, 2)
    assert exact.exact and exact.recall == 1 and not index.exact and index.recall >= 0.99
    cosines, slots = index.search(parts, 2)
    unit, unit_keys = (torch.nn.functional.normalize(rows, dim=-1) for rows in (parts, keys))
    nearest = torch.einsum("bgh,ngh->bgn", unit, unit_keys).topk(2).indices
    assert float((slots[..., :, None] == nearest[..., None, :]).any(-1).float().mean()) > 0.98
    torch.testing.assert_close(cosines[:, 0, 0], (unit[:, 0] * unit_keys[slots[:, 0, 0], 0]).sum(-1))  # scored exactly
    assert exact.search(parts[:1], 10_000)[0].shape == (1, 2, EXACT_UP_TO), "K is capped at the bank"


def test_a_discriminant_over_thousands_of_tasks_finds_the_nearest_by_codes() -> None:
    """Scores are exact, and so are the distances, which need the nearest task alone."""
    router, texts = drawn_router("discriminant", EXACT_UP_TO + 100)
    texts, discriminant = texts[:300], router.discriminant
    scores_BT = discriminant.scores(texts)
    found, exact = discriminant.nearest(texts, 4), scores_BT.topk(4)
    assert float((found.tasks[..., :, None] == exact.indices[..., None, :]).any(-1).float().mean()) > 0.98
    torch.testing.assert_close(found.scores, scores_BT.gather(1, found.tasks), atol=1e-4, rtol=1e-5)
    all_of_them = discriminant.relative_distances(texts, NearestTasks(exact.values, exact.indices))
    assert float(torch.isclose(discriminant.relative_distances(texts), all_of_them).float().mean()) > 0.98


def test_maps_of_keys() -> None:
    router = studied("keys", list(TASKS))
    rows, points = torch.tensor(newest_rows(router)), plane(router)
    assert rows.shape == (3, 9) and rows[:, 6:].diagonal().tolist() == pytest.approx([1.0] * 3, abs=1e-3)
    first, second, own = rows.unflatten(1, (3, 3)).mean((0, 2)).tolist()
    assert own > max(first, second), "slots are most like those of their own task"
    assert len(points) == 3 * 3 * 2 and {point["slot"] for point in points} == set(router.route(texts_of("one")).names)


def test_a_map_of_texts_has_equal_shares_of_the_dev_texts_of_each_task() -> None:
    router = studied("keys", list(TASKS))
    assert text_plane(router) == [], "no dev texts"
    for task, count in (("one", 4), ("two", 3), ("three", 200)):
        router.hold_out(task, torch.randn(count, 384))
    assert Counter(point["task"] for point in text_plane(router)) == {"one": 4, "two": 3, "three": 200 // 3}


def test_memory_of_texts_has_an_end() -> None:
    encoder = SentenceEncoder(EncoderConfig(), keeps=3)
    assert encoder.embed([f"text {number}" for number in range(5)]).shape == (5, 384)
    assert list(encoder._known) == ["text 2", "text 3", "text 4"]


def test_layers_above_the_one_that_is_read_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["a cat sleeps", "where is the station and when does the train leave", ""]
    short = SentenceEncoder(EncoderConfig())
    queries = short.embed(texts)
    assert len(short._model[0].auto_model.encoder.layer) == 4, "MiniLM has six layers, the fourth is read"
    monkeypatch.setattr(SentenceEncoder, "_shorten", lambda self: None)
    whole = SentenceEncoder(EncoderConfig())
    assert torch.equal(whole.embed(texts), queries)
    assert len(whole._model[0].auto_model.encoder.layer) == 6
    with pytest.raises(RetrievalError, match="layers 0 to 6: name one of them"):
        SentenceEncoder(EncoderConfig(layer=7)).embed(texts)


def test_router_sum_activates_all_adapters_without_reading_texts() -> None:
    state = RouterState("sum", {"head_rule": "logit"})
    mixture = make_router(state, {"one": ("one",), "two": ("two",)}).route(["a", "b", "c"], None)
    assert mixture.names == ("one", "two") and torch.equal(mixture.weights, torch.ones(3, 2))
    assert without(state, "one") == state


def test_an_encoder_truncates_to_its_positions(lab: Lab, tmp_path: Path) -> None:
    roberta = shutil.copytree(lab.model_folder("bert"), tmp_path / "roberta")
    settings = {"vocab_size": 40, "hidden_size": 8, "intermediate_size": 8, "pad_token_id": 0}
    layers = {"num_hidden_layers": 1, "num_attention_heads": 1, "max_position_embeddings": 64}
    RobertaModel(RobertaConfig(**settings, **layers)).save_pretrained(roberta)
    for folder in (lab.model_folder("bert"), roberta):
        encoder = SentenceEncoder(EncoderConfig(name=str(folder), max_tokens=256))
        assert torch.isfinite(encoder.embed(["fire " * 200])).all() and encoder.truncated == 1
