"""DeepSpeed ZeRO 0-3 behind the engine protocol: the only file that imports it.

Library behaviour this file depends on (DeepSpeed 0.19.8, observed): clipping is 1.0 when the key is missing, so it is
always set; a shared-memory helper is compiled at the first `initialize` unless marked incompatible, and then no
compiler is needed; its own "AdamW" compiles for minutes, so torch's is passed in; gradients are averaged over workers,
hence the factor `world size` on the loss; `initialize` sends every parameter from the first worker to the others, which
copies each mapped page that it writes to, so frozen weights in files are kept out of its way; `destroy()` leaves module
hooks and, at ZeRO-3, partitioned parameters and attributes that hold the whole engine behind, so `close` removes those
and puts plain parameters back.
"""

import logging
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from raycl.backbone import Backbone, Output
from raycl.methods.capabilities import Constraint
from raycl.methods.modifier import Modifiers
from raycl.training.definition.settings import DeepSpeedConfig
from raycl.training.engines.compilation import layers
from raycl.training.engines.engine import NO_RATES, NONE, Engine, Share, Transform
from raycl.training.optimizers.base import OptimizerKind, ParameterSpec
from raycl.training.optimizers.parameters import advance, groups_of, schedule, specs_of
from raycl.training.optimizers.registry import optimizer_kind
from raycl.training.optimizers.settings import TrainConfig
from raycl.training.workers.distributed import DistributedContext, ensure_process_group
from raycl.training.workers.memory import MappedFiles, return_freed_memory
from raycl.types import Batch


def _library(world: DistributedContext) -> Any:
    """Import DeepSpeed, quiet and without its compiler, on the process group that exists already."""
    if world.device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    warnings.filterwarnings("ignore", category=FutureWarning)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    ensure_process_group(world)
    for name, value in (("RANK", world.rank), ("LOCAL_RANK", world.local_rank), ("WORLD_SIZE", world.size)):
        os.environ.setdefault(name, str(value))
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
    return deepspeed


