"""The endpoint on Ray Serve: replicas, their resources and their life.

    serve run raycl.serve.deployment.app:build bank=runs/mine/bank

The one place where the service meets Ray Serve.
"""

import gc
import logging
import sys
from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from raycl import config as configs
from raycl.backbone.model_files import present_folder
from raycl.bank import Bank
from raycl.launch import cluster
from raycl.serve.gate.gate_actor import GateActor, poll_gate
from raycl.serve.http.access import check_access
from raycl.serve.http.server import Listener
from raycl.serve.http.web import make_web
from raycl.serve.resources import gate_device, gate_takes, replica_takes, settled_device
from raycl.serve.service.metrics import Metrics
from raycl.serve.service.opening import close_service, open_service
from raycl.serve.service.service import Service
from raycl.serve.settings import ServeConfig, at_bank
from raycl.serve.snapshots.parts import backbone_of, decide_first
from raycl.serve.upstream.export import open_choice, read_record
from raycl.serve.upstream.web import make_front_web

log: logging.Logger = logging.getLogger(__name__)

SWITCH_S = 0.0005
"""Seconds for which a thread may keep the interpreter while another waits for it; Python's default is ten times that.
The model's thread needs it back after every operation, and the HTTP thread holds it while a batch's answers leave."""


class Endpoint:
    """Ingress, router and model in one replica: no hop between them."""

    def __init__(self, tree: dict[str, Any], gate_actor: DeploymentHandle | None = None) -> None:
        """Load the backbone and the first snapshot."""
        sys.setswitchinterval(SWITCH_S)
        logging.getLogger("raycl").setLevel(logging.INFO)
        self.config: ServeConfig = configs.validate(ServeConfig, tree)
        self.service: Service = open_service(self.config, object_store_cache=True)
        if gate_actor is not None:
            poll_gate(gate_actor, self.service)
        self.metrics: Metrics = Metrics(self.service)
        self.web: Any = make_web(self.service, check_access(self.config))
        self.listener: Listener | None = Listener(self.web, self.config) if self.config.ingress == "direct" else None
        _exempt_from_collections()

    def __serve_build_asgi_app__(self) -> Any:
        return self.web

    def check_health(self) -> None:
        """Fail where the model thread or the HTTP server has ended: Serve asks often, and then replaces the replica."""
        assert self.service.engine.alive, "the model's thread has ended"
        assert self.listener is None or self.listener.alive, "the HTTP server has ended"

    def __del__(self) -> None:
        if hasattr(self, "listener") and self.listener is not None:
            self.listener.close()
        if hasattr(self, "service"):
            close_service(self.service)


class Forward:
    """The ingress and the router in front of an engine that is not raycl's."""

    def __init__(self, tree: dict[str, Any]) -> None:
        """Load the router of the exported snapshot."""
        logging.getLogger("raycl").setLevel(logging.INFO)
        config = configs.validate(ServeConfig, tree)
        self.web: Any = make_front_web(open_choice(config), config, check_access(config))
        self.listener: Listener | None = Listener(self.web, config) if config.ingress == "direct" else None
        _exempt_from_collections()

    def __serve_build_asgi_app__(self) -> Any:
        return self.web

    def check_health(self) -> None:
        """Fail where the HTTP server has ended; see `Endpoint.check_health`."""
        assert self.listener is None or self.listener.alive, "the HTTP server has ended"

    def __del__(self) -> None:
        if hasattr(self, "listener") and self.listener is not None:
            self.listener.close()


def _exempt_from_collections() -> None:
    """Exempt the objects that there are from garbage collections: those of the libraries are half a million.

    Looking through them stops all threads for 0.3 s, about once in 1,500 requests.
    """
    gc.collect()
    gc.freeze()


def build(args: Mapping[str, Any]) -> Any:
    """Return the application, for `serve run`, `serve deploy` and `raycl serve`.

    Args:
        args: settings as a tree, or dotted keys with values as text.

    Raises:
        ConfigError: a setting is wrong. BankError: the bank has nothing to serve.
    """
    tree: dict[str, Any] = {}
    for key, value in args.items():
        if isinstance(value, str):
            configs.apply_override(tree, f"{key}={value}")
        else:
            tree[key] = value
    return build_from(at_bank(configs.validate(ServeConfig, tree)))


def build_from(config: ServeConfig) -> Any:
    """Return the application of a validated config; what answers first is written into the bank.

    Raises:
        ConfigError, BankError: see `build`. BackboneError: `backbone` names none.
    """
    check_access(config)
    if config.forwards:
        read_record(config.upstream.export or "")  # a wrong folder is an error before anything starts
        return serve.deployment(serve.ingress()(Forward), **options_of(config)).bind(configs.as_tree(config))
    bank = Bank.at(config.bank)
    first = decide_first(bank, config)
    if config.backbone and (present_folder(config.backbone) or cluster.named() is None):
        backbone_of(bank.open(first), config.backbone, config.permissions)  # another model is an error here already
    tree = {**configs.as_tree(config), "device": settled_device(config.device)}
    others = []
    if config.gates:
        gate_tree = {**tree, "device": gate_device(config)}
        gate_actor = serve.deployment(GateActor, name="gate", ray_actor_options={"num_cpus": 0})
        others = [gate_actor.bind(gate_tree, gate_takes(config))]
    return serve.deployment(serve.ingress()(Endpoint), **options_of(config)).bind(tree, *others)


def _drain(config: ServeConfig) -> dict[str, float]:
    """Return how long a replica that ends may finish its answers; Serve does not see requests received directly."""
    if config.ingress == "direct":
        return {"graceful_shutdown_wait_loop_s": 0.1, "graceful_shutdown_timeout_s": config.limits.timeout_s + 15}
    return {"graceful_shutdown_timeout_s": config.limits.timeout_s}


def options_of(config: ServeConfig) -> dict[str, Any]:
    """Return Serve's options of a replica that holds the model."""
    queue = config.limits.queue
    options: dict[str, Any] = {
        "name": "endpoint",
        # more than the service's own queue, so that the service answers 429
        "max_ongoing_requests": 2 * queue,
        **_drain(config),
        "health_check_period_s": 5,
        "logging_config": {"enable_access_log": config.access_log},
        "ray_actor_options": replica_takes(config),
    }
    if not config.scales:
        return {**options, "num_replicas": config.replicas}
    scaling = {
        "min_replicas": config.replicas,
        "max_replicas": config.max_replicas,
        "target_ongoing_requests": config.max_batch,
    }
    return {**options, "autoscaling_config": scaling}
