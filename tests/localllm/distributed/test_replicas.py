"""`localllm serve --ray --replicas 2` on two nodes of Ray: the answers of a server without Ray, also after faults."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.localllm.distributed.conftest import REPLICA, STAGE, TwoNodes, actors, front_of
from tests.localllm.distributed.servers import PATIENCE, Server, until
from tests.localllm.support import localllm as cli

pytestmark = pytest.mark.xdist_group("ray")

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}, "s": {"enum": ["yes", "no"]}}, "required": ["n"]}
TOOL = {
    "name": "weather",
    "description": "",
    "parameters": {"type": "object", "properties": {"city": {"enum": ["Rome"]}}},
}
CHAT = {"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 24, "seed": 5}
STORY = {"prompt": "Once upon a time", "n_predict": 400, "stream": True, "return_tokens": True, "ignore_eos": True}


def memory(process: int) -> int:
    """Return the resident bytes of a process."""
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def told(value: Any) -> Any:
    """Return a response without what differs from one to the next: ids, times and counts of reused tokens."""
    if isinstance(value, dict):
        return {name: told(each) for name, each in value.items() if name not in DIFFERENT}
    return [told(each) for each in value] if isinstance(value, list) else value


DIFFERENT = {
    "id", "created", "created_at", "timings", "total_duration", "load_duration",
    "prompt_eval_duration", "eval_duration",
    "prompt_tokens_details", "tokens_cached", "tokens_evaluated", "id_slot", "cache_read_input_tokens",
    "input_tokens", "prompt_eval_count", "generation_settings",
}  # fmt: skip
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "OpenAI": ("/v1/chat/completions", {**CHAT, "n": 2, "logprobs": True, "top_logprobs": 2}),
    "OpenAI, schema": (
        "/v1/chat/completions",
        {**CHAT, "max_tokens": 60, "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
    ),
    "OpenAI, tools": (
        "/v1/chat/completions",
        {**CHAT, "max_tokens": 90, "tools": [{"type": "function", "function": TOOL}], "tool_choice": "required"},
    ),
    "OpenAI, echo": (
        "/v1/completions", {"prompt": "Once upon", "max_tokens": 4, "echo": True, "logprobs": 1, "seed": 1}
    ),
    "Anthropic": ("/v1/messages", {**CHAT, "temperature": 0.0, "stop_sequences": [" a "]}),
    "Ollama": ("/api/chat", {**CHAT, "stream": False, "options": {"seed": 3, "num_predict": 20, "mirostat": 2}}),
    "llama.cpp": (
        "/completion",
        {**STORY, "stream": False, "n_predict": 30, "seed": 2, "dry_multiplier": 0.8, "grammar": "root ::= [a-z ]+"},
    ),
    "embeddings": ("/v1/embeddings", {"input": ["hello", "a bird"]}),
}  # fmt: skip


@pytest.mark.parametrize("name", ASKED)
def test_answers_are_those_of_a_server_without_ray(served: Server, plain: Server, name: str) -> None:
    path, body = ASKED[name]
    body = {key: value for key, value in body.items() if not (name == "Anthropic" and key == "seed")}
    one, other = served.post(path, body), plain.post(path, body)
    assert one.status_code == other.status_code == 200, one.text
    assert told(one.json()) == told(other.json())


def test_errors_are_those_of_a_server_without_ray(served: Server, plain: Server) -> None:
    for path, body in (
        ("/completion", {"prompt": "word " * 3000}),
        ("/completion", {"prompt": "a", "grammar": "root ::= x"}),
        ("/v1/chat/completions", {"messages": [], "max_tokens": -5}),
    ):
        one, other = served.post(path, body), plain.post(path, body)
        assert (one.status_code, one.json()) == (other.status_code, other.json())
        assert one.status_code >= 400


class Story:
    """A stream, read in a thread."""

    def __init__(self, at: Server, seed: int) -> None:
        self.tokens: list[int] = []
        self.pause, self.problem = 0.0, ""
        self._asked = (f"{at.url}/completion", {**STORY, "seed": seed, "temperature": 0.9})
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        url, body = self._asked
        last = time.monotonic()
        with httpx.stream("POST", url, json=body, timeout=PATIENCE) as response:
            for line in response.iter_lines():
                if line.startswith("data: "):
                    event = json.loads(line[6:])
                    self.problem += str(event.get("error", ""))
                    self.tokens += event.get("tokens", [])
                    self.pause, last = max(self.pause, time.monotonic() - last), time.monotonic()

    def whole(self) -> list[int]:
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()
        assert not self.problem, self.problem
        return self.tokens


def pair(cluster: TwoNodes) -> list[int]:
    """Return the processes of the server that has two replicas, while both run."""
    found = defaultdict(list)
    for process, title in actors(cluster, REPLICA).items():
        found[front_of(title)].append(process)
    return next((each for each in found.values() if len(each) == 2), [])


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_streams_go_on_after_a_fault(served: Server, plain: Server, cluster: TwoNodes, sent: signal.Signals) -> None:
    expected = [Story(plain, seed).whole() for seed in range(4)]
    until(lambda: pair(cluster))
    victim = pair(cluster)[0]
    stories = [Story(served, seed) for seed in range(4)]
    until(lambda: all(len(story.tokens) > 20 for story in stories))
    os.kill(victim, sent)
    assert httpx.get(f"{served.url}/health", timeout=2).status_code == 200
    assert [story.whole() for story in stories] == expected
    until(lambda: victim not in actors(cluster, REPLICA) and served.metrics()["localllm_replicas"] == 2)
    found = served.metrics()
    assert found["localllm_replicas_lost_total"] >= 1
    assert found["localllm_requests_moved_total"] >= 1
    assert found["localllm_stages"] == 1
    until(lambda: not served.metrics()["llamacpp:requests_processing"], 5)


def test_a_client_that_leaves_ends_its_answer(served: Server) -> None:
    with httpx.stream("POST", f"{served.url}/completion", json={**STORY, "seed": 1}, timeout=PATIENCE) as response:
        next(response.iter_lines())
    until(lambda: not sum(served.metrics()[f"llamacpp:requests_{each}"] for each in ("processing", "deferred")), 3)


def long_events(at: Server, seed: int) -> socket.socket:
    """Ask for a stream of 2.7 MB, which no buffer of a socket holds."""
    body = json.dumps({**STORY, "n_predict": 270, "seed": seed, "n_probs": 100}).encode()
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", httpx.URL(at.url).port))
    head = (
        f"POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    )
    client.sendall(f"{head}\r\n\r\n".encode() + body)
    return client


@pytest.mark.parametrize("name", ["served", "staged"])
def test_clients_that_read_slowly_do_not_delay_others(name: str, plain: Server, request: pytest.FixtureRequest) -> None:
    """Their answers are generated meanwhile, and wait in the front. Nothing of them is lost."""
    served: Server = request.getfixturevalue(name)
    expected = Story(plain, 3).whole()
    before = memory(served.process.pid)
    slow = [long_events(served, seed) for seed in range(6)]
    until(lambda: all(client.recv(1) for client in slow))
    for _ in range(2):
        assert Story(served, 3).whole() == expected
    until(lambda: not served.running())  # the slow clients take no place of others
    assert memory(served.process.pid) - before < 250 << 20
    received = 1
    slow[0].settimeout(PATIENCE)
    while data := slow[0].recv(1 << 20):
        received += len(data)
        if b'"stop":true' in data:
            break
    assert received > 2 << 20
    for client in slow:
        client.close()
    until(lambda: not served.metrics()["llamacpp:requests_processing"], 5)


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_streams_go_on_after_a_stage_was_lost(
    staged: Server, plain: Server, cluster: TwoNodes, sent: signal.Signals
) -> None:
    expected = [Story(plain, seed).whole() for seed in range(2)]
    before = set(actors(cluster, STAGE))
    stories = [Story(staged, seed) for seed in range(2)]
    until(lambda: all(len(story.tokens) > 20 for story in stories))
    for each in before:  # the stage, and the process that waits to replace it if it dies
        os.kill(each, sent)
    assert [story.whole() for story in stories] == expected
    until(lambda: not before & set(actors(cluster, STAGE)))
    assert staged.metrics()["localllm_stages"] == 2


def test_many_clients_at_once(served: Server, plain: Server) -> None:
    bodies = [
        {"prompt": f"The {number}", "n_predict": 20, "seed": number, "return_tokens": True} for number in range(24)
    ]
    with ThreadPoolExecutor(24) as pool:
        found = list(pool.map(lambda body: served.post("/completion", body).json()["tokens"], bodies))
    assert found == [plain.post("/completion", body).json()["tokens"] for body in bodies]


def test_top_shows_the_replicas(served: Server) -> None:
    until(lambda: served.metrics()["localllm_replicas"] == 2)  # on a busy machine, a replica may be silent for a second
    shown = cli("top", served.url, "--once").stdout
    assert re.search(r"replicas +2 of 2", shown), shown


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--ray", "auto"], "name it"),
        (["demo", "--replicas", "2"], "--replicas 2 needs --ray"),
        (["demo", "--ray", "auto", "--replicas", "0"], "a number of replicas from 1 to 64"),
        (["demo", "--ray", "auto", "--replicas", "3-2"], "or a range such as 1-4"),
        (["demo", "--ray", "auto", "--cache-dir", "x"], "--cache-dir stores the cache of this process"),
        (["demo", "--ray", "auto", "--embeddings"], "--embeddings does not run on --ray"),
        (["--models", ".", "--ray", "auto"], "name it"),
    ],
)
def test_wrong_options(words: list[str], told: str) -> None:
    done = cli("serve", *words, "--port", "0")
    assert done.returncode != 0
    assert told in " ".join(done.stderr.split())
    assert done.stderr.strip().count("\n") <= 3
    assert "Traceback" not in done.stderr
