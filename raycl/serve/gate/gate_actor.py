"""Following with a gate: published snapshots are evaluated where the cluster has room, and then activated or rejected.

Evaluating takes a backbone of its own. Its resources are reserved during the evaluation only, and a snapshot that waits
or cannot be evaluated is reported by the endpoint, its metrics and its log.
"""

import logging
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from ray.util.metrics import Gauge

from raycl import config as configs
from raycl.bank import Bank
from raycl.bank.activations import Activation, Activations
from raycl.bank.branches import is_ancestor
from raycl.errors import counted
from raycl.serve.engine.engine_requests import FAILURES
from raycl.serve.gate.judge import GateResult, judge
from raycl.serve.service.service import Service
from raycl.serve.settings import ServeConfig

log: logging.Logger = logging.getLogger(__name__)

PAUSE_S, LONGEST_PAUSE_S = 5.0, 600.0
"""The first pause before a failed evaluation is repeated, doubled each time, and the longest."""

ASK_S, ANSWER_S = 2.0, 10.0
"""Seconds between polls of the gate by replicas, and their longest wait for its answer."""


class GateWorker:
    """An actor that holds the resources of an evaluation for as long as it lives."""

    def __init__(self, tree: dict[str, Any]) -> None:
        logging.getLogger("raycl").setLevel(logging.INFO)
        self.config: ServeConfig = configs.validate(ServeConfig, tree)

    def ready(self) -> None:
        """Return when the actor has its resources."""

    def judge(self, candidate: int) -> GateResult | str:
        """Return the result for a snapshot, or why there is none."""
        try:
            return judge(self.config, candidate, object_store_cache=True)
        except FAILURES as error:
            return str(error)


@dataclass
class _Pending:
    """The branch's newest snapshot, which is not decided.

    Attributes:
        move: the branch's move that published it.
        since, again: when it was found, and when it may be evaluated, on the monotonic clock.
        pause_s: after a failed evaluation.
        problem: why it could not.
    """

    number: int
    move: int
    since: float = field(default_factory=time.monotonic)
    again: float = 0.0
    pause_s: float = PAUSE_S
    problem: str = ""


