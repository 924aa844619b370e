"""The router of slots: keys, and over them the discriminant, learned task by task and kept as named tensors.

Slots of task t are called `t.0`, `t.1`, ... With one value per group (`value_layout` per_group) the adapter of slot
`t.0` in group j is `t.0-j`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from raycl.errors import RetrievalError
from raycl.routing.code_index import KeyIndex
from raycl.routing.slot_keys import KeyConfig, cosines, key_accuracy, learn_keys, split_groups
from raycl.routing.slot_weights import RetrievalConfig, slot_weights, sparse_weights
from raycl.routing.statistics import NEAREST, Discriminant, NearestTasks, OodCalibrator, Statistics, sample_rows
from raycl.types import Mixture, RouterState

Kind = Literal["keys", "discriminant"]
KINDS: tuple[Kind, ...] = ("keys", "discriminant")

DENSE_UP_TO = 400
"""Up to this number of slots a mixture has columns of all of them. A text at 4,000 slots takes 3 to 4 ms so, and 1.0 to
1.5 ms with columns of the chosen ones (one core, by keys)."""


class JoinedSlots(NamedTuple):
    """The slots of all tasks on one device.

    Attributes:
        keys: `[N, g, h]`. owner: `[N]` number of each one's task.
        bounds: `[2, T]` the first slot of each task and how many it has.
    """

    keys: Tensor
    owner: Tensor
    bounds: Tensor


class SlotRouter:
    """Chooses among the slots of all tasks learned so far, on the device where queries are.

    Attributes:
        tasks: tasks in the order in which they were learned.
        kind: keys: the paper's; discriminant: the task by its statistics, its slots by their keys.
        dev: queries of each task's dev texts, by which the better kind is selected (`hold_out`).
        samples: a few of these queries, kept with the keys.
    """

    def __init__(self, kind: Kind, groups: int, config: RetrievalConfig, per_group: bool = False) -> None:
        self.groups = groups
        self.config = config
        self.per_group = per_group
        self.kind = kind
        self.tasks: list[str] = []
        self.dev: dict[str, Tensor] = {}
        self.samples: dict[str, Tensor] = {}
        self._keys: dict[str, Tensor] = {}
        self._statistics: dict[str, Statistics] = {}
        self._discriminant: Discriminant | None = None
        self._calibrator: OodCalibrator | None = None
        self._index: KeyIndex | None = None
        self._joined: JoinedSlots | None = None
        self._slot_names: list[str] = []
        self._names: tuple[str, ...] = ()

    # ---- learning --------------------------------------------------------------------------------------------

    def fit(self, task: str, queries_BC: Tensor, config: KeyConfig, seed: int) -> None:
        """Run the preparation phase of a task: fit its keys and statistics.

        Raises:
            RetrievalError: see `learn_keys`.
        """
        assert task not in self._keys, f"'{task}' has keys already"
        earlier = torch.cat(list(self._keys.values())) if self._keys else None
        self.add(task, learn_keys(queries_BC, config, self.config.top_k, seed, earlier), Statistics.of(queries_BC))

    def add(self, task: str, keys_MgH: Tensor, statistics: Statistics) -> None:
        """Add a task whose keys and statistics are known."""
        self.tasks.append(task)
        self._keys[task], self._statistics[task] = keys_MgH, statistics
        self._discriminant = self._calibrator = self._index = self._joined = None
        self._slot_names += self.slots(task)
        self._names = ()

    def add_by_examples(self, task: str, queries_BC: Tensor) -> None:
        """Add a task whose adapter was trained elsewhere, known by queries of a few of its texts.

        It gets as many slots as a text selects, each with the mean query as its key, so that a text that finds them
        selects no slot of another task. Of eight or more texts every fourth is kept for out-of-distribution scores.
        """
        key_gH = split_groups(queries_BC, self.groups).mean(0)
        held = torch.arange(len(queries_BC)) % 4 == 3 if len(queries_BC) >= 8 else torch.zeros(len(queries_BC)).bool()
        self.add(task, torch.stack([key_gH] * self.config.top_k), Statistics.of(queries_BC[~held]))
        self.hold_out(task, queries_BC[held])

    def take(self, task: str, other: SlotRouter) -> None:
        """Take over a task that `other` was fitted to."""
        self.add(task, other._keys[task], other._statistics[task])
        self.hold_out(task, other.dev[task])

    def hold_out(self, task: str, dev_BC: Tensor) -> None:
        """Keep a task's dev queries, on which routers are compared; a sample of them stays with the router."""
        self.dev[task] = dev_BC
        if len(dev_BC):
            self.samples[task] = dev_BC[sample_rows(len(dev_BC))]
        self._calibrator = None

    def keys(self) -> dict[str, Tensor]:
        """Return task -> `[m, g, h]`."""
        return dict(self._keys)

    def means(self) -> dict[str, Tensor]:
        """Return task -> `[c]`, the mean of its texts' normalized queries."""
        return {task: self._statistics[task].mean for task in self.tasks}

    def nearest_slots(self, task: str, other: str) -> list[str]:
        """Return for each adapter of a task (`adapters`) that of another task whose key is most similar."""
        keys_MgH, others_NgH = self._keys[task], self._keys[other]
        nearest_gM = cosines(keys_MgH, others_NgH).transpose(0, 1)
        if not self.per_group:
            nearest_gM = nearest_gM.mean(0, keepdim=True)
        slots, names = len(others_NgH), self.adapters(other)
        groups = enumerate(nearest_gM.argmax(-1).tolist())
        return [names[group * slots + slot] for group, chosen in groups for slot in chosen]

    def slots(self, task: str) -> list[str]:
        """Return names of a task's slots."""
        return [f"{task}.{number}" for number in range(len(self._keys[task]))]

    def adapters(self, task: str) -> list[str]:
        """Return names of the adapters that hold them, as the mixture's columns are ordered."""
        if not self.per_group:
            return self.slots(task)
        return [f"{slot}-{group}" for group in range(self.groups) for slot in self.slots(task)]

    def joined_on(self, device: torch.device) -> JoinedSlots:
        """Return the slots of all tasks on the device of queries."""
        if self._joined is None or self._joined.keys.device != device:
            counts_T = torch.tensor([len(keys) for keys in self._keys.values()], device=device)
            owner_N = torch.arange(len(counts_T), device=device).repeat_interleave(counts_T)
            bounds_2T = torch.stack([counts_T.cumsum(0) - counts_T, counts_T])
            self._joined = JoinedSlots(torch.cat(list(self._keys.values())).to(device), owner_N, bounds_2T)
            self._index = None
        return self._joined

    # ---- choosing --------------------------------------------------------------------------------------------

    def similar(self, queries_BC: Tensor) -> Tensor:
        """Return `[B, g, N]` cosines with the slots of all tasks."""
        return cosines(split_groups(queries_BC, self.groups), self.joined_on(queries_BC.device).keys)

    @property
    def _adapter_names(self) -> tuple[str, ...]:
        """The names of all adapters, in the order of a mixture's columns."""
        if not self._names:
            slots, groups = self._slot_names, range(self.groups)
            self._names = tuple([f"{slot}-{group}" for group in groups for slot in slots] if self.per_group else slots)
        return self._names

    def route(
        self, queries_BC: Tensor, only: Sequence[str] | None = None, nearest: NearestTasks | None = None
    ) -> Mixture:
        """Return the mixture of each query.

        Args:
            only: the task of each query, whose slots alone may be chosen (SLM-TI, training within a task); None: all.
            nearest: the discriminant's nearest tasks of these queries, K or more, where they are known.

        Raises:
            RetrievalError: nothing was learned yet, or a query does not fit the keys.
        """
        if not self.tasks:
            raise RetrievalError("no task has been learned yet: there are no keys to choose from")
        if only is None and self._is_large:
            return self._searched(queries_BC, nearest)
        if only is not None and len(set(only)) == 1 and only[0] in self._keys:  # training: no other slot is compared
            task_cosines = cosines(split_groups(queries_BC, self.groups), self._keys[only[0]].to(queries_BC.device))
            return Mixture(tuple(self.adapters(only[0])), slot_weights(task_cosines, self.config, None, self.per_group))
        if only is None:
            weights = self._weights(self.kind, queries_BC, nearest)
        else:
            unknown = sorted(set(only) - self._keys.keys())
            if unknown:
                raise RetrievalError(f"no keys of {', '.join(unknown)}: expected some of {', '.join(self.tasks)}")
            numbers = {task: self.tasks.index(task) for task in dict.fromkeys(only)}
            owner = self.joined_on(queries_BC.device).owner
            mine = owner == torch.tensor([numbers[task] for task in only], device=owner.device)[:, None]
            weights = slot_weights(self.similar(queries_BC), self.config, mine, self.per_group)
        return Mixture(self._adapter_names, weights)

    def route_scored(self, queries_BC: Tensor, only: Sequence[str] | None = None) -> Mixture:
        """Return the mixture of each query as `route`, with its out-of-distribution score where dev texts were kept."""
        if not self.samples:
            return self.route(queries_BC, only)
        nearest = self.discriminant.nearest(queries_BC, max(NEAREST, self.config.top_k))
        mixture = self.route(queries_BC, only, nearest)
        distances_B = self.discriminant.relative_distances(queries_BC, nearest)
        return replace(mixture, ood_scores=self.calibrated().scores(distances_B), ood_distances=distances_B)

    # ---- judging ---------------------------------------------------------------------------------------------

    def task_weights(self, kind: Kind, queries_BC: Tensor) -> Tensor:
        """Return `[B, T]` the summed weight of each task's adapters."""
        weights = self._weights(kind, queries_BC)
        columns = self.joined_on(queries_BC.device).owner.repeat(self.groups if self.per_group else 1)
        return weights.new_zeros(len(weights), len(self.tasks)).index_add(1, columns, weights)

    def confusion(self) -> dict[str, dict[str, dict[str, float]]]:
        """Return kind -> task -> other task -> mean weight in percent that dev texts of the first give the adapters of
        the other.

        Weights of a text add up to one; other tasks with less than 0.05 percent are left out.
        """
        percents: dict[str, dict[str, dict[str, float]]] = {kind: {} for kind in KINDS}
        for task in self.tasks:
            queries = self.dev.get(task)
            if queries is None or not len(queries):
                continue
            for kind in KINDS:
                shares = dict(zip(self.tasks, (100 * self.task_weights(kind, queries).mean(0)).tolist(), strict=True))
                percents[kind][task] = {name: share for name, share in shares.items() if share >= 0.05 or name == task}
        return percents

    def own_shares(
        self, confusion: Mapping[str, Mapping[str, Mapping[str, float]]] | None = None
    ) -> dict[str, dict[str, float]]:
        """Return kind -> task -> percent of its dev texts' weight that its own adapters have; `eq13`: SLM's key
        accuracy (eq. 13).

        Args:
            confusion: `confusion()`, if it is known.
        """
        percents = {
            kind: {task: shares[task] for task, shares in by_task.items()}
            for kind, by_task in (self.confusion() if confusion is None else confusion).items()
        }
        percents["eq13"] = {}
        for number, task in enumerate(self.tasks):
            queries = self.dev.get(task)
            if queries is not None and len(queries):
                mine = self.joined_on(queries.device).owner == number
                counts = key_accuracy(self.similar(queries), mine, self.config.top_k)
                percents["eq13"][task] = 100 * float(counts.float().mean())
        return percents

    def select(self) -> None:
        """Select the kind under which dev texts of all tasks give their own adapters more weight; the paper's where
        they are equal.

        The task with the largest weight would be no measure: keys can find it and give a third to another one.
        """
        shares = self.own_shares()
        if shares["keys"]:
            means = {kind: sum(shares[kind].values()) / len(shares[kind]) for kind in KINDS}
            self.kind = max(KINDS, key=lambda kind: round(means[kind], 3))  # sums of weights differ by rounding

    def ood_score(self, queries_BC: Tensor) -> Tensor:
        """Return `[B]` from 0 to 1: the share of known texts that are nearer to a task; near 1 for texts of no task.

        Raises:
            RetrievalError: no dev text of any task was kept, or a query does not fit or is not finite.
        """
        split_groups(queries_BC, self.groups)
        return self.calibrated().scores(self.discriminant.relative_distances(queries_BC))

    def calibrated(self) -> OodCalibrator:
        """Return the calibrator of `ood_score`; the first call takes up to half a second at a hundred tasks.

        Raises:
            RetrievalError: no dev text of any task was kept.
        """
        if self._calibrator is None:
            samples = [self.samples[task] for task in self.tasks if task in self.samples]
            self._calibrator = OodCalibrator(lambda part: self.discriminant.relative_distances(part), samples)
        return self._calibrator

    def learned_scores(self) -> dict[str, Tensor]:
        """Return task -> out-of-distribution scores of its dev texts; empty where no dev text was kept."""
        if not self.samples:
            return {}
        return {task: self.ood_score(self.dev[task]) for task in self.tasks if len(self.dev.get(task, ()))}

    def outside_scores(self) -> dict[str, Tensor]:
        """Return the newest task and the out-of-distribution scores that its dev texts had before it was learned.

        Their mean says how well they stood out (AUROC). Empty for the first task, and where dev texts are missing.
        """
        *earlier, newest = self.tasks
        samples = [self.samples[task] for task in earlier if task in self.samples]
        queries = self.dev.get(newest)
        if not samples or queries is None or not len(queries):
            return {}
        before = Discriminant({task: self._statistics[task] for task in earlier})
        return {newest: OodCalibrator(before.relative_distances, samples).scores(before.relative_distances(queries))}

    @property
    def _is_large(self) -> bool:
        """Return whether a mixture has columns of chosen slots only, under a rule that needs no others."""
        rules = (self.config.rule, self.config.similarity, self.config.scope)
        plain = rules == ("group_union", "cosine", "instance") and not self.per_group
        return plain and len(self._slot_names) > DENSE_UP_TO

    def _searched(self, queries_BC: Tensor, nearest: NearestTasks | None) -> Mixture:
        """Return a mixture from the index, or from the slots of the chosen tasks, with columns of chosen slots only."""
        if self.kind == "keys":
            index, queries_BgH = self.index_on(queries_BC.device), split_groups(queries_BC, self.groups)
            ids, weights = sparse_weights(*index.search(queries_BgH, self.config.top_k), self.config)
        else:
            columns_BM, weights_BM = self._of_nearest_tasks(queries_BC, nearest)
            ids, places_BM = torch.unique(columns_BM, return_inverse=True)
            weights = weights_BM.new_zeros(len(queries_BC), len(ids)).scatter_add(1, places_BM, weights_BM)
        return Mixture(tuple(self._slot_names[number] for number in ids.tolist()), weights)

    def _of_nearest_tasks(self, queries_BC: Tensor, nearest: NearestTasks | None) -> tuple[Tensor, Tensor]:
        """Return the weights under a discriminant, looking at the slots of the most probable tasks alone.

        Returns:
            columns: `[B, M]` columns of a mixture over all adapters; some may stand there twice, then with the weight
            0. weights: `[B, M]`.
        """
        top_k, batch = self.config.top_k, len(queries_BC)
        nearest = nearest or self.discriminant.nearest(queries_BC, top_k)
        joined = self.joined_on(queries_BC.device)
        chances_BT = nearest.scores[:, :top_k].softmax(1)
        first_BT, own_BT = joined.bounds[:, nearest.tasks[:, :top_k]]
        place_m = torch.arange(int(own_BT.max()), device=own_BT.device)
        exists_BTm = place_m < own_BT[:, :, None]
        number_BTm = first_BT[:, :, None] + torch.minimum(place_m, own_BT[:, :, None] - 1)
        unit_BgH = torch.nn.functional.normalize(split_groups(queries_BC, self.groups), dim=-1)
        unit_BTmgH = torch.nn.functional.normalize(joined.keys[number_BTm], dim=-1)
        similar_BTgm = (unit_BgH[:, None, None] * unit_BTmgH).sum(-1).transpose(2, 3)
        weights = slot_weights(similar_BTgm.flatten(0, 1), self.config, exists_BTm.flatten(0, 1), self.per_group)
        columns = number_BTm
        if self.per_group:
            starts_g = torch.arange(self.groups, device=own_BT.device) * len(joined.keys)
            columns = (starts_g[:, None] + number_BTm[:, :, None]).flatten(2)
        return columns.flatten(1), (weights.view(batch, chances_BT.shape[1], -1) * chances_BT[:, :, None]).flatten(1)

    def index_on(self, device: torch.device) -> KeyIndex:
        """Return the index over the keys of all tasks so far."""
        joined = self.joined_on(device)
        if self._index is None:
            self._index = KeyIndex(joined.keys, self.config.top_k)
        return self._index

    def _weights(self, kind: Kind, queries_BC: Tensor, nearest: NearestTasks | None = None) -> Tensor:
        """Return the weights of all adapters by their cosines; under a discriminant within each task, times its
        softmax."""
        if kind == "keys":
            return slot_weights(self.similar(queries_BC), self.config, None, self.per_group)
        if self.config.scope == "batch" or self.config.rule == "vote":  # votes are often equal: all slots decide
            return self._task_by_task(queries_BC, nearest)
        columns_BM, weights_BM = self._of_nearest_tasks(queries_BC, nearest)
        return weights_BM.new_zeros(len(queries_BC), len(self._adapter_names)).scatter_add(1, columns_BM, weights_BM)

    def _task_by_task(self, queries_BC: Tensor, nearest: NearestTasks | None) -> Tensor:
        """Return the weights under a discriminant, for each task from the cosines of all slots."""
        nearest = nearest or self.discriminant.nearest(queries_BC, self.config.top_k)
        chances_BT = nearest.chances(self.config.top_k, len(self.tasks))
        similar_BgN, owner_N = self.similar(queries_BC), self.joined_on(queries_BC.device).owner
        total = chances_BT.new_zeros(len(queries_BC), len(self._adapter_names))
        for number in chances_BT.any(0).nonzero().flatten().tolist():
            mine = (owner_N == number).expand(len(queries_BC), -1)
            total += chances_BT[:, number, None] * slot_weights(similar_BgN, self.config, mine, self.per_group)
        return total

    @property
    def discriminant(self) -> Discriminant:
        """The discriminant over all tasks so far."""
        if self._discriminant is None:
            self._discriminant = Discriminant({task: self._statistics[task] for task in self.tasks})
        return self._discriminant

    def own_weights(self, task: str) -> dict[str, float]:
        """Return the mean weight that the task's texts give each of its adapters: over kept queries, else the mean
        one."""
        queries_BC = self.samples.get(task, self._statistics[task].mean[None])
        mixture = self.route(queries_BC, [task] * len(queries_BC))
        return dict(zip(mixture.names, mixture.weights.mean(0).tolist(), strict=True))

    # ---- keeping ---------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """Return `key/<slot>` `[g, h]`; `count/<task>`, `mean/<task>`, `scatter/<task>`; `sample/<task>` if it has
        one."""
        tensors: dict[str, Tensor] = {}
        for task in self.tasks:
            tensors |= {f"key/{slot}": key for slot, key in zip(self.slots(task), self._keys[task], strict=True)}
            known = self._statistics[task]
            tensors[f"count/{task}"] = torch.tensor([known.count])
            tensors[f"mean/{task}"], tensors[f"scatter/{task}"] = known.mean, known.scatter
            if task in self.samples:
                tensors[f"sample/{task}"] = self.samples[task]
        return {name: tensor.contiguous() for name, tensor in tensors.items()}

    def settings(self) -> dict[str, Any]:
        """Return the JSON-able settings, everything but the tensors."""
        retrieval = self.config.model_dump(mode="json")
        return {"groups": self.groups, "per_group": self.per_group, "retrieval": retrieval, "tasks": list(self.tasks)}

    @staticmethod
    def restored(state: RouterState) -> SlotRouter:
        """Restore from `settings` and `tensors`; tasks whose tensors were removed are left out."""
        settings, tensors = state.settings, state.tensors
        assert state.kind in ("keys", "discriminant"), state.kind
        kind: Kind = "keys" if state.kind == "keys" else "discriminant"
        router = SlotRouter(kind, settings["groups"], RetrievalConfig(**settings["retrieval"]), settings["per_group"])
        for task in settings["tasks"]:
            if f"mean/{task}" not in tensors:
                continue
            keys: list[Tensor] = []
            while f"key/{task}.{len(keys)}" in tensors:
                keys.append(tensors[f"key/{task}.{len(keys)}"])
            known = Statistics(int(tensors[f"count/{task}"]), tensors[f"mean/{task}"], tensors[f"scatter/{task}"])
            router.add(task, torch.stack(keys), known)
            if f"sample/{task}" in tensors:
                router.samples[task] = tensors[f"sample/{task}"]
        return router
