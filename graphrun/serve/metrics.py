"""The metrics of a server, in the format of Prometheus."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)


class Metrics:
    """The metrics of one server. Labels have few values: graphs, stages and statuses."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"graphrun_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"graphrun_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, *labels: str) -> Histogram:
            return Histogram(f"graphrun_{name}", text, labels, registry=registry, buckets=SECONDS)

        self.requests = counter("requests", "Requests that have ended, by how", "graph", "status")
        self.answers = counter("answers", "HTTP answers under /v1, by API key", "key", "status")
        self.pictures = counter("pictures", "Pictures made", "graph")
        self.plans = counter("plans", "Shapes of requests that were planned", "result")
        self.restarts = counter(
            "worker_restarts", "Times that the worker process died and was started again"
        )
        self.worker = gauge("worker_pid", "Process id of the worker")
        self.planning = gauge("planning_requests", "Requests that wait for a plan")
        self.queue_length = gauge("waiting_requests", "Requests in the queue")
        self.active_requests = gauge("running_requests", "Requests that the worker runs")
        self.waiting_seconds = gauge(
            "waiting_seconds", "Predicted seconds until the queue is empty"
        )
        self.share = gauge(
            "share",
            "Share of the budgets that a graph has; below 1 its weights stay next to those of "
            "others",
            "graph",
        )
        self.clock = gauge(
            "clock_seconds",
            "Seconds of the device's clock since the start, of virtual time on the simulated "
            "device",
        )
        self.ready = gauge("ready", "1 where requests are admitted and run")
        self.peak_bytes = gauge("peak_bytes", "Device memory of the last run", "graph", "kind")
        self.overruns = counter("overruns", "Slots of runs that took more than planned", "graph")
        self.queue_seconds = histogram(
            "queue_seconds", "Seconds of the device's clock in the queue", "kind"
        )
        self.stage_seconds = histogram(
            "stage_seconds", "Seconds of the device's clock in a stage", "graph", "stage", "kind"
        )

    def add_run(self, graph: str, run: Mapping[str, Any]) -> None:
        """Record a run of ``graph``, which the worker's message ``run`` describes."""
        kinds = ("planned", "measured")
        for stage, pair in run["stages"].items():
            for kind, seconds in zip(kinds, pair, strict=True):
                self.stage_seconds.labels(graph, stage, kind).observe(seconds)
        for kind, nbytes in zip(kinds, run["peak_bytes"], strict=True):
            self.peak_bytes.labels(graph, kind).set(nbytes)
        self.pictures.labels(graph).inc()
        self.overruns.labels(graph).inc(len(run["overruns"]))

    def text(self) -> bytes:
        return generate_latest(self.registry)
