"""Metrics that a replica reports to Prometheus, through Ray's own endpoint."""

import threading
import time

import ray
from ray.util.metrics import Counter, Gauge, Histogram

from raycl.serve.service.service import ServedAnswer, Service


def metrics_urls(node_id: str | None = None) -> list[str]:
    """Return the URLs where Prometheus reads the metrics of each node of the cluster, or of one of them."""
    return [
        f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        for node in ray.nodes()
        if node["Alive"] and node_id in (None, node["NodeID"])
    ]


MS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 30000]
EVERY_S = 2.0


class Metrics:
    """Counters and histograms of one replica; names begin with `raycl_`."""

    def __init__(self, service: Service) -> None:
        """Report from now on, on a thread of its own for what is counted inside the engine."""
        self._service, self._engine = service, service.engine
        self.answers: Counter = Counter("raycl_answers", "answers that were finished")
        self.tokens: Counter = Counter("raycl_tokens", "tokens that were generated", tag_keys=("kind",))
        self.times: dict[str, Histogram] = {
            name: Histogram(f"raycl_{name}_ms", what, boundaries=MS)
            for name, what in (
                ("queue", "waiting before the text was routed"),
                ("retrieval", "encoder, search and weights, of the texts routed together"),
                ("first", "until the first piece of the answer"),
                ("total", "until its end"),
            )
        }
        self.engine: dict[str, Counter] = {
            name: Counter(f"raycl_{name}", what)
            for name, what in (
                ("batches", "mixtures that were opened: batches of labels, and running batches whenever they change"),
                ("rows", "their rows"),
                ("adapters", "distinct adapters in them"),
                ("hits", "adapters that were on the device already"),
                ("misses", "adapters that had to be loaded there"),
                ("reused_tokens", "tokens of prompts whose keys and values were kept, and not computed again"),
            )
        }
        self.snapshot: Gauge = Gauge("raycl_snapshot", "number of the snapshot that answers")
        self.age: Gauge = Gauge("raycl_snapshot_age_s", "how long it has answered")
        self.load: Gauge = Gauge("raycl_unfinished", "answers that are not finished")
        self.problem: Gauge = Gauge("raycl_follow_problem", "1 while the newest snapshot cannot be used")
        self._counted = dict.fromkeys(self.engine, 0.0)
        service.observe = self.finished
        service.metrics_url = next(iter(metrics_urls(ray.get_runtime_context().get_node_id())), None)
        threading.Thread(target=self._report, name="raycl-metrics", daemon=True).start()

    def finished(self, answer: ServedAnswer) -> None:
        """Take an answer in."""
        self.answers.inc()
        if answer.tokens:
            self.tokens.inc(answer.tokens, {"kind": "generated"})
        if answer.metadata is not None:
            if answer.metadata.prompt_tokens:
                self.tokens.inc(answer.metadata.prompt_tokens, {"kind": "prompt"})
            self.times["queue"].observe(answer.metadata.queue_ms)
            self.times["retrieval"].observe(answer.metadata.retrieval_ms)
        if answer.first_s:
            self.times["first"].observe(answer.first_s * 1e3)
        self.times["total"].observe(answer.total_s * 1e3)

    def _report(self) -> None:
        while self._engine.alive:
            counts, snapshot_manager = self._engine.counts, self._service.snapshot_manager
            for name, counter in self.engine.items():
                more = counts[name] - self._counted[name]
                if more > 0:
                    counter.inc(more)
                    self._counted[name] = counts[name]
            self.snapshot.set(snapshot_manager.active.snapshot.number)
            self.age.set(max(0.0, time.time() - snapshot_manager.active_since))
            self.load.set(self._engine.pending)
            self.problem.set(float(bool(self._service.problem)))
            time.sleep(EVERY_S)
