"""Clients in a process of their own: each sends its next request when its last answer is there.

    python -m benchmarks.serving.clients '{"url": ..., "clients": 32, "seconds": 10, "bodies": [...]}'

prints what they saw as JSON. Clients in the benchmark's own process would slow what they measure.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import numpy as np

RETRIES = 2


@dataclass(frozen=True)
class Seen:
    """The observations of clients.

    Attributes:
        ms: latency of every answer, in order of arrival. failed: statuses (or 0: no answer) of requests that were
            given up. retried: requests that were sent again, as OpenAI's client does after a server's error.
        statuses: status of what was no answer (0: the connection broke) -> how often.
        metrics: `usage` and `raycl` of the answers, summed or averaged.
    """

    seconds: float
    ms: list[float]
    failed: list[int]
    retried: int
    statuses: dict[str, int]
    metrics: dict[str, float]

    @property
    def rate(self) -> float:
        """Answers per second."""
        return len(self.ms) / self.seconds

    def at(self, percent: float) -> float:
        """Return the percentile of the latency in ms."""
        return float(np.percentile(self.ms, percent)) if self.ms else float("nan")


def run_clients(url: str, bodies: Sequence[dict[str, Any]], clients: int, seconds: float) -> Seen:
    """Ask for `seconds`, from another process."""
    job = json.dumps({"url": url, "clients": clients, "seconds": seconds, "bodies": list(bodies)})
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.serving.clients"], input=job, capture_output=True, text=True, check=True
    )
    return Seen(**json.loads(done.stdout))


async def _run_job(job: dict[str, Any]) -> dict[str, Any]:
    bodies = itertools.cycle(job["bodies"])
    ms: list[float] = []
    failed: list[int] = []
    metrics: dict[str, list[float]] = {}
    retried: list[int] = []
    began = time.perf_counter()
    until = began + job["seconds"]

    async def client(session: aiohttp.ClientSession) -> None:
        while time.perf_counter() < until:
            start, wanted = time.perf_counter(), next(bodies)
            for attempt in range(1 + RETRIES):
                status, body = await _once(session, job["url"], wanted)
                if status == 200 or attempt == RETRIES:
                    break
                retried.append(status)
                await asyncio.sleep(0.1 * 2**attempt)
            if status != 200:
                failed.append(status)
                continue
            ms.append((time.perf_counter() - start) * 1e3)
            for name, value in _metrics(body).items():
                metrics.setdefault(name, []).append(value)

    connector = aiohttp.TCPConnector(limit=job["clients"])
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        await asyncio.gather(*(client(session) for _ in range(job["clients"])))
    spent = time.perf_counter() - began
    sums = {name: sum(values) for name, values in metrics.items()}
    statuses = Counter(map(str, retried + failed))
    return {
        "seconds": spent,
        "ms": ms,
        "failed": failed,
        "retried": len(retried),
        "statuses": statuses,
        "metrics": sums,
    }


async def _once(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Return status and answer; the status is 0 where the connection broke."""
    try:
        async with session.post(url, json=body) as answer:
            return answer.status, await answer.json() if answer.status == 200 else {}
    except (aiohttp.ClientError, TimeoutError):
        return 0, {}


def _metrics(body: dict[str, Any]) -> dict[str, float]:
    details = body.get("raycl") or (body.get("data") or [{}])[0].get("raycl") or {}
    result = {name: float(details.get(name, 0)) for name in ("batch", "retrieval_ms", "queue_ms", "snapshot")}
    result["adapters"] = float(len(details.get("adapters", {})))
    return result | {"tokens": float(body.get("usage", {}).get("completion_tokens", 0))}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asyncio.run(_run_job(json.loads(sys.stdin.read())))))
