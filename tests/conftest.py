"""The setting of every test: few threads, no network, caches in temporary folders, and a small Ray cluster.

The environment is set while pytest imports this file, that is before any test imports torch.
"""

from __future__ import annotations

import gc
import logging
import os
import secrets
import shutil
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from _pytest.logging import catching_logs
from filelock import FileLock
from hypothesis import settings
from shared_cluster import SharedCluster

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler import Scheduling

THREADS = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
QUIET = {
    "OMP_WAIT_POLICY": "PASSIVE",  # else the threads of a run with several compute while they wait
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "RAY_USAGE_STATS_ENABLED": "0",
    "WANDB_MODE": "offline",
    "WANDB_SILENT": "true",
    "DS_ACCELERATOR": "cpu",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # one process less for each worker group: no node is taken away here
    "TRANSFORMERS_VERBOSITY": "error",
    "RAY_prestart_worker_first_driver": "0",  # jobs with a runtime environment, as these are, would not use them
    "RAY_worker_niceness": "0",  # Ray's workers would wait for the tests that run beside them
    "RAY_enable_pipe_based_agent_to_parent_health_check": "1",  # in tests/ray they are no children of the raylet
    "REPORTER_UPDATE_INTERVAL_MS": "60000",  # Ray's: every 5 s its agent reads what each process of the machine uses
    "METRICS_RECORD_INTERVAL_S": "60",  # of the dashboard itself; Ray's: 5
    "LOG_NAME_UPDATE_INTERVAL_S": "2",  # Ray's log monitor looks for new files twice a second,
    "RAY_LOG_MONITOR_MANY_FILES_THRESHOLD": "0",  # and ten times a second where there are fewer than so many
    "SCAN_EVENT_DIR_INTERVAL_SECONDS": "60",  # Ray's: every 2 s its agent and the dashboard look for files of events,
    "NODE_STATS_UPDATE_INTERVAL_SECONDS": "60",  # and every 15 s the dashboard asks what each node uses
}
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
"""Token authentication as in real clusters, but without a token file in the home folder."""

for key, value in {**THREADS, **QUIET, **TOKEN}.items():
    os.environ.setdefault(key, value)

gc.set_threshold(100_000)
"""New objects between two garbage collections, as in raycl's commands."""

MANY = 20_000
"""New objects that are looked through for garbage between two files."""

settings.register_profile("raycl", derandomize=True, database=None, deadline=None)
settings.load_profile("raycl")

REPO = Path(__file__).resolve().parent.parent

MEMORY = Path("/dev/shm")
if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > 4 * 1024**3:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))
"""Folders of tests are kept in memory where it has room for them: raycl waits for the disk after each file."""

SHARING = (
    "test_several_rays",
    "test_sweep",
    "test_warm_workers",
    "test_serve",
    "test_parallel_groups",
    "test_object_store_cache",
)
"""Files of tests/ray that share a cluster: one process gets all of them."""

LONGEST = ("test_train_on_ray", *SHARING, "test_submit")
"""Files of tests/ray that begin before the others."""

ALONE = ("test_devices", "test_world_size")
"""Files of tests/contract that share no runs with others there; one process gets those that do."""

READING_ONCE = {"contract", "golden", "integration", "unit/generation", "unit/methods", "unit/training"}
"""Folders of tests of runs and of what they have learned; a module of them with READS_MODELS reads models each time."""

pytest_plugins = ["complete_runs", "chromium"]
"""Modules of tests/lab, which is on the path: tiny models and complete runs that several tests read; a browser."""


class CatchingAtRoot(catching_logs[logging.Handler]):
    """What catches the log of a test where it arrives: `fresh_log` lets raycl's arrive at the root.

    Pytest looks six times in a test at each of a thousand loggers, and adds its handlers to the sixty of torch, Ray and
    others that pass nothing on: that took longer than all else around a test, a millisecond.
    """

    def __enter__(self) -> logging.Handler:
        root = logging.getLogger()
        self._level_before = root.level
        root.addHandler(self.handler)
        if self.level is not None:
            self.handler.setLevel(self.level)
            root.setLevel(min(root.level, self.level))
        return self.handler

    def __exit__(self, *error: object) -> None:
        root = logging.getLogger()
        if self.level is not None:
            root.setLevel(self._level_before)
        root.removeHandler(self.handler)


