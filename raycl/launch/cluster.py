"""The Ray of a command: the one that is named, or one of its own on this machine, reached by loopback alone.

A Ray that merely runs on this machine belongs to another command (an endpoint, another run); a command that joined it
would wait for its CPUs and end with it. So several on one machine are normal, and each one's processes need its
address: without `RAY_ADDRESS`, Ray searches for others.
"""

import logging
import os
import secrets
import socket
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, chdir, contextmanager
from pathlib import Path
from typing import Any

import ray
from ray._private import ray_constants
from ray.exceptions import RayError
from ray.util.state import list_jobs
from ray.util.state.exception import RayStateApiException

from raycl.errors import LaunchError
from raycl.launch.console import repeating
from raycl.training.definition.job import Resources
from raycl.training.workers.stopping import exit_on_sigterm, exits_on_sigterm

log: logging.Logger = logging.getLogger("raycl")

PORTS = range(20_000, 32_000)
"""Ports of the head of a command's own Ray: below the system's ephemeral ports, above those of Ray's workers."""

WAIT_S = 10.0
"""Seconds between the log lines of a command that waits for resources."""

ASK_S = 5
"""Seconds in which the cluster's dashboard says which jobs there are."""


def named(address: str | None = None) -> str | None:
    """Return the cluster that the config or RAY_ADDRESS names (`ray job submit` sets it); None: start one here."""
    address_given = address or os.environ.get("RAY_ADDRESS")
    return None if address_given in (None, "", "local") else address_given


def connect(
    address: str | None = None,
    namespace: str | None = None,
    dashboard: bool | None = None,
    env_vars: Mapping[str, str] | None = None,
) -> None:
    """Join the cluster that is named, or start one here, unless this process has one.

    Args:
        address: address in the config. dashboard: dashboard of a cluster that is started; None: Ray's default.
        env_vars: environment variables of all processes that this job starts on the cluster.

    Raises:
        LaunchError: there is no cluster at that address, or Ray does not start.
    """
    if ray.is_initialized():
        return
    began, given = time.monotonic(), named(address)
    log.info("%s", f"joining Ray at {given}" if given else "starting Ray here")
    quiet: dict[str, Any] = {"namespace": namespace, "log_to_driver": False, "logging_level": "error"}
    if env_vars:
        quiet["runtime_env"] = {"env_vars": dict(env_vars)}
    try:
        with _importing_as_here(), ExitStack() as stack:
            stack.push(_late_start)
            if given:
                ray.init(address=given, **quiet)
            else:
                with _alone():
                    ray.init(address="local", include_dashboard=dashboard, **quiet)
    except (ConnectionError, ValueError) as error:
        raise LaunchError(
            f"no Ray answers at {given}, which launch.address or RAY_ADDRESS names: start it there, unset that for one "
            "here, or, where it needs a token, export RAY_AUTH_MODE=token"
        ) from error
    log.info("Ray %s in %.0f s", f"joined at {given}" if given else "started here", time.monotonic() - began)


@contextmanager
def joined(address: str | None, dashboard: bool = False) -> Iterator[None]:
    """Join the cluster that is named, or start one here, unless this process has one; it is left again on exit.

    Args:
        address: address in the config. dashboard: start it too; without it Train's cleaner of the remains of dead
            trials cannot work.
    """
    if ray.is_initialized():
        yield
        return
    # Progress comes through the run's own log (`follow`): Ray's forwarding would mix in its helpers' chatter. Without
    # the dashboard a local start takes a third of the time; what it would clean up ends with the cluster anyway.
    exits = exits_on_sigterm()
    connect(address, dashboard=dashboard)
    if exits:  # Ray has put its own handler there
        exit_on_sigterm()
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def _importing_as_here() -> Iterator[None]:
    """Processes that Ray starts now import from the folders that this process imports from.

    Ray puts the working directory of a driver on the import path of its workers, whether or not the driver imports from
    it: modules in a data folder, a bank or a run directory would be executed. So the working directory is the root of
    the file system meanwhile, unless it is on this process's own path. `ray job submit` sets the path by itself.
    """
    folder = Path.cwd()
    if any(Path(entry).resolve() == folder for entry in sys.path):  # "" is the working directory
        yield
        return
    given = os.environ.get("PYTHONPATH")
    absolute = {} if given is None else {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, given.split(os.pathsep)))}
    with chdir(folder.anchor), environment(absolute):
        yield


