"""`localllm serve --ray --replicas 2 --prefill-replicas 1` on two nodes of Ray: the same answers, also after faults."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from tests.localllm.distributed.conftest import PROMPTS, TwoNodes, actors
from tests.localllm.distributed.servers import Server, until
from tests.localllm.support import localllm as cli

pytestmark = pytest.mark.xdist_group("ray")


def asked(number: int) -> dict[str, Any]:
    text = " ".join(f"Once there was a {word} who lived in house {number}." for word in ("cat", "dog", "bird", "boy"))
    return {"prompt": f"{number} {text * 2}", "n_predict": 16, "seed": number, "return_tokens": True}


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
    [victim] = actors(cluster, PROMPTS)
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
