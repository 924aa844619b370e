"""An endpoint from the command line: started here, pointed at another snapshot, or at a candidate that passes."""

import io
import logging
import shlex
import signal
import threading
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout, suppress

import ray

from raycl.bank import Bank
from raycl.bank.activations import Activation, Activations
from raycl.bank.branches import Move, line_of, resolve
from raycl.bank.integrity import IntegrityCheck
from raycl.config import Tree
from raycl.errors import BankError, LaunchError, StorageError
from raycl.generation.task_prompts import check_templates
from raycl.launch import cluster
from raycl.launch.http.connections import url_of
from raycl.serve.deployment.app import build_from
from raycl.serve.deployment.application import Watch, connect, end, name_of, reserved, start
from raycl.serve.gate.judge import GateResult, judge
from raycl.serve.http.server import claimed
from raycl.serve.service.metrics import metrics_urls
from raycl.serve.settings import ServeConfig
from raycl.text_tables import grid, render

log: logging.Logger = logging.getLogger("raycl")

LOOK_S = 1.0
"""Seconds between two looks for what is new in the bank."""


def serve_forever(config: ServeConfig, ready: Callable[[Tree], None]) -> None:
    """Start the endpoint on this cluster, or on one of our own, and stay until a signal comes.

    Args:
        ready: called once it answers, with its bank, its URL and those of its metrics.

    Raises:
        LaunchError: it did not start, or others deleted it. RayclError: config or bank.
    """
    alone = cluster.named() is None
    with claimed(config) if alone or config.ingress == "direct" else nullcontext(config) as settled:
        if not alone:
            connect()  # what `auto` is depends on what the cluster has
        application, name = build_from(settled), name_of(settled)
        with nullcontext() if alone else reserved(name):
            try:
                _serve(settled, application, name, ready, replace=not alone)
            finally:
                with redirect_stdout(io.StringIO()):  # Serve's controller ends in the midst of a call, which Ray prints
                    end(name, whole=alone)
                    ray.shutdown()


def _serve(config: ServeConfig, application: object, name: str, ready: Callable[[Tree], None], replace: bool) -> None:
    """Start and stay."""
    stopped = threading.Event()
    with suppress(KeyboardInterrupt):
        start(config, application, name, replace)
        for number in (signal.SIGINT, signal.SIGTERM):  # after Ray, which sets a handler of its own
            signal.signal(number, lambda *_: stopped.set())
        path = "" if config.ingress == "direct" else config.route_prefix.rstrip("/")
        url, metrics = url_of(config.host, config.port) + path, metrics_urls()
        log.info("serving %s on %s (Ctrl-C ends it)", config.bank, url)
        log.info("metrics for Prometheus: %s", ", ".join(metrics))
        ready({"bank": config.bank, "url": url, "metrics": metrics})
        news, watch = News(config), Watch(name, stopped)
        while not stopped.wait(LOOK_S):
            news.log()
        if watch.gone:
            raise LaunchError(f"application '{name}' was deleted from the cluster by another command: serve it again")
    log.info("stopping: answers that have begun are finished")


class News:
    """Log lines about what is to answer: moves of the branch that is followed, and decisions."""

    def __init__(self, config: ServeConfig) -> None:
        """Log what comes from now on."""
        self._follows = config.follow.enabled and not config.follow.gated and not config.forwards
        self._activations = Activations(Bank.at(config.bank), config.branch)
        self._move = self._decision = -1
        self.log()

    def log(self) -> None:
        """Log news since the last call; nothing while the bank cannot be read."""
        try:
            move, decision = self._activations.branch.last(), self._activations.latest()
        except (BankError, StorageError):
            return
        if decision is not None and decision.number > self._decision:
            why = decision.provenance["why"]
            if self._decision >= 0:
                log.info("decision %d: snapshot %d answers (%s)", decision.number, decision.snapshot, why)
                self._log_way_back(decision, move)
            self._decision = decision.number
        if move is not None and move.number > self._move:
            if self._move >= 0:
                answers = " and answers once it is loaded" if self._follows else ""
                log.info("branch '%s' is at snapshot %s%s", self._activations.branch.name, move.snapshot, answers)
            self._move = move.number
        self._decision, self._move = max(self._decision, 0), max(self._move, 0)

    def _log_way_back(self, decision: Activation, move: Move | None) -> None:
        """Log that a rejected snapshot is still the head of its branch, and the command that changes it."""
        if move is None or move.snapshot is None or decision.provenance.get("rejected") != move.snapshot:
            return
        bank, branch = self._activations.bank, self._activations.branch.name
        if decision.snapshot not in line_of(bank, branch):
            return
        log.info(
            "branch '%s' still points at snapshot %d, so the next task would be learned from it; to take it back: "
            "raycl bank rollback %s --branch %s --to %d",
            *(branch, move.snapshot, shlex.quote(bank.storage.address), branch, decision.snapshot),
        )


def activate(config: ServeConfig, reference: str) -> tuple[int, int]:
    """Answer from a snapshot, on every replica that watches this bank; returns the numbers of decision and snapshot.

    Args:
        reference: a branch (its newest snapshot), a number, or the first digits of a hash.

    Raises:
        BankError: the bank has no such snapshot, it is damaged, or its chat template does not work.
    """
    bank = Bank.at(config.bank)
    activations, whole = Activations(bank, config.branch), IntegrityCheck.of(bank)
    snapshot = resolve(bank, reference)
    with suppress(BankError):  # without an active one everything is read
        if (last := activations.latest()) is not None:
            whole.mark_checked(bank.open(last.snapshot))
    whole.check(snapshot)
    check_templates(snapshot)
    decided = activations.add(snapshot, "requested")
    log.info("decision %d: snapshot %d answers", decided.number, snapshot.number)
    return decided.number, snapshot.number


def promote(config: ServeConfig, reference: str) -> tuple[GateResult, str]:
    """Judge a candidate and activate it if it passes.

    Args:
        reference: see `activate`.

    Returns:
        the result, and its table with the outcome below.

    Raises:
        RayclError: it cannot be evaluated; nothing is activated.
    """
    number = resolve(Bank.at(config.bank), reference).number
    result = judge(config, number)
    if result.passed:
        activate(config, str(number))
        outcome = f"passed, {result.reason}: snapshot {number} answers"
    else:
        outcome = f"rejected: {result.reason}; snapshot {result.active} stays active"
    return result, f"{gate_table(result)}\n{outcome}"


def gate_table(result: GateResult) -> str:
    """Return a table with a row per task: rows evaluated, score of the active snapshot, of the candidate, and the
    change."""
    table = grid(("task", "rows", f"snapshot {result.active}", f"snapshot {result.candidate}", "change"))
    for task, after in result.after.items():
        before = result.before.get(task)
        old, change = ("", "new") if before is None else (f"{before.value:.1f}", f"{after.value - before.value:+.1f}")
        table.add_row(task, str(after.count), old, f"{after.value:.1f}", change)
    if result.general is not None:
        table.add_row(
            "general ability", "", *(f"{mean:.1f}" for mean in result.general), f"{-result.general_drop:+.1f}"
        )
    return render(table, 200)
