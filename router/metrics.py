"""Prometheus metrics of the router, in a registry of their own. Implements the observers of engine and generation."""

import re
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from headrace.errors import HeadraceError
from headrace.ids import RequestId, Tier
from headrace.kernels.formats import BLOCK_TOKENS
from headrace.messages import BoxStatus, PrefillDone
from headrace.router.base import Demand, Ticket
from headrace.router.costs import CostModel, PromptWork

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    def __init__(self, costs: CostModel) -> None:
        self.registry = CollectorRegistry()
        self._costs = costs

        def counter(name: str, doc: str, *labels: str) -> Counter:
            return Counter(f"headrace_{name}", doc, labels, registry=self.registry)

        def gauge(name: str, doc: str) -> Gauge:
            return Gauge(f"headrace_{name}", doc, registry=self.registry)

        def seconds(name: str, doc: str) -> Histogram:
            return Histogram(f"headrace_{name}_seconds", doc, buckets=_SECONDS, registry=self.registry)

        self.ttft = seconds("time_to_first_token", "From the request's start to its first tokens")
        self.inter_token = seconds("inter_token_latency", "Between deliveries of one choice, per token")
        self.e2e = seconds("e2e_request_latency", "Whole request")
        self.queue = seconds("request_queue", "Before the prefill group's first work on it")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of computed prompts")
        self.cached_tokens = counter("cached_tokens", "Prompt tokens nobody computed, by tier", "tier")
        self.generated = counter("generation_tokens", "Tokens given to clients")
        self.drafted = counter("draft_tokens", "Draft tokens verified")
        self.accepted_drafts = counter("accepted_draft_tokens", "Draft tokens accepted")
        self.requests = counter("requests", "Client requests by outcome", "outcome")
        self.retries = counter("retries", "Attempts repeated, by error kind", "kind")
        self.unconfirmed = counter("aborts_unconfirmed", "Aborts a decode rank did not confirm in time")
        self.inflight = gauge("inflight_requests", "Client requests in the house")
        self.queued = gauge("queued_requests", "Sequences waiting for room on a decode rank")
        self.prediction_error = gauge("placement_prediction_error_ratio", "Smoothed |predicted - measured| / measured")
        self.compute_rate = gauge("placement_compute_seconds_per_token", "Fitted prefill cost of a new token")
        self.context_rate = gauge(
            "placement_compute_seconds_per_token_and_context", "Fitted prefill cost of a new token per token before it"
        )
        self.placements = counter("placements", "Places taken, by group and rank", "prefill", "decode")
        self.refused_early = gauge(
            "placement_refused_early", "Prompts refused because no group could meet the objective"
        )
        self.open_pairs = gauge("placement_open_pairs", "Pairs of group and rank that are left out after failures")
        self.restore_rate = gauge("placement_restore_seconds_per_block", "Fitted cost of restoring a block")
        self.promote_rate = gauge(
            "placement_promote_seconds_per_block", "Fitted cost of bringing a block from disk or another node"
        )

    # engine observer

    def prefilled(self, ticket: Ticket, demand: Demand, done: PrefillDone) -> None:
        cached = sum(done.cached_tokens.values())
        restored = cached - done.cached_tokens.get(Tier.DEVICE, 0)
        promoted = restored - done.cached_tokens.get(Tier.HOST, 0)
        work = PromptWork(
            max(0, demand.prompt_tokens - cached), -(-restored // BLOCK_TOKENS), -(-promoted // BLOCK_TOKENS), cached
        )
        self._costs.learn_prefill(ticket.predicted_prefill_s, work, done.restore_s, done.compute_s)
        self.prediction_error.set(self._costs.error)
        self.compute_rate.set(self._costs.compute.slope)
        self.context_rate.set(self._costs.compute.context_slope)
        self.restore_rate.set(self._costs.restore_s)
        self.promote_rate.set(self._costs.promote_s)

    def placed(self, ticket: Ticket, demand: Demand) -> None:
        self.placements.labels(ticket.prefill, ticket.decode).inc()

    def accepted(self, demand: Demand) -> None:
        return None

    def stepped(self, drafted: int, accepted: int, since_last_s: float) -> None:
        self._costs.learn_step(since_last_s)
        self.drafted.inc(drafted)
        self.accepted_drafts.inc(accepted)

    def retried(self, request_id: RequestId, error: HeadraceError) -> None:
        self.retries.labels(error.kind).inc()

    def abort_unconfirmed(self) -> None:
        self.unconfirmed.inc()

    # requests

    def request(self) -> "RequestMetrics":
        return RequestMetrics(self)

    def silent(self) -> "SilentRequest":
        """For requests that no client made."""
        return SilentRequest()

    def request_ended(self, outcome: str, duration_s: float) -> None:
        self.requests.labels(outcome).inc()
        self.e2e.observe(duration_s)

    # scrape

    def render(self, boxes: Iterable[BoxStatus], down: Iterable[str]) -> bytes:
        """Prometheus text: the router's own metrics and every box's values under a `box` label."""
        own: bytes = generate_latest(self.registry)
        return own + generate_latest(_boxes_registry(boxes, down))


class RequestMetrics:
    """Implements generation.RequestObserver for one client request."""

    def __init__(self, metrics: Metrics) -> None:
        self._m = metrics

    def prompt_ready(self, waited_s: float, prompt_tokens: int, cached: dict[str, int]) -> None:
        self._m.queue.observe(waited_s)
        self._m.prompt_tokens.inc(prompt_tokens)
        for tier, tokens in cached.items():
            self._m.cached_tokens.labels(tier).inc(tokens)

    def tokens(self, count: int, since_last_s: float | None, since_start_s: float) -> None:
        self._m.generated.inc(count)
        if since_last_s is None:
            self._m.ttft.observe(since_start_s)
        elif count:
            for _ in range(count):
                self._m.inter_token.observe(since_last_s / count)


class SilentRequest:
    """Implements generation.RequestObserver, counting nothing."""

    def prompt_ready(self, waited_s: float, prompt_tokens: int, cached: dict[str, int]) -> None:
        return None

    def tokens(self, count: int, since_last_s: float | None, since_start_s: float) -> None:
        return None


class _Boxes(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


_VALUE = re.compile(r"^([A-Za-z_][A-Za-z0-9_]*)(?:\{(.*)\})?$")


def _boxes_registry(boxes: Iterable[BoxStatus], down: Iterable[str]) -> CollectorRegistry:
    families: dict[str, Metric] = {}

    def add(name: str, labels: dict[str, str], value: float) -> None:
        full = f"headrace_box_{name}"
        kind = "counter" if name.endswith("_total") else "gauge"
        family = families.setdefault(full, Metric(full.removesuffix("_total"), f"{name}, as the box reports it", kind))
        family.add_sample(full, labels, value)

    for name in down:
        add("up", {"box": name}, 0.0)
    for box in boxes:
        add("up", {"box": box.name}, 1.0)
        add("ready", {"box": box.name}, float(box.ready))
        for text, value in box.values.items():
            found = _VALUE.match(text)
            if found is None:
                continue
            pairs = (pair.partition("=") for pair in (found[2] or "").split(",") if pair)
            add(found[1], {"box": box.name, **{k.strip(): v.strip(' "') for k, _, v in pairs}}, value)
    registry = CollectorRegistry()
    registry.register(_Boxes(list(families.values())))
    return registry
