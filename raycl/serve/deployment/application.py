"""An endpoint as an application of Ray Serve: its name on a cluster, its start next to others, its end."""

import hashlib
import logging
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import ray
from ray import serve
from ray.exceptions import ActorAlreadyExistsError, RayError
from ray.serve.context import _get_global_client
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ServeInstanceDetails

from raycl.errors import LaunchError
from raycl.launch import cluster
from raycl.launch.http.connections import bound
from raycl.serve.http.access import PROXY_HOOK, limit_proxy
from raycl.serve.resources import gate_takes, total_resources
from raycl.serve.settings import ServeConfig

log: logging.Logger = logging.getLogger("raycl")

NAMESPACE = "serve"

FAULTS = (RayError, RayServeException, RuntimeError, TimeoutError, ConnectionError)
"""Errors of Ray and Serve when a controller, a proxy or a replica does not answer."""

WATCH_S = 5.0
"""Seconds between two looks whether an application is still there."""


def name_of(config: ServeConfig) -> str:
    """Return the application's name: the bank's folder, for people, and a digest of its config, for Ray Serve."""
    parts = [part for part in re.split(r"[^A-Za-z0-9_-]+", config.bank.partition("?")[0]) if part]
    folder = next((part for part in reversed(parts) if part != "bank"), "bank")[:40]
    answers = "\n".join((config.bank, config.branch, config.upstream.export or ""))
    return f"raycl-{folder}-{hashlib.sha256(answers.encode()).hexdigest()[:8]}"


def connect() -> None:
    """Connect to Ray; proxies of Ray Serve that this job starts have limits (`limit_proxy`)."""
    hook = f"{limit_proxy.__module__}:{limit_proxy.__name__}"
    cluster.connect(namespace=NAMESPACE, env_vars={PROXY_HOOK: hook})


class Holder:
    """Holds a name for the command that serves; it ends with that command, however that ends."""


@contextmanager
def reserved(name: str) -> Iterator[None]:
    """Reserve the name for this command on the cluster.

    Raises:
        LaunchError: another command serves under it.
    """
    try:
        holder = ray.remote(Holder).options(name=f"holder of {name}", namespace=NAMESPACE, num_cpus=0).remote()
    except ActorAlreadyExistsError as error:
        raise LaunchError(
            f"another command on this cluster serves this bank already, as application '{name}': ask that one, end it, "
            "or serve another branch"
        ) from error
    try:
        yield
    finally:
        del holder


def start(config: ServeConfig, application: object, name: str | None = None, replace: bool = False) -> None:
    """Bring the application up and return.

    Args:
        name: name of the application; None: `name_of`.
        replace: one of that name that is there was left by a command that has ended.

    Raises:
        LaunchError: the cluster, a proxy or a replica did not start, or the name, path or port is taken.
    """
    if not config.access_log:
        logging.getLogger("ray.serve").setLevel(logging.WARNING)  # this command has lines of its own for what it does
    connect()
    name = name or name_of(config)
    if config.ingress == "direct" and not config.port:
        raise LaunchError("port=0 lets every replica choose a port of its own: name one with port=NUMBER")
    if not config.wait_for_nodes:
        _check_room(config)
    requested = {resource: amount for resource, amount in total_resources(config).items() if amount}
    try:
        _check_others(config, name, replace)
        serve.start(
            proxy_location="Disabled" if config.ingress == "direct" else "EveryNode",
            http_options={"host": config.host, "port": config.port},
            logging_config={"enable_access_log": config.access_log},
        )
        waits = not cluster.fits(requested)
        with cluster.log_while_pending(lambda: waits, requested, "replicas, threads or cpus"):
            # replicas that listen themselves have no path behind a proxy
            serve.run(application, name=name, route_prefix=None if config.ingress == "direct" else config.route_prefix)
    except FAULTS as error:
        raise LaunchError(f"the endpoint did not start: {_reason(name, error)}") from error