class GateActor:
    """Watches the bank, has new snapshots evaluated, and decides. It reserves nothing itself."""

    def __init__(self, tree: dict[str, Any], takes: dict[str, float]) -> None:
        """Watch from now on, on a thread of its own.

        Args:
            tree: settings of the endpoint, the device that of the gate. takes: Ray's options of a worker.
        """
        logging.getLogger("raycl").setLevel(logging.INFO)
        self.config: ServeConfig = configs.validate(ServeConfig, tree)
        self._tree, self._takes = tree, takes
        self._activations = Activations(Bank.at(self.config.bank), self.config.branch)
        self._problem, self._pending = "", _Pending(0, 0)
        self._has_problem = Gauge("raycl_gate_problem", "1 while the gate cannot evaluate the newest snapshot")
        self._waiting = Gauge("raycl_gate_waiting_s", "how long the newest snapshot has not been decided")
        self._thread = threading.Thread(target=self._watch, name="raycl-gate", daemon=True)
        self._thread.start()

    def problem(self) -> str:
        """Return why the newest snapshot has not been evaluated; "" if it has, or is being evaluated."""
        return self._problem

    def check_health(self) -> None:
        """Fail where the thread has ended: Serve asks every few seconds, and replaces the gate."""
        assert self._thread.is_alive(), "the gate's thread has ended"

    def _watch(self) -> None:
        while True:
            time.sleep(self.config.follow.poll_s)
            try:
                last, newest = self._activations.latest(), self._activations.branch.last()
                if last is None or newest is None or newest.snapshot is None or newest.number <= last.seen:
                    self._waiting.set(0.0)
                    self._set_problem("")
                    continue
                if newest.number != self._pending.move:
                    if self._has_answered(newest.snapshot, last):
                        self._activations.add(newest.snapshot, f"it answered before: {newest.why}", newest.number)
                        continue
                    self._pending = _Pending(newest.snapshot, newest.number)
                self._set_problem(self._pending.problem)
                self._waiting.set(time.monotonic() - self._pending.since)
                if time.monotonic() >= self._pending.again:
                    self._decide(last)
            except FAILURES as error:  # storage that cannot be reached for a while
                self._set_problem(f"the gate cannot look at the bank now: {error}")

    def _has_answered(self, number: int, last: Activation) -> bool:
        """Return whether a snapshot answered before, or what answers now descends from it: it needs no evaluation."""
        bank, decided = self._activations.bank, self._activations.all()
        if number == last.snapshot or is_ancestor(bank, number, bank.open(last.snapshot)):
            return True
        return any(isinstance(decision, Activation) and decision.snapshot == number for decision in decided)

    def _decide(self, last: Activation) -> None:
        pending = self._pending
        result = self._evaluate()
        if result is None or self._activations.latest() != last:  # it has been decided meanwhile
            return
        if isinstance(result, str):
            pending.again = time.monotonic() + pending.pause_s
            pending.problem = (
                f"snapshot {pending.number} cannot be evaluated, snapshot {last.snapshot} stays active: {result} "
                f"(evaluated again in {pending.pause_s:.0f} s; `raycl serve activate` decides without the gate)"
            )
            pending.pause_s = min(2 * pending.pause_s, LONGEST_PAUSE_S)
            return
        if result.passed:
            why = f"passed the gate: {result.reason}"
            self._activations.add(pending.number, why, pending.move)
        else:
            why = f"snapshot {pending.number} was rejected: {result.reason}"
            self._activations.add(last.snapshot, why, pending.move, rejected=pending.number)

    def _evaluate(self) -> GateResult | str | None:
        """Return the result, or why there is none; None: it has been decided meanwhile, or a newer snapshot is
        there."""
        actor = ray.remote(GateWorker).options(**self._takes).remote(self._tree)
        try:
            if not self._has_room(actor.ready.remote()):
                return None
            self._set_problem(self._pending.problem)
            evaluated, limit, began = (
                actor.judge.remote(self._pending.number),
                self.config.gate.timeout_s,
                time.monotonic(),
            )
            while not self._done(evaluated):
                if time.monotonic() - began > limit:
                    return f"it takes longer than gate.timeout_s={limit:g}"
            result: GateResult | str = ray.get(evaluated)
            return result
        except RayError as error:  # its process or node died
            return " ".join(str(error).split())[:400]
        finally:
            ray.kill(actor)

    def _has_room(self, ready: Any) -> bool:
        """Wait until the worker runs; False: it is no longer needed."""
        pending, began = self._pending, time.monotonic()
        while not self._done(ready):
            last, moves = self._activations.latest(), self._activations.branch.numbers()
            if last is None or pending.move <= last.seen or pending.move != moves[-1]:
                return False
            if time.monotonic() - began > self.config.gate.report_after_s:
                self._set_problem(f"snapshot {pending.number} waits for the gate, which needs {_room(self._takes)}")
        ray.get(ready)
        return True

    def _done(self, result: Any) -> bool:
        self._waiting.set(time.monotonic() - self._pending.since)
        return bool(ray.wait([result], timeout=self.config.follow.poll_s)[0])

    def _set_problem(self, problem: str) -> None:
        if problem and problem != self._problem:
            log.error("%s", problem)
        self._problem = problem
        self._has_problem.set(float(bool(problem)))


def _room(takes: dict[str, float]) -> str:
    """Return a text such as `1 GPU: the cluster has 0 of 2 GPUs free`."""
    free, whole = ray.available_resources(), ray.cluster_resources()
    requested = [(takes[key], name) for key, name in (("num_gpus", "GPU"), ("num_cpus", "CPU")) if takes[key]]
    wants = " and ".join(counted(number, name) for number, name in requested)
    has = ", ".join(f"{free.get(name, 0.0):.3g} of {whole.get(name, 0.0):g} {name}s" for _, name in requested)
    return f"{wants}: the cluster has {has} free"


def poll_gate(gate_actor: DeploymentHandle, service: Service) -> None:
    """Keep `service.gate_problem` up to date, as long as the service lives."""

    def poll() -> None:
        while service.engine.alive:
            try:
                service.gate_problem = gate_actor.problem.remote().result(timeout_s=ANSWER_S)
            except (*FAILURES, RayError, RayServeException) as error:
                reason = " ".join(str(error).split())[:200] or type(error).__name__
                service.gate_problem = f"the gate does not answer, so nothing new is activated: {reason}"
            time.sleep(ASK_S)

    threading.Thread(target=poll, name="raycl-poll-gate", daemon=True).start()
