"""GET /metrics: llama.cpp's metric names, and histograms of request durations."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from localllm import __version__
from localllm.generation.interfaces import Load, Replicas
from localllm.generation.request import Prefilled, Started, Token
from localllm.generation.statistics import Usage
from localllm.server.metrics import Metrics
from localllm.server.observer import ServiceObserver
from localllm.server.settings import ServerSettings
from localllm.server.turn import Completion, Generation
from tests.localllm.server.calls import call
from tests.localllm.server.scripted import ScriptedService, done, said, script

COUNTERS = (
    "prompt_tokens_total", "prompt_tokens_cached_total", "prompt_seconds_total", "tokens_predicted_total",
    "tokens_predicted_seconds_total", "n_decode_total", "n_tokens_max", "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total", "spec_decode_num_drafts_total",
)  # fmt: skip
GAUGES = (
    "prompt_tokens_seconds", "predicted_tokens_seconds", "requests_processing", "requests_deferred",
    "n_busy_slots_per_decode",
)  # fmt: skip


def read(text: str) -> tuple[dict[str, str], dict[str, float]]:
    """Parse types and values from Prometheus's text format."""
    types, values = {}, {}
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            types[name] = kind
        elif not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            values[name] = float(value)
    return types, values


def test_the_names_and_types_are_llamas() -> None:
    metrics = Metrics()
    text = metrics.text().decode()
    types, values = read(text)
    for name in COUNTERS:
        assert types[f"llamacpp:{name}"] == "counter"
    for name in GAUGES:
        assert types[f"llamacpp:{name}"] == "gauge"
    for name in COUNTERS + GAUGES:
        assert values[f"llamacpp:{name}"] == 0
        assert f"# HELP llamacpp:{name} " in text


def test_blocks_of_the_cache_are_told_by_model() -> None:
    metrics = Metrics()
    metrics.loads = lambda: {"tiny": Load((), 0, kept_tokens=40, kept_blocks=3, free_blocks=5, blocks=8)}
    types, values = read(metrics.text().decode())
    assert types["localllm_cache_blocks"] == "gauge"
    for state, count in (("all", 8), ("free", 5), ("kept", 3)):
        assert values[f'localllm_cache_blocks{{model="tiny",state="{state}"}}'] == count


def test_replicas_are_told_by_model() -> None:
    metrics = Metrics()
    metrics.loads = lambda: {
        "tiny": Load((), 0, 0, 0, 8, 8, Replicas(1, 4, 2, 0.5, 3, 17, 5)),
        "other": Load((), 0, 0, 0, 8, 8),
    }
    types, values = read(metrics.text().decode())
    for name, value in (("replicas", 1), ("replicas_wanted", 4), ("stages", 2), ("hop_seconds", 0.5)):
        assert types[f"localllm_{name}"] == "gauge"
        assert values[f'localllm_{name}{{model="tiny"}}'] == value
    assert values['localllm_replicas_lost_total{model="tiny"}'] == 3
    assert values['localllm_requests_moved_total{model="tiny"}'] == 17
    assert values['localllm_stages_restarted_total{model="tiny"}'] == 5
    assert not any("other" in name for name in values if "replicas" in name)


def test_answers_are_added_up() -> None:
    metrics = Metrics(lambda: (2, 3))
    usage = Usage(10, 4, 6, 0.5, 1.0, 2.0, 5.0, drafted=8, accepted=7)
    metrics.answered(usage, "end")
    metrics.answered(usage, "length")
    metrics.embedded(100, 1.0, 3, 1)
    for sequences in (1, 4, 4):
        metrics.step(sequences, drafts=1)
    _, values = read(metrics.text().decode())
    expected = {
        "prompt_tokens_total": 112, "prompt_tokens_cached_total": 8, "prompt_seconds_total": 5,
        "tokens_predicted_total": 12, "tokens_predicted_seconds_total": 10, "n_decode_total": 4, "n_tokens_max": 16,
        "spec_decode_num_draft_tokens_total": 16, "spec_decode_num_accepted_tokens_total": 14,
        "spec_decode_num_drafts_total": 3, "prompt_tokens_seconds": 112 / 5, "predicted_tokens_seconds": 10 / 10,
        "requests_processing": 2, "requests_deferred": 3, "n_busy_slots_per_decode": 3,
    }  # fmt: skip
    assert {name: values[f"llamacpp:{name}"] for name in expected} == expected
    assert values['localllm_answers_total{reason="end"}'] == 1
    _, again = read(metrics.text().decode())
    assert again["llamacpp:prompt_tokens_seconds"] == 0  # the rate since the previous scrape