def _reason(name: str, error: Exception) -> str:
    """Return what the application's status says, or else the error."""
    message = ""
    with suppress(*FAULTS):
        application = serve.status().applications.get(name)
        message = application.message if application else ""
    return " ".join((message or str(error) or type(error).__name__).split())[-800:]


def _check_others(config: ServeConfig, name: str, replace: bool) -> None:
    """Check that no other application is replaced, and that Serve listens at this endpoint's address."""
    client = _get_global_client(raise_if_no_controller_running=False)
    if client is None:
        if cluster.named():
            with bound(config.host, config.port):  # a proxy that cannot listen is reported by Serve after a minute
                pass
        return
    details_of_serve = ServeInstanceDetails(**client.get_serve_details())
    others = {
        other: details for other, details in details_of_serve.applications.items() if details.status != "DELETING"
    }
    if name in others:
        if not replace:
            raise LaunchError(f"this cluster serves an application '{name}' already: end the command that started it")
        log.info("application '%s' was left by a command that has ended: it is replaced", name)
    if config.ingress == "direct":
        return
    path = config.route_prefix
    there = details_of_serve.http_options
    if details_of_serve.proxy_location == "Disabled":
        raise LaunchError(
            "Ray Serve runs on this cluster without proxies: use ingress=direct with a free port=NUMBER, or end Serve "
            "with `serve shutdown` if no one else uses it"
        )
    if there is not None and (there.host, there.port) != (config.host, config.port):
        raise LaunchError(
            f"Ray Serve listens on {there.host}:{there.port} on this cluster since it was started, not on "
            f"{config.host}:{config.port}: use host={there.host} port={there.port}, or ingress=direct"
        )
    taken = [other for other, details in others.items() if details.route_prefix == path and other != name]
    if taken:
        raise LaunchError(
            f"route_prefix={path} is the path of application '{taken[0]}' on this cluster: choose another one with "
            "route_prefix=/NAME, or ingress=direct with a free port=NUMBER"
        )


def _check_room(config: ServeConfig) -> None:
    have, gate = ray.cluster_resources(), gate_takes(config)
    for name, key, remedy in (
        ("CPU", "num_cpus", "use fewer replicas or threads, set cpus to what a replica may reserve"),
        ("GPU", "num_gpus", "use fewer replicas, share GPUs with gpus=0.5 gate.gpus=0.5, set gate.device=cpu"),
    ):
        wanted, there = total_resources(config)[name], have.get(name, 0.0)
        if wanted > there:
            part = f" ({gate[key]:g} for its gate)" if config.gates and gate[key] else ""
            raise LaunchError(
                f"the endpoint needs {wanted:g} {name}s{part}, but the cluster has {there:g}: {remedy}, or set "
                "wait_for_nodes=true if the cluster grows"
            )


class Watch:
    """Looks whether an application is still on the cluster, in a thread.

    Attributes:
        gone: it has been deleted by others.
    """

    def __init__(self, name: str, stopped: threading.Event) -> None:
        self.gone: bool = False
        self._name, self._stopped = name, stopped
        threading.Thread(target=self._look, name="raycl-watch", daemon=True).start()

    def _look(self) -> None:
        while not self._stopped.wait(WATCH_S):
            try:
                self.gone = self._name not in serve.status().applications
            except FAULTS as error:  # Serve's controller is started anew when it ends
                log.debug("the applications are not known: %s", error)
            if self.gone:
                self._stopped.set()


def end(name: str, whole: bool) -> None:
    """Delete the application, and nothing that others serve.

    Args:
        whole: and Ray Serve, because the cluster is this command's own.
    """
    if not ray.is_initialized():
        return
    try:
        if whole:
            serve.shutdown()
        else:
            serve.delete(name)
    except FAULTS as error:
        if not whole:
            log.warning("application '%s' could not be deleted: %s", name, " ".join(str(error).split())[-400:])
