"""The values of `localllm top` are compared with exact quantiles and counts. Malformed responses are handled."""

from __future__ import annotations

import json
import re
from math import inf
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from localllm.cli.top.asking import Look, Sample, SlotSample, samples_of, slots_of
from localllm.cli.top.numbers import Recent, buckets_of, percentile, total, view_of
from localllm.cli.top.screen import count, rate, screen, seconds
from localllm.generation.interfaces import Load, Replicas
from localllm.generation.statistics import Usage
from localllm.server.metrics import GAPS, SECONDS, Metrics

GAP = "localllm_inter_token_seconds"


def look(at: float, metrics: Metrics, *slots: SlotSample, places: int = 4) -> Look:
    return Look(at, samples_of(metrics.text()), slots, places)


def shown(looks: list[Look], width: int = 80, height: int = 40, lately: bool = True, blocks: bool = True) -> list[str]:
    console = Console(width=width, height=height, force_terminal=False, highlight=False, markup=False)
    with console.capture() as capture:
        console.print(screen(view_of(looks, 1e9, lately), "http://here", width, height, blocks, "q leaves"))
    return capture.get().splitlines()


@pytest.mark.parametrize("seed", range(5))
def test_percentiles_are_those_of_the_times_but_for_the_width_of_a_bucket(seed: int) -> None:
    random = np.random.RandomState(seed)
    times = random.lognormal(-4, 1.5, 2000)
    metrics = Metrics()
    for each in times:
        metrics.token(each)
    buckets = buckets_of(look(0, metrics), GAP)
    assert buckets[-1] == (inf, 2000)
    bounds = np.array([0, *GAPS])
    cumulative = np.array([np.sum(times <= bound) for bound in bounds])
    for quantile in (0.01, 0.25, 0.5, 0.9, 0.99):
        found = percentile(buckets, quantile)
        assert found is not None
        rank = quantile * 2000
        if cumulative[-1] >= rank:
            steps = np.concatenate([[True], np.diff(cumulative) > 0])  # True for buckets that are not empty
            after = bounds[np.searchsorted(cumulative, rank)]
            before = bounds[np.searchsorted(cumulative, rank) - 1]
            exact = float(np.interp(rank, cumulative[steps], bounds[steps]))
            assert before <= found.seconds <= after
            if np.all(np.diff(cumulative) > 0):
                assert found.seconds == pytest.approx(exact)
            true = float(np.quantile(times, quantile, method="inverted_cdf"))
            assert before <= true <= after  # the exact quantile is in the same bucket


def test_times_that_are_spread_evenly_give_exact_percentiles() -> None:
    metrics = Metrics()
    for number in range(1, 1001):
        metrics.token(0.1 * number / 1000)
    buckets = buckets_of(look(0, metrics), GAP)
    for quantile in (0.5, 0.9, 0.99):
        found = percentile(buckets, quantile)
        assert found is not None
        assert found.seconds == pytest.approx(np.quantile(0.1 * np.arange(1, 1001) / 1000, quantile), rel=2e-3)


def test_a_percentile_beyond_the_last_bound_says_so() -> None:
    metrics = Metrics()
    metrics.token(1000.0)
    found = percentile(buckets_of(look(0, metrics), GAP), 0.5)
    assert found is not None
    assert (found.seconds, found.beyond) == (GAPS[-1], True)
    assert percentile((), 0.5) is None
    assert percentile(buckets_of(look(0, Metrics()), GAP), 0.5) is None


def test_rates_and_percentiles_are_those_of_the_time_between_looks() -> None:
    metrics = Metrics(lambda: (2, 1))
    for _ in range(100):
        metrics.token(0.5)
    first = look(100.0, metrics)
    for _ in range(30):
        metrics.token(0.02)
    metrics.evaluated(40)
    second = look(104.0, metrics)
    lately, ever = view_of([first, second], 1e9, lately=True), view_of([first, second], 1e9, lately=False)
    assert lately.answer_rate == ever.answer_rate == 30 / 4
    assert lately.prompt_rate == 10
    assert (lately.running, lately.waiting) == (2, 1)
    assert lately.history == (7.5,)
    gaps = {view.since: view.times[1] for view in (lately, ever)}
    assert gaps[4.0].count == 30
    assert gaps[None].count == 130
    found = [gaps[since].percentiles[0] for since in (4.0, None)]
    assert [None if each is None else round(each.seconds, 4) for each in found] == [0.0175, 0.3700]
    assert view_of([second], 1e9, lately=True).answer_rate is None


