"""An endpoint under load for minutes while replicas are killed, snapshots damaged and hostile requests sent."""

from __future__ import annotations

import argparse
import json
import os
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import ray

from benchmarks.figures import Figure
from benchmarks.serving.banks import damaged_snapshot, drawn_bank, texts_of
from benchmarks.serving.clients import run_clients
from benchmarks.serving.hostile import Hostile
from raycl.bank import Bank

EVERY_S = 60.0
FASTEST = 400.0
"""The most texts per second; none is sent twice."""


def soak(start: Callable[[Bank], str], folder: Path, options: argparse.Namespace) -> Iterator[Figure]:
    """Hold load on an endpoint of two replicas; every minute kill one and publish a damaged snapshot.

    A hostile request is sent every second.

    Args:
        start: brings the endpoint of a bank up; its URL.
    """
    texts = texts_of(int(FASTEST * options.soak_s))
    bank = drawn_bank(folder / "soak", "minilm", 16, texts[:512])
    root = start(bank)
    whole = {int(bank.snapshots()[-1])}
    damaged: list[int] = []
    active: set[int] = set()
    last_problem = ""
    with ThreadPoolExecutor(1) as pool:
        bodies = [{"input": text} for text in texts]
        hostile = Hostile(root)
        load = pool.submit(run_clients, f"{root}/v1/classify", bodies, options.clients, options.soak_s)
        survivor, kills, before, began = _replicas()[0], 0, 0.0, time.monotonic()
        while not load.done():
            time.sleep(1.0)
            passed = time.monotonic() - began
            if passed > options.soak_s / 2 and not before:  # caches of texts and shapes have filled by then
                before = _memory_mb(survivor)
            others = [name for name in _replicas() if name != survivor]
            if passed > EVERY_S * (kills + 1) and passed < options.soak_s - EVERY_S / 2 and others:
                ray.kill(ray.get_actor(others[0], namespace="serve"))
                kills += 1
                damaged.append(damaged_snapshot(bank, kills))
            state = _state(root)
            active |= {state["active"]} if state else set()
            last_problem = state["problem"] if state and state["problem"] else last_problem
        grown = _memory_mb(survivor) - before if before else float("nan")
        seen = load.result()
        hostile.close()
    again = ", ".join(f"{count} with {status}" for status, count in sorted(seen.statuses.items()))
    detail = (
        f"{len(seen.ms):,} answers, {kills} replicas killed, {seen.retried} requests sent again ({again or 'none'})"
    )
    yield Figure(f"requests lost in {options.soak_s:.0f} s of load", float(len(seen.failed)), "", 0.0, "<=", detail)
    wrong = sum(count for status, count in seen.statuses.items() if int(status) >= 500 and status != "503")
    yield Figure("answers from 500 on, other than 503", float(wrong), "", 0.0, "<=", f"p99 {seen.at(99):.0f} ms")
    statuses = ", ".join(f"{count} with {status}" for status, count in sorted(hostile.statuses.items()))
    detail = f"{hostile.statuses.total()} sent: {statuses}; {'; '.join(sorted(set(hostile.faults))) or 'no fault'}"
    yield Figure("the same, of hostile requests", float(len(hostile.faults)), "", 0.0, "<=", detail)
    detail = f"{len(damaged)} published; the last problem: {last_problem or 'none'}"
    yield Figure("damaged snapshots that answered", float(len(active - whole)), "", 0.0, "<=", detail)
    yield Figure("growth of the replica that lived, second half", grown, "MiB", 50.0, "<=", f"of {before:,.0f} MiB")


def _state(root: str) -> dict[str, Any] | None:
    """Return a replica's `/v1/snapshots`; None while that replica is gone."""
    try:
        with urllib.request.urlopen(f"{root}/v1/snapshots", timeout=10) as answer:
            state: dict[str, Any] = json.load(answer)
            return state
    except (OSError, ValueError):
        return None


def _replicas() -> list[str]:
    """Return names of the endpoint's replicas."""
    return sorted(actor["name"] for actor in ray.util.list_named_actors(True) if "#endpoint#" in actor["name"])


def _memory_mb(name: str) -> float:
    """Return the resident memory of a replica's process."""
    actor = ray.get_actor(name, namespace="serve")
    pid = ray.get(actor.__ray_call__.remote(lambda self: os.getpid()))
    return float(psutil.Process(int(pid)).memory_info().rss) / 2**20
