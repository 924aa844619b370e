"""SLM: weight increments in slots, chosen and mixed for each text by the keys of its task (section 3 of its paper).

"Scalable Language Model with Generalized Continual Learning", ICLR 2024.
Each task learns m slots: LoRA pairs on the attention output projection without a scale factor, with label-head rows of
their own where the backbone is an encoder, and frozen keys from a frozen sentence encoder. Nothing of earlier tasks is
touched or replayed, and no task id is needed at test. Where the authors' code differs from the paper (choice per
batch, heads picked by the true number of labels, drifting old slots), this follows the paper.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from raycl.adapters.head import MixedHead
from raycl.adapters.head import Rule as HeadRule
from raycl.adapters.soft_prompts import How as PromptMixing
from raycl.adapters.soft_prompts import PromptForm
from raycl.backbone import Backbone
from raycl.bank.tensor_groups import TensorGroups
from raycl.config import Size, Tree
from raycl.data.sources.cache import cache_folder
from raycl.errors import ConfigError
from raycl.methods.base import Learned, RouterTextSetting, State, under
from raycl.methods.context import TaskContext
from raycl.methods.lora_settings import Rank, TargetModules
from raycl.methods.per_task_adapter import AdapterForm, PerTaskAdapter, PromptFormSetting, StartSettings
from raycl.methods.trained_adapters import is_trainable
from raycl.routing.routers import without
from raycl.routing.score_summary import QUANTILES
from raycl.routing.sentence_encoder import EncoderConfig, SentenceEncoder
from raycl.routing.slot_keys import KeyConfig, check_keys, cosines, split_groups
from raycl.routing.slot_weights import RetrievalConfig
from raycl.routing.slots import Kind, SlotRouter
from raycl.routing.statistics import Statistics
from raycl.types import Activation, AdapterState, Batch, Mixture, Phase, RouterState

ACTIVATIONS: dict[str, Activation] = {"adapter": "relu", "prefix": "softmax"}
"""Value of a slot -> activation of its adapters, where they are no weight increments."""


class SlmConfig(StartSettings):
    """SLM: memory slots selected for each text (sections 3.2 and 4.2, tables 10 and 14, the authors' scripts)."""

    name: Literal["slm"] = "slm"
    r: Rank = Field(8, description="the rank of each slot; the paper: 12 for BERT, 8 for LLaMA")
    r_by_task: dict[str, Size] = Field(
        default_factory=dict, description="task name -> r, where it differs (SLM, appendix A.9)"
    )
    a_init_std: float = Field(1.0, gt=0, description="standard deviation of A's initial values; B starts at 0")
    value: Literal["jare", "adapter", "prefix", "prompt"] = Field(
        "jare",
        description="what a slot stores. jare: weight increments; adapter: bottleneck adapters in parallel to the "
        "linears; prefix: keys and values that attention reads in addition to the text's, as in LLaMA-Adapter (the "
        "paper's DTKR+Adapter is either); prompt: a soft prompt (DTKR+Prompt). The paper uses retrieval.rule=vote with "
        "the last three, without distance weights",
    )
    prompt_length: int = Field(10, ge=1, description="positions of a slot's soft prompt or prefix")
    prompt_length_by_task: dict[str, Size] = Field(
        default_factory=dict, description="task name -> prompt_length, where it differs"
    )
    prompt_mixing: PromptMixing = Field(
        "concat",
        description="value=prompt: concat: the prompts of all selected slots stand in front of the text, one after "
        "another, without weights (the paper's DTKR+Prompt); sum: their weighted sum, whose length stays",
    )
    prompt_form: PromptFormSetting = "plain"
    target_modules: TargetModules = ("attention.out",)
    router: Literal["keys", "discriminant", "auto"] = Field(
        "auto",
        description="what selects slots at test; auto: keys or discriminant, whichever gives the slots of dev "
        "texts' own tasks more weight",
    )
    train_scope: Literal["own", "seen", "all"] = Field(
        "own",
        description="slots that compete while a task is trained. own: the task's; seen: those of all tasks so "
        "far; all: those of the whole stream, as in the released BERT code, which reads texts of "
        "later tasks",
    )
    value_layout: Literal["shared", "per_group"] = Field(
        "shared", description="shared: one value per slot; per_group: one value per sub-key"
    )
    router_text: RouterTextSetting = "input"
    head_rule: HeadRule = Field(
        "probability",
        description="how label heads of an encoder-only backbone are mixed; label_count: as released, one head "
        "for each number of labels, chosen by the text's own task (it leaks the task id)",
    )
    keys: KeyConfig = KeyConfig()
    retrieval: RetrievalConfig = RetrievalConfig()
    encoder: EncoderConfig = EncoderConfig()

    label_head: ClassVar[tuple[str, ...]] = ("head_rule",)
    needs_texts: ClassVar[bool] = True
    own_statistics: ClassVar[bool] = True

    by_task: ClassVar[tuple[str, ...]] = ("r_by_task", "prompt_length_by_task", "keys.slots_by_task")

    unused_for_single_task: ClassVar[tuple[str, ...]] = ("keys.centrifugal", *StartSettings.unused_in_first_phase)
    """There are no keys of other tasks."""

    def cache_key(self, index: int, tasks: Sequence[str], learns_texts: bool = False) -> Tree:
        """Return the settings that matter; the first task has no earlier keys."""
        settings = super().cache_key(index, tasks, learns_texts)
        if index == 0 and not self.fits_ahead:
            settings["keys"] = {key: value for key, value in settings["keys"].items() if key != "centrifugal"}
        return settings

    def prompt_positions(self, tasks: int) -> int:
        if self.value != "prompt":
            return 0
        longest = max(self.prompt_length, *self.prompt_length_by_task.values(), 0)
        selected = self.retrieval.top_k * (self.keys.groups if self.retrieval.rule == "group_union" else 1)
        slots = max(self.keys.slots, *self.keys.slots_by_task.values(), 0) * tasks
        return longest * (min(selected, slots) if self.prompt_mixing == "concat" else 1)

    def unused_settings(self) -> Iterator[tuple[str, str]]:
        """Yield what slots of another kind hold."""
        yield from super().unused_settings()
        rank, length = ("r", "r_by_task"), ("prompt_length", "prompt_length_by_task")
        prompt = ("prompt_mixing", "prompt_form")
        others = {"prompt": (*rank, "a_init_std", "target_modules"), "prefix": (*rank, *prompt)}.get(self.value)
        yield from ((name, f"value={self.value}") for name in others or (*length, *prompt))

    @property
    def needs_task(self) -> bool:
        """Return whether the task id is needed, where `retrieval.task_id` chooses the slots, or the task picks the
        label head."""
        return self.retrieval.task_id or self.head_rule == "label_count"

    @property
    def chooses_task(self) -> bool:
        return not self.needs_task

    @property
    def sentence_encoder(self) -> EncoderConfig:
        """The encoder of the queries."""
        return self.encoder

    @property
    def independent_tasks(self) -> bool:
        """Slots that are trained alone, with keys and label heads of their own."""
        alone = self.train_scope == "own" and self.head_rule != "label_count" and not self.keys.centrifugal
        return alone and self.start_from == "new"

    @property
    def selects_router(self) -> bool:
        return self.router == "auto"

    @property
    def fits_ahead(self) -> bool:
        return self.train_scope == "all"


class Slm(PerTaskAdapter):
    """Memory slots over a frozen backbone."""

    Config = SlmConfig

    def __init__(self, config: SlmConfig, backbone: Backbone, seed: int) -> None:
        """Attach the stack.

        Raises:
            RetrievalError: sizes of keys and encoder that do not fit. ConfigError: settings that contradict each other.
        """
        check_keys(config.keys, config.retrieval.top_k)
        if config.value_layout == "per_group" and config.retrieval.rule != "group_union":
            raise ConfigError("method.value_layout=per_group needs method.retrieval.rule=group_union")
        is_prompt = config.value == "prompt"
        activation: Activation = ACTIVATIONS.get(config.value, "")
        device = "cuda" if backbone.device.type == "cuda" else "cpu"
        encoder = SentenceEncoder(config.encoder, cache_folder(None) / "queries", device)
        split_groups(torch.zeros(1, encoder.width), config.keys.groups)
        targets = () if is_prompt else config.target_modules
        mixing = config.prompt_mixing if is_prompt else None
        super().__init__(config, backbone, seed, AdapterForm(targets, 1.0, config.head_rule, activation, mixing))
        self.join_task = self._joined
        self.encoder: SentenceEncoder = encoder
        per_group = config.value_layout == "per_group"
        kind: Kind = "discriminant" if config.router == "discriminant" else "keys"
        self.router: SlotRouter = SlotRouter(kind, config.keys.groups, config.retrieval, per_group)
        self._ahead = SlotRouter(kind, config.keys.groups, config.retrieval, per_group)

    @property
    def _knows_task(self) -> bool:
        return self.task_id_given or bool(self.config.retrieval.task_id)

    def begin_task(self, phase: Phase, context: TaskContext) -> None:
        """Fit the task's keys to its texts, without labels; then train its own slots alone."""
        if not context.resumed:
            for other_phase in context.phases:
                self.fit(
                    other_phase, context.queries[other_phase.index]["train"], context.queries[other_phase.index]["dev"]
                )
            if self.config.fits_ahead:
                self.router.take(phase.name, self._ahead)
            if self.config.start_from == "nearest":
                means = self.router.means()
                mean_C = means.pop(phase.name)
                self._find_start(phase.name, mean_C, means, self.config.start_threshold)
        super().begin_task(phase, context)
        self._start(context, self.config.start_trial_steps)

    def fit(self, phase: Phase, queries_NC: Tensor, dev_MC: Tensor) -> None:
        """Fit keys of a phase to queries of its training texts; those of its dev texts are kept to compare routers."""
        router, config = self._ahead if self.config.fits_ahead else self.router, self.config.keys.of(phase.name)
        if self.task_id_given:  # keys of other tasks never compete
            config = config.model_copy(update={"centrifugal": 0.0})
        router.fit(phase.name, queries_NC, config, self.seed + phase.index)
        router.hold_out(phase.name, dev_MC)

    def allocate(self, phase: Phase) -> None:
        """Create the slots of a task without learning their keys."""
        keys, blank = self.config.keys.of(phase.name), torch.zeros(1, self.encoder.width)
        rows_1gH = split_groups(blank, keys.groups)
        self.router.add(phase.name, rows_1gH.expand(keys.slots, -1, -1), Statistics.of(blank))
        super().allocate(phase)

    def _create(self, task: str) -> None:
        length = self.config.prompt_length_by_task.get(task, self.config.prompt_length)
        rank = length if self.config.value == "prefix" else self.config.r_by_task.get(task, self.config.r)
        ranks = dict.fromkeys(self.router.adapters(task), rank)

        def fill(low: Tensor, outputs: int) -> None:  # as the released code does; most others draw Kaiming-uniform
            torch.nn.init.normal_(low, std=self.config.a_init_std)

        self.stack.begin_training(ranks, self.scale, fill)
        if self.config.value == "prompt":
            form = PromptForm(self.config.prompt_form)
            self._begin_prompts(len(ranks), length, form)

    def _pairs(self, task: str, known: str) -> dict[str, str]:
        """Slots begin with the slot of the known task whose keys are most similar."""
        return dict(zip(self.router.adapters(task), self.router.nearest_slots(task, known), strict=True))

    def _number(self) -> int:
        return self.tasks_elsewhere + len(self.router.tasks)

    def _shared_head(self, labels: Sequence[str]) -> AdapterState | None:
        """Rule `label_count`: the first head with so many labels is shared by all slots."""
        if self.config.head_rule != "label_count":
            return None
        return next((state for state in self._learned.values() if len(state.labels) == len(labels)), None)

    def _is_trained(self, name: str, parameter: Tensor) -> bool:
        head = self.backbone.head
        is_frozen = isinstance(head, MixedHead) and head.frozen and name.startswith("head.")
        return is_trainable(name, parameter) and not is_frozen

    def route(self, batch: Batch) -> Mixture:
        """Slots by each text's query: among the task's own, or those of all tasks so far, or of the whole stream.

        Slots of later tasks get weight but have no adapters yet.
        """
        queries, config = self.encoder.embed(batch.texts), self.config
        if config.fits_ahead:
            mixture = self._ahead.route(queries).over(self._learned.keys() | self.stack.trainable.keys())
        else:
            mixture = self.router.route(queries, [self._task] * len(batch) if config.train_scope == "own" else None)
        if config.head_rule != "label_count" or self.backbone.head is None:
            return mixture
        return replace(mixture, heads=(self.router.adapters(self._task)[0],) * len(batch))

    def end_task(self, context: TaskContext) -> Learned:
        """Slots are frozen, and go to the bank with their label rows; router `auto` is selected by dev texts."""
        states = self._freeze(context)
        self._select()
        return self._published(context, states)

    def _select(self) -> None:
        if self.config.router == "auto":
            self.router.select()

    def _joined(self, values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Learned:
        """Take over the task's keys too, and select the router again, by the dev texts of all tasks so far."""
        alone = _restored(RouterState(values["router"]["kind"], values["router"]["settings"]), tensors)
        for task in alone.tasks:
            self.router.take(task, alone)
        self._select()
        return super()._joined(values, tensors)

    def _router(self) -> RouterState:
        settings = self.router.settings()
        settings["retrieval"]["task_id"] = self._knows_task
        settings["head_rule"] = self.config.head_rule
        if self.config.value == "prompt" and self.config.prompt_mixing == "concat":
            groups = 1 if self.config.retrieval.rule != "group_union" else self.config.keys.groups
            settings |= {"prompt_mixing": "concat", "top_k": groups * self.config.retrieval.top_k}
        encoder = self.config.encoder.model_dump(mode="json")
        return RouterState(self.router.kind, settings, self.router.tensors(), encoder, self.encoder.fingerprint)

    def summary(self, observed: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the share of weight in percent that dev texts give each task's adapters under each router, which
        router is used, and quantiles of out-of-distribution scores."""
        confusion, outside = self.router.confusion(), self.router.outside_scores()
        return super().summary(observed) | {
            "router": "task" if self._knows_task else self.router.kind,
            "own_shares": self.router.own_shares(confusion),
            "confusion": confusion,
            "novelty": {task: 100 * float(scores_B.mean()) for task, scores_B in outside.items()},
            "ood": quantiles(self.router, outside),
            "truncated_queries": self.encoder.truncated,
            "slot_similarity": newest_rows(self.router),
            "key_plane": plane(self.router, self.seed),
            "text_plane": text_plane(self.router, self.seed),
        }

    def state_dict(self) -> State:
        values, tensors = super().state_dict()
        fitted = self._ahead if self.config.fits_ahead else self.router
        values["router"] = {"kind": self.router.kind, "settings": self.router.settings()}
        values["ahead"] = self._ahead.settings()["tasks"]
        tensors |= {f"router/{name}": tensor for name, tensor in fitted.tensors().items()}
        return values, tensors | {f"dev/{task}": queries for task, queries in fitted.dev.items()}

    def load_state_dict(self, values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        router = RouterState(values["router"]["kind"], values["router"]["settings"])
        self.router = _restored(router, tensors)
        self._ahead = _restored(replace(router, settings={**router.settings, "tasks": values["ahead"]}), tensors)
        super().load_state_dict(values, tensors)

    @classmethod
    def _without(cls, values: dict[str, Any], left: TensorGroups, task: str, adapters: Collection[str]) -> State:
        router = values["router"]
        rest = without(RouterState(router["kind"], router["settings"], dict(under("router/", left))), task)
        others = left.select(lambda name: not name.startswith("router/") and name != f"dev/{task}")
        values = {**values, "router": {**router, "settings": rest.settings}}
        return values, others | {f"router/{name}": tensor for name, tensor in rest.tensors.items()}


def _restored(state: RouterState, tensors: Mapping[str, Tensor]) -> SlotRouter:
    router = SlotRouter.restored(replace(state, tensors=dict(under("router/", tensors))))
    for task in router.tasks:
        router.hold_out(task, tensors[f"dev/{task}"])
    return router


MOST_POINTS, MOST_TEXTS, PLANE_STEPS = 1000, 200, 500
"""The most sub-keys and dev texts for t-SNE, and its steps: about a second. Twice the steps do not improve it (a
divergence of 0.62 with 500 and with 1,000)."""


def quantiles(router: SlotRouter, outside: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return `QUANTILES` of the out-of-distribution scores of each task's dev texts; {} where none were kept.

    `learned` has them for all tasks now, `outside` for the newest task before it was learned; `kept` is the number of
    texts that all of them are compared with now.
    """
    learned = router.learned_scores()
    if not learned:
        return {}
    parts = {"learned": learned, "outside": outside}
    levels = torch.tensor(QUANTILES)
    return {"kept": len(router.calibrated())} | {
        part: {
            task: [round(score, 4) for score in scores_B.cpu().quantile(levels).tolist()]
            for task, scores_B in scores.items()
        }
        for part, scores in parts.items()
    }


def newest_rows(router: SlotRouter) -> list[list[float]]:
    """Return the `[m][N]` mean cosine over groups of each slot of the newest task with every slot so far, in order of
    learning.

    Keys never change once learned, so the rows of all tasks below each other are the lower triangle of `[N][N]`.
    """
    keys = router.keys()
    means = cosines(keys[router.tasks[-1]], torch.cat([keys[task] for task in router.tasks])).mean(1)
    return [[round(value, 3) for value in row] for row in means.tolist()]


def plane(router: SlotRouter, seed: int = 0) -> list[dict[str, Any]]:
    """Compute t-SNE of all sub-keys by cosine: x, y, slot and group; empty where there are too few or too many."""
    keys = router.keys()
    names = [slot for task in router.tasks for slot in router.slots(task)]
    points = torch.nn.functional.normalize(torch.cat(list(keys.values())), dim=-1).flatten(0, 1)
    labels = [(name, group) for name in names for group in range(router.groups)]
    return [
        {"x": x, "y": y, "slot": name, "group": group}
        for (x, y), (name, group) in zip(_places(points, seed), labels, strict=False)
    ]


def text_plane(router: SlotRouter, seed: int = 0) -> list[dict[str, Any]]:
    """Compute t-SNE of dev texts by the cosine of their queries: x, y and task; empty where there are too few."""
    each = max(1, MOST_TEXTS // len(router.tasks))
    held = {task: queries[:each] for task, queries in router.dev.items() if task in router.tasks}
    names = [task for task, queries in held.items() for _ in queries]
    places = _places(torch.cat(list(held.values())), seed) if names else []
    return [{"x": x, "y": y, "task": task} for (x, y), task in zip(places, names, strict=False)]


def _places(points: Tensor, seed: int) -> list[tuple[float, float]]:
    """Return the places of points in the plane; none where there are too few or too many."""
    from sklearn.manifold import TSNE

    if not 4 < len(points) <= MOST_POINTS:
        return []
    perplexity = min(30, len(points) / 4)
    drawn = TSNE(metric="cosine", init="random", perplexity=perplexity, random_state=seed, max_iter=PLANE_STEPS)
    return [(x, y) for x, y in drawn.fit_transform(points.float().cpu().numpy()).round(3).tolist()]
