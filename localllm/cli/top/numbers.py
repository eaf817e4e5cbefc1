"""The values that `localllm top` shows, from recent samples: rates over seconds, and percentiles from histograms.

The server reports cumulative buckets: the number of times up to 0.1 s, up to 0.25 s and so on. A percentile is
interpolated within its bucket, as in Prometheus's histogram_quantile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf

from localllm.base.printable import printable
from localllm.cli.top.asking import Look, SlotSample
from localllm.server.limits import LOOKING

RATE_SECONDS = 10.0  # window for rates, in seconds
WINDOW_SECONDS = 60.0  # window for percentiles, in seconds
QUANTILES = (0.5, 0.9, 0.99)
TIMES = (
    ("TTFT", "localllm_first_token_seconds"),
    ("ITL", "localllm_inter_token_seconds"),
    ("wait", "localllm_queued_seconds"),
)
Buckets = tuple[tuple[float, float], ...]  # (upper bound in seconds, count up to that bound), by bound


@dataclass(frozen=True, slots=True)
class Percentile:
    """A time in seconds. If `beyond`, the time exceeds this value, the last finite bound."""

    seconds: float
    beyond: bool = False


@dataclass(frozen=True, slots=True)
class Times:
    """Percentiles of one kind of time, and the number of samples."""

    name: str
    count: float
    percentiles: tuple[Percentile | None, ...]


@dataclass(frozen=True, slots=True)
class ReplicaCounts:
    """The replicas of a server that runs its model in other processes."""

    alive: int
    wanted: int
    stages: int  # of each
    hop_seconds: float
    lost: int
    moved: int  # requests that were sent again
    restarted: int  # stages that were started again


@dataclass(frozen=True, slots=True)
class View:
    """All values on one screen. A value is None if the server does not report it."""

    models: tuple[str, ...]
    version: str
    uptime: float | None
    running: float | None
    slot_count: int
    waiting: float | None
    requests: float | None
    errors: float | None
    answers: float | None
    answer_rate: float | None  # decode speed in tokens/s
    prompt_rate: float | None
    cached_share: float | None  # share of the prompt tokens found in the KV cache, since the server started
    accepted_share: float | None  # share of the drafted tokens that were accepted, since the server started
    blocks: float | None  # share of the KV cache blocks that are in use or kept
    used: float  # KV cache blocks in use by running requests
    kept: float  # KV cache blocks kept from finished requests
    times: tuple[Times, ...]
    since: float | None  # window of the percentiles in seconds; None: since the start
    writing: tuple[SlotSample, ...]
    replicas: ReplicaCounts | None  # None: the server runs its models itself
    history: tuple[float, ...]  # decode speed in tokens/s between samples, oldest first


class Recent:
    """The samples of the last minute. A restart of the server clears them."""

    def __init__(self) -> None:
        self.looks: list[Look] = []

    def add(self, look: Look) -> None:
        if self.looks and _restarted(self.looks[-1], look):
            self.looks.clear()
        self.looks = [each for each in self.looks if look.at - each.at <= WINDOW_SECONDS] + [look]


def view_of(looks: Sequence[Look], now: float, lately: bool) -> View:
    """Return the values to show. With `lately`, percentiles cover the last minute instead of all time. `now` is Unix
    time."""
    new = looks[-1]
    recent = [each for each in looks if new.at - each.at <= RATE_SECONDS]
    started = total(new, "localllm_start_time_seconds")
    drafted = total(new, "llamacpp:spec_decode_num_draft_tokens_total")
    blocks, free, kept = (total(new, "localllm_cache_blocks", state=state) for state in ("all", "free", "kept"))
    old = looks[0] if lately and len(looks) > 1 else None
    return View(
        models=_values(new, "localllm_cache_blocks", "model"),
        version="".join(_values(new, "localllm_info", "version")[:1]),
        uptime=max(now - started, 0.0) if started else None,
        running=total(new, "llamacpp:requests_processing"),
        slot_count=new.slot_count,
        waiting=total(new, "llamacpp:requests_deferred"),
        requests=_requests(new),
        errors=_requests(new, failed=True),
        answers=total(new, "localllm_answers_total"),
        answer_rate=_rate(recent, "localllm_generated_tokens_total"),
        prompt_rate=_rate(recent, "localllm_evaluated_tokens_total"),
        cached_share=_cached(new),
        accepted_share=(total(new, "llamacpp:spec_decode_num_accepted_tokens_total") or 0.0) / drafted
        if drafted
        else None,
        blocks=blocks,
        used=max((blocks or 0.0) - (free or 0.0) - (kept or 0.0), 0.0),
        kept=kept or 0.0,
        times=tuple(_times(name, metric, new, old) for name, metric in TIMES),
        since=new.at - old.at if old is not None else None,
        writing=new.slots,
        replicas=_replicas(new),
        history=tuple(
            rate
            for one, two in pairwise(looks)
            if (rate := _rate([one, two], "localllm_generated_tokens_total")) is not None
        ),
    )


def _replicas(look: Look) -> ReplicaCounts | None:
    counters = ("replicas_lost_total", "requests_moved_total", "stages_restarted_total")
    names = ("replicas", "replicas_wanted", "stages", "hop_seconds", *counters)
    alive, wanted, stages, hop, *counts = (total(look, f"localllm_{name}") or 0.0 for name in names)
    return ReplicaCounts(int(alive), int(wanted), int(stages), hop, *map(int, counts)) if wanted else None


def total(look: Look, name: str, **labels: str) -> float | None:
    """Return the sum of the metrics with this name and these labels, or None without any such metric."""
    found = [each.value for each in look.samples.get(name, ()) if labels.items() <= each.labels.items()]
    return sum(found) if found else None


def buckets_of(look: Look, name: str) -> Buckets:
    """Return the buckets of a histogram, summed over its series. The result is empty if the histogram is missing."""
    found: dict[float, float] = {}
    for each in look.samples.get(f"{name}_bucket", ()):
        bound = _bound(each.labels)
        if bound > 0:
            found[bound] = found.get(bound, 0.0) + each.value
    return tuple(sorted(found.items()))


def percentile(buckets: Buckets, quantile: float) -> Percentile | None:
    """Return the percentile for this share (0 to 1), or None without samples."""
    count = buckets[-1][1] if buckets else 0.0
    if count <= 0:
        return None
    rank, low, before = quantile * count, 0.0, 0.0
    for bound, upto in buckets:
        if upto >= rank and upto > before:
            if bound == inf:
                return Percentile(low, beyond=True)
            return Percentile(low + (bound - low) * max(rank - before, 0.0) / (upto - before))
        low, before = (bound, max(upto, before)) if bound != inf else (low, before)
    return Percentile(low, beyond=True)


def _times(name: str, metric: str, new: Look, old: Look | None) -> Times:
    now = buckets_of(new, metric)
    then = dict(buckets_of(old, metric)) if old is not None else {}
    buckets = tuple((bound, max(count - then.get(bound, 0.0), 0.0)) for bound, count in now)
    count = buckets[-1][1] if buckets else 0.0
    return Times(name, count, tuple(percentile(buckets, quantile) for quantile in QUANTILES))


def _rate(looks: Sequence[Look], name: str) -> float | None:
    """Return the growth of a counter per second from the first sample to the last."""
    if len(looks) < 2 or looks[-1].at <= looks[0].at:
        return None
    first, last = total(looks[0], name), total(looks[-1], name)
    return None if last is None else max(last - (first or 0.0), 0.0) / (looks[-1].at - looks[0].at)


def _cached(look: Look) -> float | None:
    evaluated, cached = (total(look, f"llamacpp:prompt_tokens{kind}_total") for kind in ("", "_cached"))
    tokens = (evaluated or 0.0) + (cached or 0.0)
    return (cached or 0.0) / tokens if tokens else None


def _requests(look: Look, *, failed: bool = False) -> float | None:
    """Return the number of requests except monitoring requests, which this program sends too, or None if unknown.

    If `failed`, count only requests with status 400 and above, except clients that disconnected (499).
    """
    found = look.samples.get("localllm_requests_total")
    if found is None:
        return None
    asked = [each for each in found if each.labels.get("route") not in LOOKING]
    if failed:
        asked = [each for each in asked if "400" <= each.labels.get("status", "") < "600" and not _left(each.labels)]
    return sum(each.value for each in asked)


def _left(labels: Mapping[str, str]) -> bool:
    return labels.get("status") == "499"


def _restarted(old: Look, new: Look) -> bool:
    started = [total(look, "localllm_start_time_seconds") for look in (old, new)]
    steps = [total(look, "llamacpp:n_decode_total") or 0.0 for look in (old, new)]
    return started[0] != started[1] or steps[1] < steps[0]


def _values(look: Look, name: str, label: str) -> tuple[str, ...]:
    found = dict.fromkeys(each.labels.get(label, "") for each in look.samples.get(name, ()))
    return tuple(printable(each, 40) for each in found if each)


def _bound(labels: Mapping[str, str]) -> float:
    try:
        return float(labels.get("le", "nan"))
    except ValueError:
        return float("nan")
