"""Several steps in flight: requests of the loop keep all stages busy, and get the answers of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import localllm
from localllm.backends.base import CacheTypes, Limits
from localllm.backends.cpu.backend import CpuBackend
from localllm.generation.interfaces import SchedulerLimits
from localllm.generation.request import Request
from localllm.generation.request_state import RequestState
from localllm.generation.running import Running
from localllm.options import SamplingOptions
from localllm.plan import BLOCK, Batch
from tests.backends import support
from tests.localllm.cluster.crowd import Crowd, split
from tests.localllm.cluster.support import local
from tests.localllm.generation.speculation.support import eager
from tests.localllm.generation.support import Stepped
from tests.models.kit import KIT

OPTIONS: dict[str, Any] = {"ctx_size": 256}
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 24}
CASES = [  # model, stages, speculation
    ("llama-gqa", 2, "off"),
    ("llama-gqa", 3, "ngram"),
    ("qwen35-mtp", 2, "mtp"),
    ("step35-mtp", 3, "mtp"),
    ("gemma3-12", 2, "ngram"),
    ("qwen35-dense", 2, "off"),
    ("kimi-linear-moe", 2, "off"),
    ("rwkv7", 3, "off"),
    ("llama-gqa", 2, "draft"),
]


@pytest.mark.parametrize(("kit", "stages", "spec"), CASES)
def test_a_crowd_gets_the_tokens_of_one_process(kit: str, stages: int, spec: str, tmp_path: Path) -> None:
    path = KIT[kit].write(tmp_path / "model.gguf")
    more = {"model_draft": KIT[kit].write(tmp_path / "draft.gguf")} if spec == "draft" else {}
    with (
        localllm.load(path, threads=1, spec="off", **OPTIONS) as plain,
        split(path, stages, spec=spec, **OPTIONS, **more) as model,
    ):
        if spec != "off":
            eager(model)
        for seed in range(2):
            crowd = Crowd(plain, model, seed, constrained=spec != "off")
            crowd.run()
            assert crowd.together == stages
            assert crowd.largest > 1
            assert spec == "off" or sum(each.one.usage().drafted for each in crowd.asked) > 10


@pytest.mark.parametrize(("kit", "spec"), [("llama-gqa", "off"), ("kimi-linear-moe", "ngram"), ("qwen35-mtp", "mtp")])
def test_requests_are_preempted_when_the_cache_is_full(kit: str, spec: str, tmp_path: Path) -> None:
    """Three blocks for five requests: some of them need two blocks, and copies of shared ones."""
    path = KIT[kit].write(tmp_path / "model.gguf")
    with (
        localllm.load(path, threads=1, spec="off", **OPTIONS) as plain,
        split(path, 2, spec=spec, **OPTIONS) as model,
    ):
        if spec != "off":
            eager(model)
        stops: list[RequestState] = []
        with pytest.MonkeyPatch.context() as patch:
            stop = Running._stop
            patch.setattr(Running, "_stop", lambda it, one, keep: (stops.append(one), stop(it, one, keep)))
            crowd = Crowd(plain, model, 4, spare=3, constrained=spec != "off")
            crowd.run()
        assert crowd.together == 2
        assert stops


def test_a_step_that_fails_ends_its_requests_and_not_those_of_the_other_step(tmp_path: Path) -> None:
    path = KIT["llama-gqa"].write(tmp_path / "model.gguf")
    with (
        localllm.load(path, threads=1, spec="off", **OPTIONS) as plain,
        split(path, 2, spec="off", **OPTIONS) as model,
    ):
        executable = model.executable._exchange.ring._stages[0].executable  # type: ignore[attr-defined]
        run, random = executable.run, np.random.default_rng(3)

        def failing(received: Any) -> Any:
            return run(received) if random.random() > 0.04 else 1 / 0

        executable.run = failing
        crowd = Crowd(plain, model, 5, failure="stage 1: ZeroDivisionError")
        crowd.run(30)
        assert crowd.together == 2


def test_tokens_of_a_step_in_flight_are_not_reused(tmp_path: Path) -> None:
    """The step fails in the second stage, after a request arrived that continues its text."""
    path, greedy = KIT["llama-gqa"].write(tmp_path / "model.gguf"), SamplingOptions(temperature=0)
    with split(path, 2, spec="off", **OPTIONS) as model:
        stage = model.executable._exchange.ring._stages[0].executable  # type: ignore[attr-defined]
        with Stepped(model, parallel=3) as it:
            asked = [it.ask(Request([n, *range(5, 75)], greedy, 24, ignore_eos=True)) for n in (3, 4)]
            while min(one.answer_tokens for one, _ in asked) < 2:
                it.turn()
            run, stage.run = stage.run, lambda received: 1 / 0
            it.turn()
            stage.run = run
            [failing] = [one for one, _ in asked if one.in_flight]
            known, text = failing.flown_from, [*failing.tokens, 9, 9]
            assert known == len(failing.tokens) - 1
            _, answer = it.ask(Request(text, greedy, 24, ignore_eos=True))
            it.finish()
            assert failing.ended == "failed"
            assert answer.reused == known
        model.new_core(SchedulerLimits())
        assert answer.tokens == model.generate(text, **GREEDY).tokens


def test_an_interrupt_between_two_collections_loses_nothing(tmp_path: Path) -> None:
    """Ctrl-C arrives while a step is collected. Another step is in flight, and the interrupted requests continue."""
    path = KIT["llama-gqa"].write(tmp_path / "model.gguf")
    with split(path, 2, spec="off", **OPTIONS) as model:
        truth = [model.generate([5, 6, 7 + n], **GREEDY).tokens for n in range(4)]
        with Stepped(model, parallel=4) as it:
            answers = [
                it.ask(Request([5, 6, 7 + n], SamplingOptions(temperature=0), 24, ignore_eos=True))[1] for n in range(4)
            ]
            it.turn(6)
            executable, flights = model.executable, it.running.flights
            answer = executable._answer  # type: ignore[attr-defined]

            def interrupted(*given: object) -> None:
                raise KeyboardInterrupt

            for turns in range(5):
                it.turn(turns)
                executable._answer = interrupted  # type: ignore[attr-defined]
                with pytest.raises(KeyboardInterrupt):
                    it.turn()
                assert len(flights) == 1
                executable._answer = answer  # type: ignore[attr-defined]
            it.finish()
        assert [answer.tokens for answer in answers] == truth


def test_values_of_a_step_beside_another_one() -> None:
    """Each stage computes other steps before the values of a step are read: hidden states, logits and the largest."""
    plan, cpu = support.plan("Q4_0"), CpuBackend(1)
    kept = [value for op in plan.operations for value, _ in op.products if value.rows == "batch"]
    limits, found = Limits(rows=64, logit_rows=64, blocks=8, positions=2 * BLOCK), []
    batches = [batch(3, 0), batch(5, 1)]
    for backend in (cpu, local(cpu, 3)):
        executable: Any = backend.bind(plan, limits, CacheTypes(), None, kept)
        if backend is cpu:
            results = []
            for each in batches:
                logits = executable.step(each).copy()
                results.append((logits, [executable.value(value).copy() for value in kept]))
        else:
            steps = [executable.submit(each, 0, kept) for each in batches]
            results = [(executable.collect(step), [executable.value(value) for value in kept]) for step in steps]
        found.append(results)
        executable.close()
    for (ours, values), (theirs, truth) in zip(*found, strict=True):
        np.testing.assert_array_equal(ours, theirs)
        for one, other in zip(values, truth, strict=True):
            np.testing.assert_array_equal(one, other)
    cpu.close()


def test_hidden_states_do_not_keep_a_prompt_in_one_piece() -> None:
    """Embeddings read the normed hidden states: each micro-batch brings its own."""
    plan, cpu = support.plan("Q4_0"), CpuBackend(1)
    assert plan.normed is not None
    limits = Limits(rows=256, logit_rows=256, blocks=8, positions=4 * BLOCK)
    tokens, found = batch(200, 0), []
    tokens.tables, tokens.tokens = np.array([[0, 1, 2, 3]], np.int32), tokens.tokens % 97
    for backend in (cpu, local(cpu, 3)):
        executable: Any = backend.bind(plan, limits, CacheTypes(), None, [plan.normed])
        if backend is cpu:
            logits = executable.step(tokens).copy()
        else:
            step = executable.submit(tokens, 0, [plan.normed])
            assert len(step.pieces) > 1
            logits = executable.collect(step)
        found.append((logits, executable.value(plan.normed).copy()))
        executable.close()
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    cpu.close()


def batch(tokens: int, block: int) -> Batch:
    at = np.arange(tokens, dtype=np.int32)
    return Batch(at + 3, at, at + block * BLOCK, at * 0, np.array([[block]], np.int32), at)