def test_only_the_last_minute_counts_and_a_new_server_begins_anew() -> None:
    metrics, recent = Metrics(), Recent()
    for at in range(0, 120, 10):
        for _ in range(1 if at == 110 else 7):
            metrics.token(0.01)
        recent.add(look(at, metrics))
    assert [each.at for each in recent.looks] == [50, 60, 70, 80, 90, 100, 110]
    assert view_of(recent.looks, 1e9, True).answer_rate == 0.1  # one token in ten seconds
    again = Metrics()
    again.started = metrics.started + 5
    recent.add(look(120, again))
    assert [each.at for each in recent.looks] == [120]


def test_requests_of_programs_that_look_do_not_count() -> None:
    metrics = Metrics()
    for route, status in (("/metrics", 200), ("/slots", 200), ("/health", 503), ("/v1/messages", 200), ("other", 404)):
        metrics.responded(route, status, 0.1)
    metrics.responded("/v1/messages", 499, 1.0)
    metrics.answered(Usage(10, 4, 6, 0.5, 1.0, 2.0, 5.0, drafted=8, accepted=6), "end")
    view = view_of([look(0, metrics)], metrics.started + 90, False)
    assert (view.requests, view.errors, view.answers) == (3, 1, 1)
    assert view.cached_share == 0.4
    assert view.accepted_share == 0.75
    assert view.uptime == pytest.approx(90)
    assert view.times[0].count == view.times[2].count == 1


# -- the screen ------------------------------------------------------------------------------------------------------


def test_replicas_have_a_line() -> None:
    metrics = Metrics()
    metrics.loads = lambda: {"tiny": Load((), 0, 0, 0, 8, 8, Replicas(2, 4, 3, 0.00025, 1, 17, 2))}
    line = "replicas    2 of 4, 1 lost, 17 moved, 3 stages each (0.25 ms a hop, 2 restarted)"
    assert line in shown([look(0, metrics)], 100)
    metrics.loads = lambda: {"tiny": Load((), 0, 0, 0, 8, 8, Replicas(2, 2, 1, 0.0, 0, 0))}
    assert "replicas    2 of 2" in shown([look(0, metrics)])
    metrics.loads = lambda: {"tiny": Load((), 0, 0, 0, 8, 8)}
    assert not any(line.startswith("replicas") for line in shown([look(0, metrics)]))


def busy() -> list[Look]:
    metrics = Metrics(lambda: (3, 12))
    metrics.token(None)
    metrics.token(0.012)
    metrics.answered(Usage(10, 4, 6, 0.5, 1.0, 2.0, 5.0), "end")
    of_all = Replicas(2, 2, 2, 0.001, 1234, 56789, 12345)
    metrics.loads = lambda: {"tiny": Load((), 0, 40, kept_blocks=3, free_blocks=1, blocks=8, replicas=of_all)}
    slots = [SlotSample(0, 7, 4096, 1024, 512, 0, 300, 0.0), SlotSample(1, 8, 20, 10, 10, 55, -1, 45.25)]
    slots += [SlotSample(2 + number, 9 + number, 10, 0, 10, 5, 5, 1.0) for number in range(60)]
    return [look(at, metrics, *slots, places=64) for at in (0.0, 2.0, 4.0, 6.0, 8.0)]


@pytest.mark.parametrize(("width", "height"), [(40, 24), (60, 30), (100, 50), (200, 30)])
@pytest.mark.parametrize("blocks", [True, False])
def test_a_screen_fits_its_terminal(width: int, height: int, blocks: bool) -> None:
    lines = shown(busy(), width, height, blocks=blocks)
    assert max(map(len, lines)) <= width
    assert len(lines) <= height
    text = "\n".join(lines)
    assert re.search(r"running +3 of 64 +waiting +12\b", text)
    assert text.endswith("q leaves")
    assert "prompt 38%" in text
    assert "45.2" in text
    assert "1.0\n" not in text  # no rate after only five tokens
    assert "50% used, 38% kept" in text
    assert "more" in text
    assert ("no limit" in text) == (width >= 78)
    assert blocks or text.isascii()


def test_numbers_are_short_whatever_they_are() -> None:
    assert [count(n) for n in (None, 0, 9999, 10_000, 1_250_000, 3e9, 1e18)] == [
        "-", "0", "9999", "10.0k", "1.2M", "3.0G", "1e+18",
    ]  # fmt: skip
    assert [rate(n) for n in (None, 0.0, 45.25, 1e6)] == ["-", "0.0", "45.2", "1.0M"]
    assert [seconds(n) for n in (0.00045, 0.012, 0.9, 1.5, 250, 9e4)] == [
        "0.45 ms", "12 ms", "900 ms", "1.5 s", "4 min", "1 d",
    ]  # fmt: skip


