"""The values of GET /metrics: llama.cpp's metrics, and localllm's latencies and counts. Each server has one registry.

The scheduler's thread calls `Metrics.step` for every step. The other values come from `observer.py` and
`MetricsMiddleware`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from localllm import __version__
from localllm.base.printable import printable
from localllm.generation import interfaces
from localllm.generation.statistics import Usage
from localllm.server.limits import LOOKING

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
GAPS = (  # seconds between two tokens; finer buckets than SECONDS, since inter-token latencies are short
    *(0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0),
)
log = logging.getLogger("localllm.server")
Load = Callable[[], tuple[int, int]]  # running and queued requests
Loads = Callable[[], Mapping[str, interfaces.Load]]  # loads of the schedulers by model name


class Tally:
    """The totals behind llama.cpp's metrics. Any thread may add to them. Each call of `rates` starts a new interval."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.sums = dict.fromkeys((name for name, _, _ in COUNTERS), 0.0)
        self.longest = 0
        self.busy = 0.0
        self.generated = 0.0  # tokens from decode steps; the prefill step yields the first token
        self.since = dict.fromkeys(("prompt", "prompt_s", "generated", "generated_s"), 0.0)

    def add(self, amounts: Mapping[str, float]) -> None:
        for name, amount in amounts.items():
            self.sums[name] += amount

    def rates(self) -> tuple[float, float]:
        """Return the prefill and decode speeds in tokens/s since the last call."""
        now = {
            "prompt": self.sums["prompt_tokens"],
            "prompt_s": self.sums["prompt_seconds"],
            "generated": self.generated,
            "generated_s": self.sums["tokens_predicted_seconds"],
        }
        new = {name: now[name] - self.since[name] for name in now}
        self.since = now
        prompt = new["prompt"] / new["prompt_s"] if new["prompt_s"] > 0 else 0.0
        return prompt, new["generated"] / new["generated_s"] if new["generated_s"] > 0 else 0.0


# (key of the total, name, description)
COUNTERS = (
    ("prompt_tokens", "prompt_tokens", "Prompt tokens evaluated, excluding cached ones"),
    ("prompt_tokens_cached", "prompt_tokens_cached", "Prompt tokens taken from the cache"),
    ("prompt_seconds", "prompt_seconds", "Seconds spent evaluating prompts"),
    ("tokens_predicted", "tokens_predicted", "Tokens generated"),
    ("tokens_predicted_seconds", "tokens_predicted_seconds", "Seconds spent generating"),
    ("n_decode", "n_decode", "Model passes"),
    ("drafted", "spec_decode_num_draft_tokens", "Tokens drafted"),
    ("accepted", "spec_decode_num_accepted_tokens", "Drafted tokens accepted"),
    ("drafts", "spec_decode_num_drafts", "Drafts verified"),
)
_LONGEST = "llamacpp:n_tokens_max"


