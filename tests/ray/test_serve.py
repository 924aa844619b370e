"""The endpoint on Ray Serve, as it is deployed: asked while another task is learned, killed, rolled back, stopped."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
import torch
from ray import serve
from tiny import Lab, on_main

from raycl import config as configs
from raycl.bank import Bank, NewSnapshot
from raycl.bank.branches import Branch
from raycl.serve.deployment.app import build_from
from raycl.serve.deployment.application import start
from raycl.serve.service.metrics import metrics_urls
from raycl.serve.settings import ServeConfig
from raycl.storage import Storage
from raycl.training.assembly import build
from raycl.training.stream_loop import StreamLoop
from raycl.training.workers.distributed import DistributedContext

CLIENTS, PORT, NAME = 4, 8917, "mine"
PAUSE_S, LOOK_S = 0.1, 0.3
"""Seconds between a client's requests, and between two looks at what is awaited: without them the clients take all
processors while a task is learned."""
TEXTS = ("fire is warm very", "the sea is cold", "it purrs a sleeps", "the barks runs much")


@pytest.fixture(scope="module", autouse=True)
def stopped(ray_cluster: dict[str, str]) -> Iterator[None]:
    """Serve ends before the cluster does: asked afterwards, it would start a cluster of its own to end."""
    yield
    serve.shutdown()


class Learner:
    """A tiny stream that learns one task at a time into its bank."""

    def __init__(self, lab: Lab, kind: str, folder: Path) -> None:
        self.config = lab.config(kind, lab.slots(), train={"epochs": 6, "learning_rate": 0.03})
        self.storage = Storage.at(folder)

    def learn_one(self) -> Bank:
        world = DistributedContext.alone(torch.device("cpu"))
        context, open_engine = build(self.config, world)
        StreamLoop(context, open_engine, self.storage, world).run(stop_after=1)
        return Bank(self.storage.sub("bank"))


def served(bank: Bank, **settings: Any) -> httpx.Client:
    """Return the endpoint over a bank, ready to be asked."""
    tree = {"bank": bank.storage.address, "port": PORT, "max_batch": 8, "cpus": 0.2, **settings}
    config = configs.validate(ServeConfig, tree)
    for name in serve.status().applications:
        serve.delete(name)
    start(config, build_from(config), NAME)
    return httpx.Client(base_url=f"http://127.0.0.1:{config.port}", timeout=60)


class Clients:
    """Clients that ask again and again until they are stopped; every answer is kept."""

    def __init__(self, path: str, bodies: list[dict[str, Any]]) -> None:
        self.answers: list[tuple[int, dict[str, Any]]] = []
        self.failed: list[str] = []
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask, args=(path, bodies[number % len(bodies)]), daemon=True)
            for number in range(CLIENTS)
        ]

    def _ask(self, path: str, body: dict[str, Any]) -> None:
        with httpx.Client(base_url=f"http://127.0.0.1:{PORT}", timeout=60) as client:
            while not self._stop.is_set():
                try:
                    response = client.post(path, json=body)
                    if response.status_code == 200:
                        self.answers.append((TEXTS.index(body["input"]), response.json()["data"][0]))
                    else:
                        self.failed.append(response.text)
                except httpx.HTTPError as error:
                    self.failed.append(repr(error))
                time.sleep(PAUSE_S)

    @contextmanager
    def asking(self) -> Iterator[None]:
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            self._stop.set()
            for thread in self._threads:
                thread.join(timeout=60)


def until(happened: Callable[[], bool], seconds: float = 60.0) -> None:
    began = time.monotonic()
    while not happened():
        assert time.monotonic() - began < seconds, "it never happened"
        time.sleep(LOOK_S)


def active(client: httpx.Client) -> int:
    """Return the active snapshot; 0 while Serve's proxy has no route to the endpoint."""
    value = client.get("/v1/snapshots")
    return int(value.json()["active"]) if value.status_code == 200 else 0


@pytest.mark.timeout(240)
def test_a_task_is_learned_under_load(lab: Lab, tmp_path: Path) -> None:
    """No request fails, the new task is answered, and what one snapshot answers never changes."""
    learner = Learner(lab, "bert", tmp_path)
    bank = learner.learn_one()
    client = served(bank, follow={"poll_s": 0.1})
    clients = Clients("/v1/classify", [{"input": text} for text in TEXTS])
    with clients.asking():
        until(lambda: len(clients.answers) > 4 * CLIENTS)
        learner.learn_one()
        until(lambda: active(client) == 2)
        before = len(clients.answers)
        until(lambda: len(clients.answers) > before + 4 * CLIENTS)
        rolled = client.post("/admin/activate", json={"snapshot": 1})
        assert rolled.status_code == 200 and rolled.json() == {"active": 1, "before": 2}
        before = len(clients.answers)
        until(lambda: len(clients.answers) > before + 4 * CLIENTS)
    assert clients.failed == []
    said: dict[tuple[int, int], set[str]] = {}
    for text, answer in clients.answers:
        number = answer["raycl"]["snapshot"]
        said.setdefault((number, text), set()).add(answer["label"])
        tasks = {"colour"} if number == 1 else {"colour", "animal"}
        assert set(answer["raycl"]["tasks"]) <= tasks, "an answer is of one snapshot alone"
    assert all(len(labels) == 1 for labels in said.values()), "the same text, the same snapshot, the same label"
    assert set(said) == {(number, text) for number in (1, 2) for text in range(4)}
    assert all(label in ("cat", "dog") for text in (2, 3) for label in said[2, text])
    time.sleep(0.5)
    assert active(client) == 1, "a rollback holds although a newer snapshot is there"