# -- responses of other programs -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        b"", b"hello", b"<html><body>hi</body></html>", b"\xff\xfe", b"{}", b"a{b=\"c\n", b"a{", b"a}", b"# TYPE a",
        b"# HELP", b"# TYPE a gauge\n# TYPE a gauge", b"x 1 2 3 4",
        b"localllm_x{le=\"", b'localllm_x{="1"} 2', b"a " * 9999,
    ],
)  # fmt: skip
def test_text_that_is_no_metrics_is_nothing(text: bytes) -> None:
    assert not any(name.startswith("localllm_") for name in samples_of(text))


def test_bytes_at_random_are_nothing_or_numbers() -> None:
    random = np.random.RandomState(0)
    good = bytearray(Metrics().text())
    for _ in range(300):
        bad = bytearray(good)
        for place in random.randint(0, len(bad), 20):
            bad[place] = random.randint(0, 256)
        samples = samples_of(bytes(bad))
        assert all(0 <= each.value <= 1e18 for found in samples.values() for each in found)
        shown([Look(0.0, samples), Look(2.0, samples)])


def test_huge_numbers_fit_the_screen() -> None:
    text = Metrics(lambda: (2, 3)).text().decode()
    huge = "\n".join(
        line if line.startswith("#") else f"{line.rpartition(' ')[0]} {value}"
        for line, value in zip(text.splitlines(), ["1e18", "1e400", "-5", "NaN", "1e17"] * 1000, strict=False)
    )
    looks = [
        Look(at, samples_of(huge.encode()), (SlotSample(0, 10**11, 10**11, 10**11, 10**11, 10**11, 10**11, 1e18),), 1)
        for at in (0.0, 2.0)
    ]
    for width in (40, 100):
        lines = shown(looks, width)
        assert max(map(len, lines)) <= width
    assert "inf" not in "\n".join(lines)
    assert "nan" not in "\n".join(lines)


def test_names_cannot_steer_the_terminal() -> None:
    samples = {
        "localllm_cache_blocks": [Sample({"model": "\x1b[31m[bold]evil\n\u202e" + "x" * 99, "state": "all"}, 1.0)],
        "localllm_info": [Sample({"version": "\x1b]0;title\x07"}, 1.0)],
    }
    text = "\n".join(shown([Look(0.0, samples)]))
    assert "\\x1b[31m[bold]evil\\n" in text
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "..., " in text  # a long name is truncated, so that other names fit


SLOT: dict[str, Any] = {
    "id": 3, "is_processing": True, "id_task": 9, "n_prompt_tokens": 20, "n_prompt_tokens_cache": 5,
    "n_prompt_tokens_processed": 15, "predicted_per_second": 12.5, "next_token": [{"n_decoded": 7, "n_remain": -1}],
}  # fmt: skip


def test_slots_are_read() -> None:
    idle = {"id": 0, "is_processing": False}
    assert slots_of(json.dumps([SLOT, idle]).encode()) == (2, (SlotSample(3, 9, 20, 5, 15, 7, -1, 12.5),))


@pytest.mark.parametrize(
    "value",
    [{}, [], 3, None, [3], [[]], [{"is_processing": True}], [{**SLOT, "id": "x" * 100, "next_token": {}}],
     [{**SLOT, "id": -1, "n_prompt_tokens": 1e300, "next_token": [[]], "predicted_per_second": 1e300}],
     [{**SLOT, "id": 10**40, "next_token": []}], [SLOT] * 2000],
)  # fmt: skip
def test_strange_slots_are_none_or_zeros(value: Any) -> None:
    places, slots = slots_of(json.dumps(value).encode())
    assert places <= 1024
    for each in slots:
        assert max(each.number, each.prompt, each.left, each.rate) <= 10**12
    assert max(map(len, shown([Look(0.0, {}, slots, places)], 40))) <= 40


def test_json_that_is_none_is_no_slots() -> None:
    for text in (b"", b"[", b"\xff", b"[" * 100_000, b"9" * 10_000):
        assert slots_of(text) == (0, ())


def test_sums_are_by_label() -> None:
    metrics = Metrics()
    metrics.responded("/a", 200, 1)
    metrics.responded("/a", 404, 1)
    seen = look(0, metrics)
    assert total(seen, "localllm_requests_total") == 2
    assert total(seen, "localllm_requests_total", status="404") == 1
    assert total(seen, "localllm_requests_total", status="500") is None
    assert len(SECONDS) + 1 == len(buckets_of(seen, "localllm_request_seconds"))