def _late_start(kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
    """Turn Ray's error for a late start, which has no class of its own, into an error of raycl."""
    if kind in (Exception, RuntimeError, TimeoutError):
        raise LaunchError(
            f"Ray did not start ({' '.join(str(error).split())[:400]}): repeat the command, with fewer processes "
            "beside it where this machine is slow"
        ) from error


@contextmanager
def _alone() -> Iterator[None]:
    port = free_port()
    values = {
        "RAY_GCS_SERVER_PORT": str(port),
        "RAY_ADDRESS": f"127.0.0.1:{port}",  # else its helpers look for a Ray, and find several
        ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0",  # on loopback, as on systems where Ray has no clusters
    }
    enabled = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        with environment(values):
            yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = enabled


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables inside."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def free_port(ports: Sequence[int] = PORTS) -> int:
    """Return one of these ports that is free on loopback.

    Raises:
        LaunchError: every one that was tried is taken.
    """
    for _ in range(100):
        port = secrets.choice(ports)
        with socket.socket() as tried:
            if tried.connect_ex(("127.0.0.1", port)):
                return port
    raise LaunchError(f"no free port from {ports[0]} to {ports[-1]} for Ray: end what listens there")


@contextmanager
def log_while_pending(
    waits: Callable[[], bool], requested: Mapping[str, float], lower: str, every_s: float = WAIT_S
) -> Iterator[None]:
    """Log every `every_s` seconds that resources are waited for, as long as `waits` returns True.

    Args:
        requested: resource -> amount in all. lower: the settings that ask for it.
    """

    def look() -> None:
        try:
            if waits():
                log.info("%s", shortage(requested, lower))
        except (RayError, ConnectionError, RuntimeError) as error:  # the cluster does not answer just now
            log.debug("pending requests are not known: %s", error)

    with repeating(look, every_s, "waiting"):
        yield


def is_pending(all_of_it: bool = False) -> bool:
    """Return whether a placement group of this process's Ray job has no place yet.

    Args:
        all_of_it: and none of its groups that take CPUs has one.
    """
    mine = ray.get_runtime_context().get_job_id()  # a group's id ends with its job's
    groups = [group for name, group in ray.util.placement_group_table().items() if name.endswith(mine)]
    placed = any(
        group["state"] == "CREATED" and any(bundle.get("CPU") for bundle in group["bundles"].values())
        for group in groups
    )
    return any(group["state"] in ("PENDING", "RESCHEDULING") for group in groups) and not (all_of_it and placed)


def nodes() -> list[Resources]:
    """Return what each node has in all, without those that have no CPUs for workers."""
    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return [Resources(have["CPU"], have.get("GPU", 0.0)) for have in alive if have.get("CPU")]


def described(nodes: Iterable[Resources]) -> str:
    """Return what the nodes have, as a part of a sentence."""
    return (
        " + ".join(f"{count} x ({node.cpus:g} CPUs, {node.gpus:g} GPUs)" for node, count in Counter(nodes).items())
        or "no CPUs"
    )


def held(nodes: Iterable[Resources], each: Resources) -> int:
    """Return how many processes with these resources the nodes hold at a time."""
    by_cpus = [(node, int(node.cpus // each.cpus)) for node in nodes]
    return sum(min(count, int(node.gpus // each.gpus)) if each.gpus else count for node, count in by_cpus)


def even_cpus(nodes: Sequence[Resources], processes: int) -> float:
    """Return the most whole CPUs that each of so many processes can have; 1 where there are too few."""
    most = int(max((node.cpus for node in nodes), default=1.0))
    return float(next((cpus for cpus in range(most, 1, -1) if held(nodes, Resources(cpus)) >= processes), 1))


def fits(requested: Mapping[str, float]) -> bool:
    """Return whether so much is free now."""
    free = ray.available_resources()
    return all(free.get(name, 0.0) >= amount for name, amount in requested.items())


def shortage(requested: Mapping[str, float], lower: str) -> str:
    """Return the requested resources, the free ones, and the other jobs of the cluster."""
    free, have = ray.available_resources(), ray.cluster_resources()
    wanted = " and ".join(f"{amount:g} {name}s" for name, amount in requested.items() if amount)
    left = " and ".join(f"{free.get(name, 0):g} of {have.get(name, 0):g} {name}s" for name in requested)
    others = "; ".join(_other_jobs())
    remedy = f"wait for or stop {others}, or lower {lower}" if others else f"lower {lower}, or see ray status"
    return f"waiting for {wanted}: the cluster has {left} free; {remedy}"


def _other_jobs() -> Iterator[str]:
    """Yield the commands that have a Ray job on this cluster, where its dashboard names them."""
    runtime = ray.get_runtime_context()
    try:
        jobs = list_jobs(runtime.gcs_address, filters=[("status", "=", "RUNNING")], timeout=ASK_S)
    except (RayStateApiException, OSError) as error:  # no dashboard
        log.debug("other jobs are not known: %s", error)
        return
    for job in jobs:
        if job.driver_info is not None and job.job_id != runtime.get_job_id():
            command = textwrap.shorten(job.entrypoint, 120, placeholder=" ...")
            yield f"'{command}' (process {job.driver_info.pid} on {job.driver_info.node_ip_address})"