def pytest_configure(config: pytest.Config) -> None:
    patch = pytest.MonkeyPatch()
    patch.setattr("_pytest.logging.catching_logs", CatchingAtRoot)
    config.add_cleanup(patch.undo)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Yield what files of tests import is no garbage: a second of collecting in each process."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that start clusters come first, the longest of them before the others: two processes then end together."""

    def place(item: pytest.Item) -> int:
        if "tests/ray/" not in item.path.as_posix():
            return len(LONGEST) + 1
        return LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST)

    items.sort(key=place)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduling | None:
    """Return what hands out files, and together those that share a cluster or complete runs."""
    from xdist.scheduler import LoadFileScheduling

    class LoadSharing(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = Path(nodeid.partition("::")[0])
            if file.stem in SHARING or (file.parent.name == "contract" and file.stem not in ALONE):
                return str(file.parent)
            return str(file)

    return LoadSharing(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.fixture(scope="session", autouse=True)
def session_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """RAYCL_CACHE for this session: what is computed here stays out of the user's own cache."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAYCL_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """Exempt what is alive when a file begins, the libraries above all, from garbage collection."""
    if gc.get_count()[0] > MANY:
        gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def models_read_once(request: pytest.FixtureRequest) -> Iterator[None]:
    """Files of tiny models are read once in tests that are about something else (`reading_once`)."""
    parts = request.path.relative_to(REPO / "tests").parts
    if not {parts[0], "/".join(parts[:2])} & READING_ONCE or hasattr(request.module, "READS_MODELS"):
        yield
        return
    from reading_once import reading_once

    with reading_once():
        yield


@pytest.fixture(autouse=True)
def fresh_log() -> Iterator[None]:
    """Give each test the loggers of a new process: commands run in this one replace handlers and levels.

    A handler that a command left at the root would write to the standard error of a test that is over: a traceback for
    each line.
    """
    log, progress = logging.getLogger("raycl"), logging.getLogger("raycl.progress")

    def restore() -> None:
        log.handlers, log.propagate = [], True
        for logger in (log, progress):
            if logger.level != logging.NOTSET:  # setting it makes all loggers forget their levels
                logger.setLevel(logging.NOTSET)
        root = logging.getLogger()
        root.handlers = [handler for handler in root.handlers if type(handler).__module__.startswith("_pytest.")]

    restore()
    yield
    restore()


@pytest.fixture(scope="session")
def shared() -> Path:
    """Return the folder of models and data sets: RAYCL_SHARED, or `shared` beside the repository."""
    folder = Path(os.environ.get("RAYCL_SHARED", REPO.parent / "shared"))
    if not folder.is_dir():
        pytest.skip(f"no models and data sets at '{folder}': set RAYCL_SHARED to the folder that holds them")
    return folder


@pytest.fixture(scope="module")
def s3_uri() -> Iterator[Callable[[str], str]]:
    """`name -> URI` of a folder in the bucket "bucket" of an S3-compatible server on a free loopback port."""
    import boto3
    from store import MotoServer

    with pytest.MonkeyPatch.context() as patch:
        for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(key, "testing")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        server = MotoServer()
        server.start()
        host, port = server.get_host_and_port()
        urllib.request.urlopen(f"http://{host}:{port}/moto-api/reset", data=b"")  # servers of one process share a store
        boto3.client("s3", endpoint_url=f"http://{host}:{port}").create_bucket(Bucket="bucket")
        yield lambda name: f"s3://bucket/{name}?endpoint_override={host}:{port}&scheme=http"
        server.stop()


@pytest.fixture(scope="session")
def one_at_a_time(tmp_path_factory: pytest.TempPathFactory) -> FileLock:
    """Held while a cluster starts: Ray looks for free ports long before it binds them, so two that start would meet."""
    return FileLock(tmp_path_factory.getbasetemp().parent / "ray-starts.lock")


@pytest.fixture(scope="session")
def shared_cluster(one_at_a_time: FileLock, session_cache: Path) -> Iterator[SharedCluster]:
    """Ends with the session at the latest."""
    cluster = SharedCluster(one_at_a_time, {**THREADS, **QUIET, "RAYCL_CACHE": str(session_cache)})
    yield cluster
    cluster.end()


@pytest.fixture(scope="module", autouse=True)
def own_or_no_cluster(request: pytest.FixtureRequest, shared_cluster: SharedCluster) -> Iterator[None]:
    """End the cluster that an earlier module has left, unless this one shares it; end that of a module of its own."""
    is_own = getattr(request.module, "OWN_CLUSTER", False)
    if shared_cluster.is_running:
        mine = [item for item in request.session.items if item.path == request.path]
        if is_own or not any("ray_cluster" in getattr(item, "fixturenames", ()) for item in mine):
            shared_cluster.end()
    yield
    if is_own:
        shared_cluster.end()


@pytest.fixture(scope="module")
def ray_cluster(shared_cluster: SharedCluster) -> dict[str, str]:
    """Return the address info of a Ray cluster of 2 CPUs on this machine.

    The module that follows in this process uses it too, unless either sets `OWN_CLUSTER`.
    """
    return shared_cluster.get()
