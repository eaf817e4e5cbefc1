"""The replica that evaluates prompts makes and keeps no blocks for a lost connection, and answers every prompt."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("zmq", reason="replicas need pyzmq")

from localllm.distributed import prompts
from localllm.generation.request import Event, Finished, Request
from tests.localllm.distributed.test_prompts import WAIT, opened, prompt_of, request_of, until
from tests.models.kit import KIT


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return KIT["llama-gqa"].write(tmp_path_factory.mktemp("model") / "model.gguf")


def test_no_blocks_are_made_for_a_lost_connection(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would stay in memory."""
    made: list[int] = []
    monkeypatch.setattr(prompts, "packed", lambda model, sequence: made.append(sequence.length) or b"")
    with opened(path) as pair:
        step, waiting = pair.prompts.executable.step, threading.Event()
        monkeypatch.setattr(pair.prompts.executable, "step", lambda batch: (waiting.wait(WAIT), step(batch))[1])
        pair.client.ask(prompt_of(200, 51), 1 << 30, 0, "")
        until(lambda: pair.other.load().running)
        server = pair.servers[0]
        server.close()
        assert not server._tickets
        waiting.set()
        until(lambda: not pair.other.load().running)
        pair.other.between(lambda slots: None).result(WAIT)
    assert made == []


def test_a_finished_prompt_is_refused_while_too_many_blocks_wait(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(path) as pair:
        step = pair.prompts.executable.step

        def run(batch: Any) -> Any:
            monkeypatch.setattr(prompts, "MOST_QUEUED", -1)
            return step(batch)

        monkeypatch.setattr(pair.prompts.executable, "step", run)
        asyncio.run(pair.source.fetch(request_of(200, 52)))
        assert (pair.source.fetched, pair.source.failed) == (0, 1)
        assert "a prompt is evaluated here: too many cache blocks wait for the network" in caplog.text


def test_a_prompt_that_ends_before_submit_returns_is_answered(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(path, late=5.0) as pair:
        submit = pair.other.submit

        def slow(request: Request, listener: Callable[[Event], None]) -> Any:
            ended = threading.Event()

            def heard(event: Event) -> None:
                listener(event)
                if isinstance(event, Finished):
                    ended.set()

            ticket = submit(request, heard)
            assert ended.wait(WAIT)
            return ticket

        monkeypatch.setattr(pair.other, "submit", slow)
        asyncio.run(pair.source.fetch(request_of(200, 53)))
        assert (pair.source.fetched, pair.source.failed) == (1, 0)
        until(lambda: not pair.servers[0]._tickets)
