"""The laboratory of tiny models, and complete runs that several tests look at.

The libraries are imported where they are needed: pytest's process that only hands out tests need not wait for them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from fork_server import ForkServer

if TYPE_CHECKING:
    from local_endpoint import Served
    from tiny import Complete, Done, Lab, Taught

SERVER = pytest.StashKey[ForkServer]()
COPIES = pytest.StashKey["Copies"]()
LATER = ("deepspeed", "peft", "sklearn.manifold", "torch._dynamo")
"""Libraries that runs import when they need them: processes of the fork server find them imported."""
SERVED = ("l2p", "mocl", "mocl-task-id", "moelora", "prompt", "lfpt5-real")
"""Methods whose taught runs are only served: half the steps at twice the rate, and no checkpoints inside a task."""
CRASHES = (3, 7)
"""Steps of the laboratory's runs, of 4 a task, after which a copy of a complete run's folder is kept."""
RAY = Path(__file__).resolve().parents[1] / "ray"


def pytest_configure(config: pytest.Config) -> None:
    """Start the server of copies before raycl and Ray are imported, where there may be tests of tests/ray or where this
    process hands out tests: the processes that get them are copies too."""
    from copy_server import Copies, CopyServer

    hands_out = not hasattr(config, "workerinput") and config.getoption("numprocesses", None)
    paths = [config.invocation_params.dir / argument.partition("::")[0] for argument in config.args]
    if copies := Copies.joined():
        config.stash[COPIES] = copies
    elif hands_out or any(path == RAY or RAY in path.parents or path in RAY.parents for path in paths):
        server = config.stash[COPIES] = CopyServer()
        config.add_cleanup(server.close)
        if hands_out:
            patch = pytest.MonkeyPatch()
            config.add_cleanup(patch.undo)
            server.set_in(patch)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the server for tests that need processes of their own, where there are any, before the first test."""
    if any("fork_server" in getattr(item, "fixturenames", ()) for item in session.items):
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        for library in LATER:
            import_module(library)
        session.config.stash[SERVER] = ForkServer()


@pytest.fixture(scope="session")
def fork_server(pytestconfig: pytest.Config) -> Iterator[ForkServer]:
    server = pytestconfig.stash[SERVER]
    yield server
    server.close()


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    import tiny

    return tiny.Lab(tmp_path_factory.mktemp("lab"))


@contextmanager
def _shared(cache: Path) -> Iterator[None]:
    """Make a run that outlives the test that asks for it first: its rows are not in a cache of that test's own."""
    from reading_once import reading_once

    with pytest.MonkeyPatch.context() as patch, reading_once():
        patch.setenv("RAYCL_CACHE", str(cache))
        yield


@pytest.fixture(scope="session")
def complete(lab: Lab, tmp_path_factory: pytest.TempPathFactory, session_cache: Path) -> Complete:
    """(backbone kind, method or variant, engine) -> its complete run, made when first asked for.

    What a crash after each of `CRASHES` would have left is kept (`crash_copies.left_after`).
    """
    from crash_copies import copied_after
    from tiny import ENGINES, VARIANTS, WRITERS, Done, run

    from raycl.storage import Storage

    done: dict[tuple[str, str, str], Done] = {}

    def get(kind: str, method: str, engine: str) -> Done:
        key = (kind, method, engine)
        if key not in done:
            config = lab.config(kind, (VARIANTS | WRITERS).get(method, method), ENGINES[engine])
            storage = Storage.at(tmp_path_factory.mktemp("-".join(key)))
            with _shared(session_cache), copied_after(storage, *CRASHES):
                done[key] = Done(config, storage, run(config, storage).context)
        return done[key]

    return get


@pytest.fixture(scope="session")
def taught(lab: Lab, tmp_path_factory: pytest.TempPathFactory, session_cache: Path) -> Taught:
    """(backbone kind, method) -> a run of more epochs; `slm` with `Lab.slots`, `prompts` and `soft` with prompts."""
    from tiny import VARIANTS, WRITERS, Done, run

    from raycl.storage import Storage

    done: dict[tuple[str, str], Done] = {}

    def get(kind: str, method: str) -> Done:
        if (kind, method) not in done:
            settings = {
                "slm": lab.slots(),
                "sapt": {"name": "sapt", "arm": {"fraction": 1.0, "weight": 2.0}},
                "soft": {"name": "sapt", "value": "prompt", "prompt_length": 3, "arm": {"weight": 0.0}},
                "prompts": lab.slots(value="prompt", retrieval={"rule": "vote"}),
                "olora": {"name": "olora", "head": "own"},
                "l2p": {"name": "l2p", "pull": 0.0},  # with it a tiny encoder soon gives all texts the same prompts
            }
            settings |= {**WRITERS, **{name: VARIANTS[name] for name in ("mocl-task-id", "lora-dora", "lora-copies")}}
            sections: dict[str, Any] = {"train": {"epochs": 6, "learning_rate": 0.03}}
            if method in SERVED:
                sections = {"train": {"epochs": 3, "learning_rate": 0.06}, "checkpoint": {"every_steps": None}}
            config = lab.config(kind, settings.get(method, method), **sections)
            storage = Storage.at(tmp_path_factory.mktemp(f"{kind}-{method}"))
            with _shared(session_cache):
                done[kind, method] = Done(config, storage, run(config, storage).context)
        return done[kind, method]

    return get


@pytest.fixture(scope="session")
def served(complete: Complete) -> Iterator[Callable[[str], Served]]:
    """Backbone kind -> an endpoint over its complete run of SLM, started when first asked for; for reading only."""
    from local_endpoint import serving

    with ExitStack() as stack:
        running: dict[str, Served] = {}

        def get(kind: str) -> Served:
            if kind not in running:
                uri = complete(kind, "slm", "torch").storage.sub("bank").uri
                running[kind] = stack.enter_context(serving(uri))
            return running[kind]

        yield get


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that needs 10 ms a token at least: what a test interrupts is still continuing then."""
    from raycl.generation import dynamic_cache

    step = dynamic_cache.step

    def slowly(*given: Any) -> Any:
        time.sleep(0.01)
        return step(*given)

    monkeypatch.setattr(dynamic_cache, "step", slowly)