def test_tokens_are_counted_when_they_come_and_the_time_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = Metrics()
    clock = iter([0.5, 0.6, 1.0, 1.1, 2.0, 2.25, 2.5])  # starts and parts of two prompts, then three tokens
    monkeypatch.setattr("localllm.server.observer.time", SimpleNamespace(monotonic=lambda: next(clock)))

    async def main() -> None:
        script = [
            Started(50, 10), Prefilled(30), Started(50, 50, 1), Prefilled(50), *said("a"), *said("b", choice=1),
            *said("c"), done(), done(choice=1),
        ]  # fmt: skip
        service = ScriptedService(script)
        service.observer = ServiceObserver(metrics)
        seen = []
        async for event in service.complete("tiny", Completion("x", Generation(n=2))):
            _, values = read(metrics.text().decode())
            seen.append((values["localllm_generated_tokens_total"], values["localllm_evaluated_tokens_total"]))
            if isinstance(event, Token) and event.parts:
                rates.append(service.observer.open[0].rate)
        assert seen == [(0, 0), (0, 20), (0, 20), (0, 40), (1, 40), (2, 40), (3, 40), (3, 40), (3, 40)]

    rates: list[float] = []
    asyncio.run(main())
    types, values = read(metrics.text().decode())
    assert types["localllm_inter_token_seconds"] == "histogram"
    assert values["localllm_inter_token_seconds_count"] == 1  # only the first request generates two tokens
    assert values["localllm_inter_token_seconds_sum"] == 0.5
    assert rates == [0, 0, 2]


def test_the_start_and_the_version_are_told() -> None:
    metrics = Metrics()
    _, values = read(metrics.text().decode())
    assert values["localllm_start_time_seconds"] == metrics.started
    assert values[f'localllm_info{{version="{__version__}"}}'] == 1
    metrics.embedded(70, 1.0, 1, 1)
    assert read(metrics.text().decode())[1]["localllm_evaluated_tokens_total"] == 70


def test_servers_count_by_themselves() -> None:
    one, two = Metrics(), Metrics()
    one.step(1)
    assert read(two.text().decode())[1]["llamacpp:n_decode_total"] == 0


def test_requests_are_counted_by_route_and_never_by_path() -> None:
    from localllm.server.app import make_app

    app = make_app(ScriptedService(script("a", "b")), ServerSettings())
    call(app, "/completion", {"prompt": "x"})
    call(app, "/completion", {})
    call(app, "/secret-path-of-a-stranger")
    response = call(app, "/metrics")
    assert int(response.headers["process-start-time-unix"]) > 1_700_000_000
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    _, values = read(response.text)
    assert values['localllm_requests_total{route="/completion",status="200"}'] == 1
    assert values['localllm_requests_total{route="/completion",status="400"}'] == 1
    assert values['localllm_requests_total{route="other",status="404"}'] == 1
    assert "stranger" not in response.text
    assert values["llamacpp:prompt_tokens_total"] == 3
    assert values["llamacpp:prompt_tokens_cached_total"] == 2
    assert values["llamacpp:tokens_predicted_total"] == 2
    assert values["llamacpp:requests_processing"] == 0


def test_the_log_has_a_harmless_line_for_each_request(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "localllm.server"):
        call(ScriptedService(script("a")), "/completion", {"prompt": "the secret"})
        for path in ("/metrics", "/slots", "/health"):  # routes that monitors such as localllm top poll
            call(ScriptedService(), path)
        call(ScriptedService(), "/%1b[31m%0a" + "x" * 1000)
    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith("POST /completion 200 0.")
    assert second.startswith("GET /\\x1b[31m\\nxxx")
    assert len(second) < 150
    assert "secret" not in caplog.text


def test_no_metrics() -> None:
    response = call(ScriptedService(), "/metrics", settings=ServerSettings(metrics=False))
    assert (response.status_code, response.json()["error"]["type"]) == (501, "not_supported_error")


def test_answers_wait_run_and_end() -> None:
    async def main() -> None:
        service = ScriptedService([Started(5, 2), Started(5, 5, 1), Prefilled(5), *said("a\n"), done(), done(choice=1)])
        seen = []
        async for _ in service.complete("tiny", Completion("x", Generation(n=2))):
            seen.append(service.observer.load())
        assert seen == [(1, 1), (2, 0), (2, 0), (2, 0), (1, 0), (0, 0)]

    asyncio.run(main())


@pytest.mark.parametrize(
    ("more", "prompt", "answer"), [((), 20, 0), ((Prefilled(50), *said("a", "b")), 40, 2)], ids=["prefill", "decode"]
)
def test_an_answer_that_is_broken_off_counts_with_what_it_took(more: tuple[Any, ...], prompt: int, answer: int) -> None:
    metrics = Metrics()

    async def main() -> None:
        steps = [Started(50, 10), Prefilled(30), *more, 3600.0]
        service = ScriptedService(steps)
        service.observer = ServiceObserver(metrics)
        events = service.complete("tiny", Completion("x"))
        count = 0
        async for _ in events:
            count += 1
            if count == 2 + len(more):
                break
        await events.aclose()  # type: ignore[attr-defined]
        assert service.observer.load() == (0, 0)
        assert service.closed == 1

    asyncio.run(main())
    _, values = read(metrics.text().decode())
    assert values["llamacpp:prompt_tokens_total"] == prompt
    assert values["llamacpp:prompt_tokens_cached_total"] == 10
    assert values["llamacpp:tokens_predicted_total"] == answer
    assert values['localllm_answers_total{reason="broken off"}'] == 1