class DeepSpeedEngine(Engine):
    """One stage's DeepSpeed engine."""

    def __init__(
        self,
        backbone: Backbone,
        train: TrainConfig,
        config: DeepSpeedConfig,
        accumulation: int,
        steps: int,
        world: DistributedContext,
        rates: Mapping[str, float] = NO_RATES,
    ) -> None:
        self.backbone = backbone
        self.world = world
        self.stage: int = config.zero_stage
        self.accumulation = accumulation
        self.library: Any = _library(world)
        self.trained: dict[str, nn.Parameter] = {name: p for name, p in backbone.named_parameters() if p.requires_grad}
        assert self.trained, "the method left no parameter to train"
        self.kind: OptimizerKind = optimizer_kind(train)
        specs = specs_of(backbone, train, rates)
        self.optimizer = self.kind.build(groups_of(self.trained, specs, self.kind.separates_matrices))
        self.moments: dict[str, tuple[str, ...]] = {name: tuple(self.kind.state(specs[name])) for name in self.trained}
        self._hooks, self._linear = hooks_of(backbone), functional.linear
        self._mapped = _mapped_weights(backbone)
        wanted = zero_config(train, config, accumulation, backbone, world.size)
        if self.stage == 3:
            self._partition(wanted)
        with self._not_sent():
            self.engine, *_ = self.library.initialize(
                model=backbone, model_parameters=list(self.trained.values()), optimizer=self.optimizer, config=wanted
            )
        self.schedule = schedule(self.optimizer, train, steps)
        self._pending, self._fresh = False, True

    def _partition(self, config: dict[str, Any]) -> None:
        """Share out the weights as `initialize` would, one at a time; parts of mapped ones stay where they lie."""
        convert = self.library.zero.Init(nn.Module(), config_dict_or_path=config)._convert_to_zero_parameters
        files = MappedFiles()
        for parameter in self.backbone.parameters():
            parameter.data = parameter.data.to(self.backbone.dtype)
            if files.hold(parameter):
                parameter.data = parameter.data.clone()
            convert([parameter])
            held, part = self._mapped.get(id(parameter)), parameter.ds_tensor  # type: ignore[attr-defined]
            first = self.world.rank * part.ds_numel
            if held is not None and first + part.numel() <= held.numel() and part.device == held.device:
                part.data = held.view(-1)[first : first + part.numel()]

    @contextmanager
    def _not_sent(self) -> Iterator[None]:
        """Keep DeepSpeed from sending weights in mapped files to other workers."""
        mapped = [parameter for parameter in self.backbone.parameters() if id(parameter) in self._mapped]
        for parameter in mapped:
            parameter.ds_optim_param = True  # type: ignore[attr-defined]
        try:
            yield
        finally:
            for parameter in mapped:
                del parameter.ds_optim_param  # type: ignore[attr-defined]

    @property
    def _is_plain(self) -> bool:
        """Return whether the torch optimizer runs as it is, at ZeRO 0 in float32."""
        return self.engine.optimizer is self.optimizer

    @property
    def separate_masters(self) -> bool:
        """Return whether there are separate masters, in bfloat16."""
        return self.backbone.dtype != torch.float32

    @property
    def step_bytes(self) -> int:
        """Bytes by arithmetic: trained parameters are summed, partitioned ones gathered, all weights at ZeRO 3."""
        if self.world.size == 1:
            return 0
        size = self.backbone.dtype.itemsize
        trained = sum(_numel(p) for p in self.trained.values())
        every = sum(_numel(p) for p in self.backbone.parameters())
        sums = self.accumulation if self.stage >= 2 else 1
        gathers = {0: 0, 1: trained, 2: trained, 3: 2 * self.accumulation * every}[self.stage]
        return size * (sums * trained + gathers)

    def forward(self, batch: Batch) -> Output:
        """Run a teacher-forced pass through the engine, whose hooks gather partitioned weights."""
        output: Output = self.engine(batch)
        return output

    def backward(self, loss_sum: Tensor, total: float) -> None:
        """Add the gradient of `loss_sum / total`; DeepSpeed averages over workers, hence the factor."""
        if self._pending:  # the micro-batch before this one was not the last
            assert not self.engine.is_gradient_accumulation_boundary(), "more micro-batches than the accumulation"
            self.engine.step()
        self.engine.backward(loss_sum * (self.world.size / total), scale_wrt_gas=False)
        self._pending = True

    def step(
        self, modifiers: Modifiers = NONE, transform: Transform | None = None, constraint: Constraint | None = None
    ) -> float:
        """Transform, modify, clip, update and constrain at the accumulation boundary."""
        assert self.engine.is_gradient_accumulation_boundary(), "fewer micro-batches than the accumulation"
        if transform is not None:  # a parameter without a gradient counts as zero
            gradients = {name: self._gradient(name) for name in self.trained}
            for name, gradient in transform({n: g for n, g in gradients.items() if g is not None}).items():
                self._set_gradient(name, gradient)
        for name in modifiers.names:
            if (reduced := self._gradient(name)) is not None:
                self._set_gradient(name, modifiers(name, reduced))
        norm = None
        if self._is_plain:  # DeepSpeed keeps no norm then; its gradients are already reduced here
            norm = nn.utils.get_total_norm([p.grad for p in self.trained.values() if p.grad is not None])
        held = [hold for name in modifiers.names for hold in self._hold(modifiers, name)] if modifiers.holds else []
        constrained = () if constraint is None else constraint.names
        before = {name: self._whole(self.trained[name]).to(self.world.device) for name in constrained}
        self.engine.step()
        if self._fresh and self.stage in (1, 2):
            self._link_state()
        for name, part, mask, old in held:
            parameter = self.trained[name]
            if part:
                self._set_moment(parameter, part, torch.where(mask, old, self._moment(parameter, part)))
            else:
                self._fill(parameter, torch.where(mask, old, self._whole(parameter).to(mask.device)))
        if constraint is not None:
            for name, old in before.items():
                after = self._whole(self.trained[name]).to(self.world.device)
                self._fill(self.trained[name], constraint(name, old, after))
        self._pending, self._fresh = False, False
        self.schedule.step()
        return float(norm if norm is not None else self.engine.get_global_grad_norm() or 0.0)

    def _link_state(self) -> None:
        """Let parameters find their state: the library does so after the step of its first group (0.19.8), when other
        groups have none."""
        zero = self.engine.optimizer
        if not hasattr(zero, "bit16_groups"):
            return  # its optimizer that accumulates gradients in float32 links all groups itself
        for parameters, flat in zip(zero.bit16_groups, zero.single_partition_of_fp32_groups, strict=True):
            self.library.utils.lazy_init_hp_params_optimizer_state(parameters, flat, self.optimizer.state)

    def _gradient(self, name: str) -> Tensor | None:
        """Return the reduced gradient that the optimizer reads; editing `.grad` has no effect at ZeRO 1 to 3."""
        parameter = self.trained[name]
        gradient: Tensor | None = parameter.grad if self._is_plain else self.library.utils.safe_get_full_grad(parameter)
        return gradient

    def _set_gradient(self, name: str, gradient: Tensor) -> None:
        if self._is_plain:
            self.trained[name].grad = gradient
        else:
            self.library.utils.safe_set_full_grad(self.trained[name], gradient)

    def _hold(self, modifiers: Modifiers, name: str) -> list[tuple[str, str, Tensor, Tensor]]:
        """Return (parameter, moment or "" for itself, where it must not change, its complete present value)."""
        mask, parameter = modifiers.held(name), self.trained[name]
        if mask is None:
            return []
        value = self._whole(parameter)
        moments = {moment: self._moment(parameter, moment) for moment in self.moments[name]}
        return [(name, part, mask, old.to(mask.device)) for part, old in {"": value, **moments}.items()]

    def parameters(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return complete values on the CPU: float32 masters of trained parameters, gathered where partitioned."""
        own = dict(self.backbone.named_parameters())
        return {name: self._whole(own[name]) for name in names}

    def _whole(self, parameter: nn.Parameter) -> Tensor:
        value = None
        if parameter.requires_grad and not self._is_plain:
            value = self.library.utils.safe_get_full_fp32_param(parameter)
        if value is None:
            with self._gathered([parameter]):
                value = parameter.detach().clone()
        return value.detach().cpu().clone()

    def _gathered(self, parameters: list[nn.Parameter], write: bool = False) -> Any:
        return self.library.zero.GatheredParameters(
            parameters, modifier_rank=0 if write else None, enabled=self.stage == 3
        )

    def optimizer_state(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Return the optimizer's state, whole, on the CPU."""
        return {
            f"{name}/{moment}": self._moment(self.trained[name], moment).detach().cpu().clone()
            for name in (self.trained if names is None else names)
            for moment in self.moments[name]
        }

    def share(self, names: Iterable[str]) -> Share:
        """Return this worker's part of each tensor, flat, as DeepSpeed divides it; nothing is copied."""
        own = dict(self.backbone.named_parameters())
        if self._is_plain:
            if not self.world.is_first:
                return Share()
            kept = [(name, moment) for name, moments in self.moments.items() for moment in moments]
            state = {f"{name}/{moment}": self._moment(own[name], moment) for name, moment in kept}
            return Share({name: own[name].detach() for name in names}, state)
        parameters, optimizer, places = {}, {}, {}
        for name in names:
            parameter = own[name]
            first, count = self._extent(parameter)
            if not count:
                continue
            places[name] = first, list(_shape(parameter))
            parameters[name] = self._part(parameter)[:count]
            for moment in self.moments[name]:
                part = torch.zeros(count) if self._fresh else self._part(parameter, moment)[:count]
                optimizer[f"{name}/{moment}"] = part
        return Share(parameters, optimizer, places, is_part=True)

    def _extent(self, parameter: nn.Parameter) -> tuple[int, int]:
        """First element of this worker's part, and elements; at ZeRO 3 the last parts may be cut or empty."""
        if self.stage == 3:
            part = self._part(parameter).numel()
            first = min(self.world.rank * part, _numel(parameter))
            return first, min(part, _numel(parameter) - first)
        mapping: Any = getattr(parameter, "_hp_mapping", None)
        return (mapping.lp_fragment_address.start, mapping.lp_fragment_address.numel) if mapping else (0, 0)

    def _part(self, parameter: nn.Parameter, moment: str | None = None) -> Tensor:
        """Return this worker's part of the float32 master, or of a moment, in DeepSpeed's own memory."""
        if self.stage == 3:  # its public function copies what is on the CPU to the device
            fragment = self.engine.optimizer._get_fp32_opt_state_partition(parameter, True, moment)[0]
        else:
            mapping: Any = getattr(parameter, "_hp_mapping", None)
            fragment = mapping.get_hp_fragment(moment)
        flat: Tensor = fragment.detach().view(-1)
        return flat

    def _moment(self, parameter: nn.Parameter, moment: str) -> Tensor:
        if self._fresh:
            return torch.zeros(_shape(parameter), device=self.world.device)
        if self._is_plain:
            value = self.optimizer.state[parameter].get(moment)
        else:
            value = self.library.utils.safe_get_full_optimizer_state(parameter, moment)
        return torch.zeros_like(parameter) if value is None else value

    def _set_moment(self, parameter: nn.Parameter, moment: str, value: Tensor) -> None:
        if self._is_plain:
            self.optimizer.state[parameter][moment].copy_(value)
        else:
            self.library.utils.safe_set_full_optimizer_state(parameter, value, moment)

    def restore(self, parameters: dict[str, Tensor], optimizer: dict[str, Tensor], steps: int) -> None:
        """Fill parameters and the optimizer's state, which one step with a zero gradient has brought into being."""
        self._create_state()
        own = dict(self.backbone.named_parameters())
        for name, value in parameters.items():
            self._fill(own[name], value.to(self.world.device))
        for name, parameter in self.trained.items():
            for moment in self.moments[name]:
                self._set_moment(parameter, moment, optimizer[f"{name}/{moment}"].to(self.world.device))
        for updated, state in self.optimizer.state.items():
            state |= self.kind.counters(updated, ParameterSpec(updated.shape), steps)
        advance(self.schedule, steps)

    def _create_state(self) -> None:
        """Step on an all-padding example with a loss of zero: moments become zeros (ZeRO 1-3 has none before)."""
        codec = self.backbone.codec
        ones = torch.ones(1, 2, dtype=torch.long, device=self.world.device)
        target = ones[:, : 0 if codec.needs_labels else 1] * codec.eos_id
        batch = Batch(ones * codec.pad_id, ones, target, ones[:, 0] * 0, ones[:, 0].float(), ones[:, 0] * -1)
        for _ in range(self.accumulation):
            self.backward(self.forward(batch).loss_sum * 0.0, 1.0)
        self.step()

    def _fill(self, parameter: nn.Parameter, value: Tensor) -> None:
        if parameter.requires_grad and not self._is_plain:
            self.library.utils.safe_set_full_fp32_param(parameter, value)
        with self._gathered([parameter], write=True), torch.no_grad():
            parameter.copy_(value)

    def close(self) -> None:
        """Leave plain whole parameters in the backbone, free the engine, and remove what it left on the modules."""
        fresh = {id(parameter): self._plain(parameter) for parameter in self.backbone.parameters()}
        self.engine.destroy()
        put_parameters(self.backbone, fresh)
        remove_traces(self.backbone, self._hooks)
        self.engine = self.optimizer = self.schedule = None  # type: ignore[assignment]
        self.trained.clear()
        self._mapped.clear()
        if self.stage == 3:
            functional.linear = self._linear  # ZeRO-3 has replaced it for all modules of the process
            _clear_class_caches()
        return_freed_memory()  # the library's objects refer to each other: else ten tasks of ZeRO 3 keep 65 MiB

    def _plain(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return a full parameter as replacement, in the same memory if that has not changed."""
        value = self._mapped.get(id(parameter))
        if value is None and (self.stage == 3 or parameter.requires_grad):
            with self._gathered([parameter]):
                value = parameter.detach().clone()
        return nn.Parameter(parameter.detach() if value is None else value, requires_grad=parameter.requires_grad)


def _mapped_weights(backbone: Backbone) -> dict[int, Tensor]:
    """Return id of each frozen parameter that is used directly from a mapped file -> its memory, shared by workers."""
    files, frozen = MappedFiles(), [parameter for parameter in backbone.parameters() if not parameter.requires_grad]
    usable = [item for item in frozen if item.dtype == backbone.dtype and item.is_contiguous() and files.hold(item)]
    return {id(parameter): parameter.data for parameter in usable}


def _numel(parameter: nn.Parameter) -> int:
    """Return the number of values of the full parameter, where ZeRO 3 keeps parts."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _shape(parameter: nn.Parameter) -> torch.Size:
    """Return the shape of the full parameter, of which ZeRO 3 keeps a part."""
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


def _clear_class_caches() -> None:
    """ZeRO-3 keeps every coordinator that ran a second step in an `lru_cache` of the class, behind a wrapper."""
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

    for method in vars(PartitionedParameterCoordinator).values():
        for cell in getattr(method, "__closure__", None) or ():
            if hasattr(cell.cell_contents, "cache_clear"):
                cell.cell_contents.cache_clear()


ATTRIBUTES = frozenset(
    (
        *("_external_params", "_original_parameters", "all_parameters", "applied_pre_backward_ref_cnt"),
        *("ds_external_parameters", "ds_grads_remaining", "ds_id", "ds_inflight_param_registry"),
        *("ds_recompute_parameters", "post_bwd_fn", "pre_bwd_fn"),
    )
)
"""Attributes that ZeRO-3 sets on modules and never removes; some refer to the engine."""

KINDS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

Hooks = dict[tuple[int, str], set[int]]
"""(id of a module, kind of hook) -> ids of hooks."""


def gathered_elements(backbone: Backbone) -> int:
    """Return how many elements ZeRO 3 may gather at a time: of one layer that computes, and the next."""
    return 2 * max(sum(p.numel() for p in layer.parameters()) for layer in layers(backbone.model))


def zero_config(
    train: TrainConfig, config: DeepSpeedConfig, accumulation: int, backbone: Backbone, world_size: int
) -> dict[str, Any]:
    """Return DeepSpeed's own config for these settings (its batch sizes only count micro-batches).

    By its own defaults ZeRO 3 keeps 1e9 weights that were gathered: all of a 1B backbone, on every worker.
    """
    zero: dict[str, Any] = {"stage": config.zero_stage}
    if config.zero_stage == 3:
        gathered = gathered_elements(backbone)
        zero |= {"stage3_max_live_parameters": gathered, "stage3_max_reuse_distance": gathered}
    if config.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "train_batch_size": accumulation * world_size,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": train.max_grad_norm,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # its own, which it asks for with offloading, compiles for minutes too
        "bf16": {"enabled": backbone.dtype == torch.bfloat16},
        "steps_per_print": 1_000_000_000,
        **config.extra,
    }


def hooks_of(backbone: Backbone) -> Hooks:
    """Return those on every module."""
    return {(id(module), kind): set(getattr(module, kind)) for module in backbone.modules() for kind in KINDS}


def put_parameters(backbone: Backbone, fresh: Mapping[int, nn.Parameter]) -> None:
    """Replace every parameter, by its id, and what holds them in each module by a plain dict."""
    for module in backbone.modules():
        own = module._parameters.items()
        module._parameters = {name: None if old is None else fresh[id(old)] for name, old in own}


def remove_traces(backbone: Backbone, before: Hooks) -> None:
    """Drop attributes that ZeRO-3 leaves, and hooks that are not among those `before`."""
    for module in backbone.modules():
        for attribute in ATTRIBUTES & vars(module).keys():
            delattr(module, attribute)
        for kind in KINDS:
            hooks = getattr(module, kind)
            for key in set(hooks) - before.get((id(module), kind), set()):
                del hooks[key]
