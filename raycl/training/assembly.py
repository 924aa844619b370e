"""The objects of a run, built on a worker: the one module that imports every concrete class.

Does not depend on Ray (`raycl.launch.driver` starts workers that call `build`).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from raycl.backbone import BackboneOptions, identity, load_backbone, load_codec, load_skeleton
from raycl.data.stream import open_stream
from raycl.methods.registry import method_class
from raycl.training.definition.settings import DeepSpeedConfig, FSDPConfig
from raycl.training.definition.task_order import SCHEDULES
from raycl.training.definition.training_context import TrainingContext
from raycl.training.engines.compilation import compile_layers
from raycl.training.engines.engine import Engine, OpenEngine, TorchEngine
from raycl.training.optimizers.registry import optimizer_class
from raycl.training.setup.checks import make_modifiers
from raycl.training.setup.fingerprints import inputs_of
from raycl.training.setup.method_checks import check_language_head
from raycl.training.setup.run_config import RunConfig, info_of
from raycl.training.workers.distributed import DistributedContext

if TYPE_CHECKING:
    from raycl.training.engines.fsdp import Root


def build(
    config: RunConfig,
    world: DistributedContext,
    singles: dict[str, float] | None = None,
    replaces: str = "",
    commit: str | None = None,
) -> tuple[TrainingContext, OpenEngine]:
    """Build one worker's parts of the run, and the function that opens an engine for a phase.

    Args:
        replaces: see `RunInfo`.
        commit: commit of the backbone on the hub, where its revision is resolved already.
    """
    chosen = config.backbone if commit is None else config.backbone.model_copy(update={"revision": commit})
    codec = load_codec(chosen, *config.stream.token_limits)
    stream = open_stream(config.stream, config.seed)
    is_sharded = isinstance(config.engine, FSDPConfig)
    use = BackboneOptions(stream.learns_texts, trains=True, on_host=is_sharded)
    backbone = load_backbone(chosen, codec, world.device, config.seed, use)
    if config.backbone.attention != "auto":
        backbone.use_attention(config.backbone.attention)
    if config.train.packing:
        backbone.check_packing()
        backbone.packs = True
    optimizer_class(config.train.optimizer).check(world.device.type)
    make = method_class(config.method.name)
    root = None
    if is_sharded:
        trains_layers = make(config.method, load_skeleton(chosen, codec), config.seed).trains_backbone
        from raycl.training.engines.fsdp import shard  # heavy, as DeepSpeed below

        root = shard(backbone, world, trains_layers)
    method = make(config.method, backbone, config.seed)
    check_language_head(method)
    if config.train.compile:
        compile_layers(backbone)
    inputs = inputs_of(config.model_copy(update={"backbone": chosen}), stream, fetches=True) if world.is_first else {}
    info = info_of(config, singles, replaces, inputs)
    context = TrainingContext(
        info=info,
        stream=stream,
        backbone=backbone,
        method=method,
        modifiers=make_modifiers(config, method),
        train=config.train,
        engine=config.engine,
        evaluation=config.eval,
        checkpoint=config.checkpoint,
        bank=config.bank,
        schedule=SCHEDULES[config.stream.schedule](),
        identity=identity(chosen) if world.is_first else "",
    )
    return context, partial(open_engine, context, world, root)


def open_engine(
    context: TrainingContext,
    world: DistributedContext,
    root: Root | None,
    accumulation: int,
    steps: int,
    phase: str = "",
) -> Engine:
    """Return the configured engine around the backbone for one phase, which has its settings by its name."""
    train = context.train.of_task(phase)
    rates = context.method.config.learning_rates
    if root is not None:
        from raycl.training.engines.fsdp import FSDPEngine

        return FSDPEngine(context.backbone, train, steps, world, accumulation, rates, root)
    if isinstance(context.engine, DeepSpeedConfig):
        from raycl.training.engines.deepspeed import DeepSpeedEngine  # heavy, and needed with DeepSpeed only

        return DeepSpeedEngine(context.backbone, train, context.engine, accumulation, steps, world, rates)
    return TorchEngine(context.backbone, train, steps, world, accumulation, rates)
