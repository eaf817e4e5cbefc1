"""`localllm serve --ray --prefill-replicas 1` on two nodes of Ray: the same answers, also after faults."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.localllm.distributed.conftest import TwoNodes
from tests.localllm.distributed.servers import Server, listening, started, until
from tests.localllm.distributed.test_replicas import replicas
from tests.localllm.support import localllm as cli

pytestmark = pytest.mark.xdist_group("ray")


def asked(number: int) -> dict[str, Any]:
    text = " ".join(f"Once there was a {word} who lived in house {number}." for word in ("cat", "dog", "bird", "boy"))
    return {"prompt": f"{number} {text * 2}", "n_predict": 16, "seed": number, "return_tokens": True}


@pytest.fixture(scope="module")
def served(cluster: TwoNodes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("prompts") / "log"
    with listening(log, started(log, "--ray", cluster.address, "--prefill-replicas", "1")) as found:
        yield found
    assert found.process.returncode == 0
    until(lambda: not [*replicas(cluster), *actors(cluster)])


def actors(cluster: TwoNodes) -> list[int]:
    """Return the processes that evaluate prompts."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            ours = str(cluster.cache).encode() in (folder / "environ").read_bytes()
            if ours and (folder / "cmdline").read_bytes().startswith(b"ray::PromptReplica"):
                found.append(int(folder.name))
    return found


def evaluated(server: Server, plain: Server, number: int) -> int:
    """Ask both servers, compare their answers, and return how many tokens of the prompt the replica evaluated."""
    one, other = server.post("/completion", asked(number)).json(), plain.post("/completion", asked(number)).json()
    assert one["tokens"] == other["tokens"]
    assert other["timings"]["prompt_n"] > 64
    return int(one["timings"]["prompt_n"])


def test_prompts_are_evaluated_elsewhere(served: Server, plain: Server) -> None:
    assert [evaluated(served, plain, number) for number in range(3)] == [1, 1, 1]


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_process_costs_no_token(served: Server, plain: Server, cluster: TwoNodes, sent: signal.Signals) -> None:
    [victim] = actors(cluster)
    os.kill(victim, sent)
    try:
        assert evaluated(served, plain, 10 + sent) > 64
    finally:
        if sent == signal.SIGSTOP:
            os.kill(victim, signal.SIGCONT)
    numbers = iter(range(100 * sent, 100 * sent + 60))
    until(lambda: evaluated(served, plain, next(numbers)) == 1)  # it is started and connected again


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["demo", "--prefill-replicas", "1"], "--prefill-replicas 1 needs --ray"),
        (["demo", "--ray", "auto", "--prefill-replicas", "-1"], "is not a whole number of at least 0"),
        (["demo", "--ray", "auto", "--prefill-replicas", "1", "--stages", "2"], "in one process; leave out --stages"),
    ],
)
def test_wrong_options(words: list[str], told: str) -> None:
    done = cli("serve", *words, "--port", "0")
    assert done.returncode != 0
    assert told in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
