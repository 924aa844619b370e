"""Opens the service of a bank: backbone, engine and snapshots."""

import logging
import queue

import torch

from raycl.backbone import Backbone, load_backbone, load_codec
from raycl.bank import Bank, Snapshot
from raycl.bank.activations import Activations
from raycl.bank.object_store import ObjectStoreCache
from raycl.errors import ConfigError
from raycl.generation.requests import Event, Failed, Sampling
from raycl.generation.static_cache import MODELS, supports_static_cache
from raycl.serve.engine.engine_requests import AdapterSelection, EngineRequest, is_last
from raycl.serve.engine.multi_snapshot_model import LoadedSnapshot, MultiSnapshotModel
from raycl.serve.engine.serving_engine import ServingEngine
from raycl.serve.service.service import Service
from raycl.serve.settings import ServeConfig
from raycl.serve.snapshots.manager import SnapshotManager
from raycl.serve.snapshots.parts import backbone_of, readable_snapshot, wanted_snapshots

log: logging.Logger = logging.getLogger(__name__)

SOURCE_TOKENS, TARGET_TOKENS = 256, 64
"""Token limits of snapshots that no run created."""


def open_service(config: ServeConfig, object_store_cache: bool = False) -> Service:
    """Load everything; blocks for as long as that takes.

    Args:
        object_store_cache: adapters come through the cluster's object store, once per node.

    Raises:
        BankError: no snapshot, or damaged. BackboneError: the backbone cannot be loaded, or is another one.
        ConfigError: the device does not exist.
    """
    bank = Bank.at(config.bank)
    snapshot = readable_snapshot(bank, wanted_snapshots(bank, Activations(bank, config.branch), config))
    engine = open_engine(config, snapshot)
    snapshot_manager = SnapshotManager(
        bank, engine, config, snapshot.backbone.sha256, ObjectStoreCache(bank) if object_store_cache else None
    )
    _warm(engine, snapshot_manager.active)
    return Service(config, engine, snapshot_manager)


def open_engine(config: ServeConfig, snapshot: Snapshot) -> ServingEngine:
    """Return an engine with the snapshot's backbone, and without any snapshot.

    Raises:
        BackboneError: the backbone cannot be loaded, or is another one. ConfigError: the device does not exist.
    """
    has_gpu = torch.cuda.is_available()
    if config.device == "cuda" and not has_gpu:
        raise ConfigError(
            "device is 'cuda', but torch sees no GPU here (none, hidden by CUDA_VISIBLE_DEVICES, or a torch built "
            "without CUDA): expected 'auto' or 'cpu', or a node with a GPU"
        )
    device = torch.device("cuda" if config.device != "cpu" and has_gpu else "cpu")
    if device.type == "cpu":
        torch.set_num_threads(config.threads)
    settings = backbone_of(snapshot, config.backbone, config.permissions)
    if config.dtype != "auto":
        settings = settings.model_copy(update={"dtype": config.dtype})
    known = snapshot.token_limits()
    source, target = known[0] or SOURCE_TOKENS, known[1] or TARGET_TOKENS
    backbone = load_backbone(settings, load_codec(settings, source, target), device, 0)
    model = MultiSnapshotModel(backbone, config.max_loaded_rows, config.prefix_cache_mb * 2**20)
    static_cache = uses_static_cache(config, backbone)
    limits = (source, target, config.limits.prompt_tokens)
    return ServingEngine(model, config.max_batch, *limits, static_cache, keeps_to_labels=config.labels == "task")


def uses_static_cache(config: ServeConfig, backbone: Backbone) -> bool:
    """Return whether texts are decoded at fixed addresses.

    Raises:
        ConfigError: they shall be, and cannot.
    """
    if config.decoding == "static" and not supports_static_cache(backbone):
        raise ConfigError(
            f"decoding is 'static', but a '{backbone.model.config.model_type}' model of this kind ("
            f"{backbone.codec.kind}) is decoded in caches that grow: expected one of {', '.join(MODELS)} without a "
            "sliding window, or decoding=auto"
        )
    on_gpu = backbone.device.type == "cuda"
    return config.decoding == "static" or (config.decoding == "auto" and on_gpu and supports_static_cache(backbone))


def _warm(engine: ServingEngine, loaded: LoadedSnapshot) -> None:
    """Route a text and answer one, so that encoder, adapters and kernels are loaded before the first request.

    The text is of no task, so the answer is of pinned adapters: an endpoint may refuse it otherwise.
    """
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    snapshot = loaded.snapshot
    task = snapshot.tasks[0].name if snapshot.tasks else None
    first = {snapshot.adapters[0].name: 1.0} if snapshot.adapters else {}
    sampling = None if engine.capabilities.answers == "label" else Sampling(2)
    routed = EngineRequest("a warm-up text", events.put, None, loaded=loaded, selection=AdapterSelection(None, task))
    routed.route_only = True
    answered = EngineRequest(
        "a warm-up text", events.put, sampling, loaded=loaded, selection=AdapterSelection(first, task)
    )
    for request in (routed, answered):
        engine.submit(request)
        event = events.get()
        while not is_last(event, request.route_only):
            event = events.get()
        if isinstance(event, Failed):
            log.warning("the warm-up answer failed: %s", event.error)


def close_service(service: Service) -> None:
    service.snapshot_manager.close()
    service.engine.close()