@pytest.mark.timeout(300)
def test_ingresses_answer_the_same_and_survive_a_killed_replica(lab: Lab, tmp_path: Path) -> None:
    """Replicas behind the proxy, and replicas that listen themselves: these share a port, and free it."""
    learner = Learner(lab, "llama", tmp_path)
    learner.learn_one()
    bank = learner.learn_one()
    path = "/v1/chat/completions"
    bodies = [{"messages": [{"role": "user", "content": text}], "max_tokens": 4} for text in TEXTS]
    client = served(bank, replicas=2)
    behind = [client.post(path, json=body).json() for body in bodies]
    with client.stream("POST", path, json={**bodies[0], "stream": True}) as stream:
        lines = [line for line in stream.iter_lines() if line]
    assert lines[-1] == "data: [DONE]" and len(lines) >= 3
    kill_one_of_two()
    good = 0
    for _ in range(20):
        stream = client.post(path, json=bodies[0])
        good += stream.status_code == 200
        refused = "" if stream.status_code == 200 else stream.json()["error"]["message"]
        assert not refused or (stream.status_code == 503 and "send the request again" in refused), stream.text
    assert good >= 15, "the other replica continues"
    until(lambda: serve.status().applications[NAME].deployments["endpoint"].status == "HEALTHY")

    client = served(bank, ingress="direct", replicas=2, port=PORT + 1)
    together = [client.post(path, json=body).json() for body in bodies]
    for item, two in zip(together, behind, strict=True):
        assert item["choices"][0]["message"] == two["choices"][0]["message"]
        assert item["raycl"]["adapters"] == pytest.approx(two["raycl"]["adapters"], abs=1e-5)
    kill_one_of_two()
    until(lambda: serve.status().applications[NAME].deployments["endpoint"].status == "UNHEALTHY")
    with httpx.Client(base_url=client.base_url, timeout=60, limits=httpx.Limits(max_keepalive_connections=0)) as anew:
        for _ in range(16):  # each on a connection of its own
            stream = anew.post(path, json=bodies[0])
            assert stream.json()["choices"][0]["message"] == together[0]["choices"][0]["message"], "the other continues"
        serve.delete(NAME)
        with pytest.raises(httpx.ConnectError):
            anew.get("/healthz")


def kill_one_of_two() -> None:
    """Kill one of the two replicas with the model."""
    replicas = [actor for actor in ray.util.list_named_actors(all_namespaces=True) if "#endpoint#" in actor["name"]]
    assert len(replicas) == 2
    ray.kill(ray.get_actor(replicas[0]["name"], namespace=replicas[0]["namespace"]))


def gauge(client: httpx.Client, name: str) -> list[float]:
    """Return a gauge of raycl as Ray's Prometheus endpoint on this machine has it."""
    text = "".join(client.get(url).text for url in metrics_urls())
    return [float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(f"ray_raycl_{name}{{")]


@ray.remote(num_cpus=1.75)
class Blocker:
    """Holds CPUs until it is killed."""

    def ready(self) -> None:
        pass


@pytest.mark.timeout(300)
def test_following_with_a_gate(lab: Lab, tmp_path: Path) -> None:
    """A candidate that loses a task is refused, and the decision says why.

    While the gate's CPUs are taken, and with a snapshot that cannot be judged: `problem` and the metrics say it.
    """
    learner = Learner(lab, "bert", tmp_path)
    bank = learner.learn_one()
    gate = {"split": "test", "max_drop": 50.0, "report_after_s": 2}
    settings = {"follow": {"enabled": True, "gated": True}, "gate": gate}
    client = served(bank, **settings)
    blocker = Blocker.remote()
    ray.get(blocker.ready.remote())

    measured = partial(gauge, client)

    def found() -> dict[str, Any]:
        return dict(client.get("/v1/snapshots").json())

    learner.learn_one()
    assert client.get("/readyz").json()["metrics"] in metrics_urls()
    waits = "snapshot 2 waits for the gate, which needs 0.2 CPUs: the cluster has 0.05 of 2 CPUs free"
    until(lambda: waits in found()["problem"])
    until(lambda: 1.0 in measured("gate_problem") and max(measured("gate_waiting_s"), default=0) > 0)
    until(lambda: 1.0 in measured("follow_problem"))
    assert active(client) == 1
    ray.kill(blocker)
    until(lambda: active(client) == 2)
    until(lambda: not found()["problem"] and {*measured("gate_problem"), *measured("gate_waiting_s")} == {0.0})
    good = bank.open(2)
    fields = (good.backbone, good.router, list(good.tasks), good.encoder)
    worse = []
    for entry in good.adapters:
        state = bank.fetch(entry, good.layouts[entry.layout])
        assert state.head_weight is not None
        bad = replace(state, head_weight=-state.head_weight)
        worse.append(bank.publish(entry.name, bad, good.backbone, entry.tasks))
    on_main(bank, bank.snapshot(NewSnapshot(worse, *fields, provenance=good.provenance)))
    rejected = re.compile(r"snapshot 3 was rejected: (colour|animal) falls by \d+")
    until(lambda: bool(rejected.match(found()["decision"].get("why") or "")), 120)
    assert active(client) == 2
    until(lambda: bool(rejected.match(found()["problem"])))
    entries = [(entry, good.layouts[entry.layout]) for entry in good.adapters]
    on_main(bank, bank.snapshot(NewSnapshot(entries, *fields, provenance={})))
    unknown = "snapshot 4 cannot be evaluated, snapshot 2 stays active: snapshot 4 has no record"
    until(lambda: unknown in found()["problem"])
    assert client.post("/admin/activate", json={"snapshot": 4}).status_code == 200
    until(lambda: not found()["problem"] and active(client) == 4)
    Branch(bank).go_back(good, "nothing is known of 4")
    until(lambda: active(client) == 2 and found()["decision"]["why"] == "it answered before: nothing is known of 4")