class Metrics(Collector):
    """The metrics of one server."""

    def __init__(self, load: Load = lambda: (0, 0)) -> None:
        self.load = load
        self.loads: Loads = dict
        self.started = time.time()
        self.tally = Tally()
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self._requests = self._counter("requests", "HTTP requests", "route", "status")
        self._answers = self._counter("answers", "Answers by finish reason", "reason")
        self._seconds = self._times("request_seconds", "Duration of HTTP requests in seconds", "route")
        self._queued = self._times("queued_seconds", "Time in the queue in seconds")
        self._first = self._times("first_token_seconds", "Time to first token in seconds")
        self._gaps = self._times("inter_token_seconds", "Time between tokens in seconds", buckets=GAPS)
        self._generated = self._counter("generated_tokens", "Tokens generated, counted one by one")
        self._evaluated = self._counter("evaluated_tokens", "Prompt tokens evaluated, counted after each step")

    def _counter(self, name: str, meaning: str, *labels: str) -> Counter:
        return Counter(f"localllm_{name}", meaning, labels, registry=self.registry)

    def _times(self, name: str, meaning: str, *labels: str, buckets: Sequence[float] = SECONDS) -> Histogram:
        return Histogram(f"localllm_{name}", meaning, labels, registry=self.registry, buckets=buckets)

    def step(self, sequences: int, drafts: int = 0) -> None:
        """Count a step of `sequences` sequences; `drafts` sequences verified a draft. Any thread may call it."""
        with self.tally.lock:
            self.tally.add({"n_decode": 1, "drafts": drafts})
            self.tally.busy += sequences

    def token(self, gap: float | None) -> None:
        """Count a generated token, `gap` seconds after the previous token; None for the first token."""
        self._generated.inc()
        if gap is not None:
            self._gaps.observe(gap)

    def evaluated(self, tokens: int) -> None:
        """Count prompt tokens that were evaluated, not cached."""
        self._evaluated.inc(tokens)

    def answered(self, usage: Usage, reason: str) -> None:
        """Count a finished choice."""
        with self.tally.lock:
            self.tally.add(
                {
                    "prompt_tokens": usage.prompt_tokens - usage.reused_tokens,
                    "prompt_tokens_cached": usage.reused_tokens,
                    "prompt_seconds": usage.prompt_seconds,
                    "tokens_predicted": usage.answer_tokens,
                    "tokens_predicted_seconds": usage.decode_seconds,
                    "drafted": usage.drafted,
                    "accepted": usage.accepted,
                }
            )
            self.tally.generated += max(usage.answer_tokens - 1, 0)
            self.tally.longest = max(self.tally.longest, usage.prompt_tokens + usage.answer_tokens)
        self._answers.labels(reason).inc()
        self._queued.observe(usage.queued_seconds)
        if usage.answer_tokens:
            self._first.observe(usage.first_token_seconds)

    def embedded(self, tokens: int, seconds: float, texts: int, steps: int) -> None:
        """Count embedded or scored texts, and the forward passes they took."""
        with self.tally.lock:
            self.tally.add({"prompt_tokens": tokens, "prompt_seconds": seconds, "n_decode": steps})
            self.tally.busy += texts if steps else 0
        self.evaluated(tokens)

    def responded(self, route: str, status: int, seconds: float) -> None:
        """Count a response."""
        self._requests.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics under llama.cpp's names."""
        with self.tally.lock:
            sums, longest, busy = dict(self.tally.sums), self.tally.longest, self.tally.busy
            rates = self.tally.rates()
        for key, name, meaning in COUNTERS:
            yield CounterMetricFamily(f"llamacpp:{name}", meaning, value=sums[key])
        running, waiting = self.load()
        gauges: tuple[tuple[str, str, float], ...] = (
            (_LONGEST, "Length of the longest sequence so far, in tokens", longest),
            ("llamacpp:prompt_tokens_seconds", "Prompt tokens per second since the last scrape", rates[0]),
            ("llamacpp:predicted_tokens_seconds", "Generated tokens per second since the last scrape", rates[1]),
            ("llamacpp:requests_processing", "Running answers", running),
            ("llamacpp:requests_deferred", "Waiting answers", waiting),
            ("llamacpp:n_busy_slots_per_decode", "Mean number of sequences per step", busy / max(sums["n_decode"], 1)),
        )
        for name, meaning, value in gauges:
            yield GaugeMetricFamily(name, meaning, value=value)
        loads = self.loads()
        yield from _of_replicas(loads)
        blocks = GaugeMetricFamily("localllm_cache_blocks", "Cache blocks", labels=("model", "state"))
        for model, one in loads.items():
            for state, count in (("all", one.blocks), ("free", one.free_blocks), ("kept", one.kept_blocks)):
                blocks.add_metric((model, state), count)
        yield blocks
        yield GaugeMetricFamily("localllm_start_time_seconds", "Start time of the server (Unix time)", self.started)
        version = GaugeMetricFamily("localllm_info", "Version of the server", labels=("version",))
        version.add_metric((__version__,), 1)
        yield version

    def describe(self) -> list[Metric]:
        """Return nothing, so that registering the collector reads no values."""
        return []

    def text(self) -> bytes:
        """Return all metrics in Prometheus's text format. llama.cpp declares n_tokens_max as a counter."""
        return generate_latest(self.registry).replace(
            f"# TYPE {_LONGEST} gauge".encode(), f"# TYPE {_LONGEST} counter".encode()
        )


def _of_replicas(loads: Mapping[str, interfaces.Load]) -> Iterator[Metric]:
    """Yield the metrics of models that run in replicas."""
    for model, load in loads.items():
        if (found := load.replicas) is None:
            continue
        gauges: tuple[tuple[str, str, float], ...] = (
            ("replicas", "Replicas that answer", found.alive),
            ("replicas_wanted", "Replicas at most", found.wanted),
            ("stages", "Stages of a replica", found.stages),
            ("hop_seconds", "Time from a stage to the next, as measured at the start", found.hop_seconds),
        )
        counters: tuple[tuple[str, str, float], ...] = (
            ("replicas_lost", "Replicas that died or were silent", found.lost),
            ("stages_restarted", "Stages that were lost and started again alone", found.restarted),
            ("requests_moved", "Answers that went on at another replica, or waited for one", found.moved),
        )
        for kind, rows in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, meaning, value in rows:
                family = kind(f"localllm_{name}", meaning, labels=("model",))
                family.add_metric((model,), value)
                yield family


class MetricsMiddleware:
    """Counts responses by route and status, and logs a line for each response."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app = app
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started, status = time.monotonic(), 499  # status if nothing is sent because the client has disconnected

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, sending)
        finally:
            route = getattr(scope.get("route"), "path", "other")  # never the path itself, which clients choose
            seconds = time.monotonic() - started
            self.metrics.responded(route, status, seconds)
            seen = log.debug if route in LOOKING and status == 200 else log.info  # monitors poll every second or two
            seen("%s %s %d %.3f s", printable(scope["method"], 10), printable(scope["path"], 100), status, seconds)
