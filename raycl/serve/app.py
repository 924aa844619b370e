"""The endpoint on Ray Serve: replicas, their resources and their life.

    serve run raycl.serve.app:build bank=runs/mine/bank

Why it exists: the one place where the service meets Ray Serve.
What it does not know: how answers are made (`service`), what the wire looks like (`web`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from ray import serve

from raycl import config as configs
from raycl.bank import Bank
from raycl.serve.access import Keys, check_access
from raycl.serve.metrics import Metrics
from raycl.serve.opening import close_service, open_service
from raycl.serve.roster import decide_first
from raycl.serve.settings import ServeConfig
from raycl.serve.web import make_web

NAME = "raycl"


@serve.ingress()
class Endpoint:
    """Ingress, router and model in one replica: no hop between them."""

    def __init__(self, tree: dict[str, Any]) -> None:
        """Load the backbone and the first snapshot."""
        logging.getLogger("raycl").setLevel(logging.INFO)
        self.config = configs.validate(ServeConfig, tree)
        self.service = open_service(self.config, shelf=True)
        self.metrics = Metrics(self.service)

    def __serve_build_asgi_app__(self) -> Any:
        return make_web(self.service, Keys(self.config.auth))

    def check_health(self) -> None:
        """Called by Serve every few seconds; a replica whose model thread has ended is replaced."""
        assert self.service.engine.alive, "the model's thread has ended"

    def __del__(self) -> None:
        if hasattr(self, "service"):
            close_service(self.service)


def build(args: Mapping[str, Any]) -> Any:
    """The application, for `serve run`, `serve deploy` and `jobs/serve.py`.

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
    return build_from(configs.validate(ServeConfig, tree))


def build_from(config: ServeConfig) -> Any:
    """The application of a validated config; what answers first is written into the bank.

    Raises:
        ConfigError, BankError: see `build`.
    """
    check_access(config)
    decide_first(Bank.at(config.bank), config)
    return serve.deployment(Endpoint, **options_of(config)).bind(configs.as_tree(config))


def options_of(config: ServeConfig) -> dict[str, Any]:
    """Serve's options of a replica that holds the model."""
    gpu = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
    queue = config.limits.queue
    options: dict[str, Any] = {
        "name": "endpoint",
        # more than the service's own queue, so that it is the service that says 429
        "max_ongoing_requests": 2 * queue,
        "graceful_shutdown_timeout_s": config.limits.timeout_s,
        "health_check_period_s": 5,
        "ray_actor_options": {"num_cpus": 0 if gpu else config.threads, "num_gpus": float(gpu)},
    }
    if config.max_replicas is None or config.max_replicas == config.replicas:
        return {**options, "num_replicas": config.replicas}
    scaling = {
        "min_replicas": config.replicas,
        "max_replicas": config.max_replicas,
        "target_ongoing_requests": config.max_batch,
    }
    return {**options, "autoscaling_config": scaling}
