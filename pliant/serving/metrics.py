"""What a server counts, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector

from pliant.language.batch import Batch
from pliant.serving.worker import TokenWatch

_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_COUNTS = {
    "admitted": "requests that began to be read",
    "finished": "requests that came to their end",
    "cancelled": "requests whose client went, or that the server's stop ended",
    "failed": "requests whose calls failed",
    "refused": "requests that could never fit",
}


class _BatchCollector:
    """What the registry asks at every look."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch

    def collect(self) -> Iterator[Metric]:
        batch, counts = self.batch, self.batch.counts
        for name, what in _COUNTS.items():
            yield CounterMetricFamily(
                f"pliant_requests_{name}", what, value=getattr(counts, name)
            )
        tokens = CounterMetricFamily("pliant_tokens", "of requests", labels=["kind"])
        tokens.add_metric(["prompt"], counts.prompt_tokens)
        tokens.add_metric(["made"], counts.made_tokens)
        yield tokens
        now = GaugeMetricFamily("pliant_requests", "now", labels=["state"])
        now.add_metric(["running"], len(batch.rows))
        now.add_metric(["reading"], int(batch.reading is not None))
        now.add_metric(["waiting"], len(batch.waiting))
        yield now
        held = GaugeMetricFamily(
            "pliant_memory_bytes", "planned, by what it is for", labels=["what"]
        )
        held.add_metric(["weights"], batch.weights.weight_bytes)
        held.add_metric(["caches"], batch.caches.nbytes)
        held.add_metric(["calls"], batch.call_bytes)
        yield held
        yield GaugeMetricFamily(
            "pliant_memory_peak_bytes",
            "the most that weights, caches and a call have taken",
            value=counts.peak_bytes,
        )
        if batch.limit is not None:
            yield GaugeMetricFamily(
                "pliant_memory_limit_bytes",
                "for weights, caches and calls",
                value=batch.limit,
            )


class Metrics:
    """Of one server; nothing is global."""

    def __init__(self, batch: Batch) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_BatchCollector(batch))
        ProcessCollector(registry=self.registry)
        first, between = (
            Histogram(name, what, buckets=_BUCKETS, registry=self.registry)
            for name, what in (
                ("pliant_first_token_seconds", "from a request to its first token"),
                ("pliant_next_token_seconds", "between two tokens of a request"),
            )
        )
        self.watch = TokenWatch(first.observe, between.observe)

    def text(self) -> bytes:
        return bytes(generate_latest(self.registry))
