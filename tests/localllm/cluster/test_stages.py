"""Models in stages have the bits of one executable: random steps, micro-batches, answers with drafts, moved caches."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier, Event
from typing import Any

import numpy as np
import pytest

import localllm
from localllm.backends.base import BackendError, CacheTypes, Executable, Limits
from localllm.backends.cpu.backend import CpuBackend
from localllm.backends.reference import ReferenceBackend
from localllm.cluster.backend import SplitBackend
from localllm.cluster.cut import Cut, cut_at, even_cut
from localllm.cluster.executable import MICRO_ROWS, SplitExecutable
from localllm.cluster.ring import LocalRing
from localllm.cluster.stage import Layout, Stage, bind_stage
from localllm.engine import BlockPool, Engine, SequenceRows
from localllm.generation.interfaces import SchedulerLimits
from localllm.models import architecture_of, record_with_heads
from localllm.plan import BLOCK, Plan
from tests.localllm.cluster.support import local
from tests.localllm.engine.support import ALONE, LIMITS, PLANS, Schedule, alone, engine_of
from tests.localllm.generation.speculation.support import eager
from tests.models.drafters import DRAFTERS
from tests.models.kit import KIT
from tests.models.support import Driver, nmse, plan_of

LONG = Limits(rows=320, logit_rows=320, blocks=12, positions=6 * BLOCK, window_blocks=12)
ONE_POOL = replace(LONG, window_blocks=0)


@pytest.fixture(scope="module")
def cpu() -> Iterator[CpuBackend]:
    backend = CpuBackend(threads=1)
    yield backend
    backend.close()


def vocabulary(plan: Plan) -> int:
    return min(plan.input_vocabulary, plan.logits.width)


# -- the same bits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "stages"), [("llama", 1), ("delta net", 1), *((name, 2 + at % 2) for at, name in enumerate(PLANS))]
)
def test_random_steps_of_many_sequences(cpu: CpuBackend, name: str, stages: int) -> None:
    """Prompts in chunks, decoding and drafts of several sequences, which are forked, truncated and released."""
    plan = PLANS[name]()
    stages = min(stages, 2) if name == "pools of positions" else stages
    engine, whole = engine_of(local(cpu, stages), plan, LIMITS), engine_of(cpu, plan, ALONE)
    assert isinstance(engine.executable, SplitExecutable)
    schedule = Schedule(engine, whole, vocabulary(plan), stages, 60, 60)
    schedule.run(16, 4)
    assert schedule.counts["compared"] > 20
    assert schedule.counts["forks"] + schedule.counts["truncated"] > 2
    assert engine.executable.block_bytes == whole.executable.block_bytes
    for executable in (engine.executable, whole.executable):
        executable.close()


@pytest.mark.parametrize("name", ["llama", "experts and windows", "delta net"])
def test_a_long_step_runs_in_micro_batches(cpu: CpuBackend, name: str) -> None:
    plan = PLANS[name]()
    tokens = np.random.default_rng(3).integers(0, vocabulary(plan), 300).tolist()
    engine, whole = engine_of(local(cpu, 2), plan, LONG), engine_of(cpu, plan, LONG)
    sent = engine.executable._exchange.number  # type: ignore[attr-defined]
    mixed = [SequenceRows(engine.add(), tokens[:200], "all"), SequenceRows(engine.add(), tokens[:90], (3, 60, 89))]
    first, second = (result.logits.copy() for result in engine.step(mixed))
    assert engine.executable._exchange.number - sent == 290 // MICRO_ROWS  # type: ignore[attr-defined]
    truth = alone(whole, tokens[:200], 200)
    np.testing.assert_array_equal(first.view(np.uint32), truth.view(np.uint32))
    np.testing.assert_array_equal(second.view(np.uint32), truth[[3, 60, 89]].view(np.uint32))
    for executable in (engine.executable, whole.executable):
        executable.close()


def test_texts_that_see_later_tokens_stay_whole(cpu: CpuBackend) -> None:
    plan = plan_of(*KIT["llada-dense"].loaded())
    assert not plan.causal
    tokens = np.random.default_rng(3).integers(0, 100, 200)
    split, whole = (backend.bind(plan, LONG) for backend in (local(cpu, 2), cpu))
    ours, theirs = (Driver(each).step([(0, tokens)]) for each in (split, whole))
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("name", ["gemma3n-e2b", "rwkv7", "kimi-k3-4x", "deepseek4-hash", "nanbeige-loops"])
def test_values_of_early_layers_that_late_layers_read(cpu: CpuBackend, name: str) -> None:
    """They pass through the stages between: per-layer embeddings, the first layer's values, sums of blocks."""
    plan = plan_of(*KIT[name].loaded())
    tokens = np.random.default_rng(3).integers(0, vocabulary(plan), 40)
    whole = cpu.bind(plan, ONE_POOL)
    theirs = Driver(whole).step([(0, tokens)])
    for firsts in ((0, 1, 2), (0, 1, 3)):
        split = SplitBackend(cpu, lambda plan, at=firsts: cut_at(plan, at), LocalRing.over([cpu, cpu]))  # type: ignore[misc]
        found = split.bind(plan, ONE_POOL)
        np.testing.assert_array_equal(Driver(found).step([(0, tokens)]), theirs)
        found.close()
    whole.close()


def test_stages_on_other_backends() -> None:
    """The reference backend in one stage and the CPU in the other. Micro-batches are for the CPU alone."""
    plan, reference, cpu = PLANS["llama"](), ReferenceBackend(), CpuBackend(1)
    tokens = np.random.default_rng(3).integers(0, vocabulary(plan), 140)
    mixed = SplitBackend(reference, lambda plan: even_cut(plan, 2), LocalRing.over([cpu])).bind(plan, LONG)
    truth = Driver(reference.bind(plan, LONG)).step([(0, tokens)])
    sent = mixed._exchange.number
    assert nmse(Driver(mixed).step([(0, tokens)]), truth).max() < 5e-3  # int8 products on the CPU
    assert mixed._exchange.number - sent == 1
    assert [stage.backend for stage in mixed.stages] == ["reference", "cpu"]
    assert mixed.cache_layout.startswith("1 of reference")
    mixed.close()
    cpu.close()


def test_stages_load_at_the_same_time(cpu: CpuBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """In other processes, and here in another thread. If the first one fails, the ring of the others is closed."""
    plan, other, both, closed = PLANS["llama"](), CpuBackend(1), Barrier(2), Event()

    def binds(*given: Any) -> Stage:
        both.wait(20)
        return bind_stage(*given)

    def fails(*given: Any) -> Stage:
        both.wait(20)
        raise BackendError("no memory is left")

    def connect(cut: Cut, layout: Layout) -> Any:
        both.wait(20)
        ring = LocalRing.over([other])(cut, layout)
        monkeypatch.setattr(ring, "close", closed.set)
        return ring

    split = SplitBackend(cpu, lambda plan: even_cut(plan, 2), connect, together=True)
    monkeypatch.setattr("localllm.cluster.backend.bind_stage", binds)
    found, whole = split.bind(plan, LONG), cpu.bind(plan, LONG)
    tokens = np.random.default_rng(3).integers(0, vocabulary(plan), 40)
    ours, theirs = (Driver(each).step([(0, tokens)]) for each in (found, whole))
    np.testing.assert_array_equal(ours, theirs)
    found.close()
    whole.close()
    assert closed.wait(20)
    closed.clear()
    monkeypatch.setattr("localllm.cluster.backend.bind_stage", fails)
    with pytest.raises(BackendError, match="no memory is left"):
        split.bind(plan, LONG)
    assert closed.wait(20)
    other.close()


# -- the program over stages -----------------------------------------------------------------------------------------


def split_models(monkeypatch: pytest.MonkeyPatch, stages: int) -> None:
    """Make `localllm.load` run models on the CPU in stages."""

    def opened(name: str, threads: int | None, device: str, checked: bool = True) -> SplitBackend:
        return local(CpuBackend(threads), stages)

    monkeypatch.setattr("localllm.loading.loader.open_backend", opened)


GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 24}


@pytest.mark.parametrize(
    ("kit", "stages", "spec"),
    [("llama-gqa", 3, "ngram"), ("qwen35-mtp", 2, "mtp"), ("step35-mtp", 3, "mtp"), ("gemma3-12", 2, "off")],
)
def test_answers_with_drafts_prefixes_and_neighbours(
    kit: str, stages: int, spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = KIT[kit].write(tmp_path / "model.gguf")
    options: dict[str, Any] = {"ctx_size": 200, "threads": 1}
    with localllm.load(path, **options, spec="off") as plain:
        split_models(monkeypatch, stages)
        with localllm.load(path, **options, spec=spec) as model:
            assert isinstance(model.executable, SplitExecutable)
            if spec != "off":
                eager(model)
            model.new_core(SchedulerLimits())
            repeated = [int(t) for t in np.random.default_rng(5).integers(3, plain.vocabulary, 35)] * 2
            prompts = [repeated, [*repeated[:66], 7, 8, 9], repeated, repeated[40:]]
            expected = [plain.generate(prompt, **GREEDY).tokens for prompt in prompts]
            replies = [model.generate(prompt, **GREEDY) for prompt in prompts[:3]]  # prefixes are reused
            assert [reply.tokens for reply in replies] == expected[:3]
            assert spec == "off" or sum(reply.usage.drafted for reply in replies) > 20
            assert replies[2].usage.reused_tokens > 50
            sampled = {"temperature": 0.9, "top_k": 20, "seed": 4, "ignore_eos": True, "max_tokens": 12}
            assert model.generate(repeated, **sampled).tokens == plain.generate(repeated, **sampled).tokens
            with ThreadPoolExecutor(3) as threads:
                found = list(threads.map(lambda ids: model.generate(ids, **GREEDY).tokens, prompts[1:]))
            assert found == expected[1:]


@pytest.mark.parametrize("name", ["own", "assistant"])
def test_answers_with_another_file_that_drafts(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = DRAFTERS[name]
    path, drafter = KIT[chosen.model].write(tmp_path / "model.gguf"), chosen.write(tmp_path / "drafter.gguf")
    options: dict[str, Any] = {"ctx_size": 200, "threads": 1}
    with localllm.load(path, **options, spec="off") as plain:
        expected = plain.generate(range(3, 40), **GREEDY).tokens
    split_models(monkeypatch, 2)
    with localllm.load(path, **options, spec="mtp", model_draft=drafter) as model:
        assert isinstance(model.executable, SplitExecutable)
        eager(model)
        reply = model.generate(range(3, 40), **GREEDY)
        assert reply.tokens == expected
        assert reply.usage.drafted > 10


# -- caches, and errors ----------------------------------------------------------------------------------------------


def test_cache_blocks_move_between_one_process_and_stages(cpu: CpuBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a file with a saved conversation. Portions of one block exercise several messages."""
    monkeypatch.setattr("localllm.cluster.executable.BLOCKS_BYTES", 1)
    plan = PLANS["delta net"]()
    tokens = np.random.default_rng(3).integers(0, vocabulary(plan), 150)
    there, here = cpu.bind(plan, ONE_POOL), local(cpu, 3).bind(plan, ONE_POOL)
    assert there.cache_layout == here.cache_layout
    truth = Driver(there).step([(0, tokens)])[2 * BLOCK :]
    for layer in range(len(plan.layers)):
        content = there.read_blocks(layer, np.array([0, 1]))
        here.write_blocks(layer, np.array([4, 1]), content)
        np.testing.assert_array_equal(here.read_blocks(layer, np.array([4, 1])), content)
    here.copy_blocks(np.array([4]), np.array([5]))
    driver = Driver(here)
    driver.tables, driver.lengths = np.array([[5, 1, 3]], np.int32), [2 * BLOCK]
    np.testing.assert_array_equal(driver.step([(0, tokens[2 * BLOCK :])]), truth)
    wrong = np.full((1, here.block_bytes[-1]), 255, np.uint8)
    with pytest.raises(BackendError, match="stage 2: write_blocks: the content holds numbers that are not finite"):
        here.write_blocks(len(plan.layers) - 1, np.array([0]), wrong)
    for executable in (there, here):
        executable.close()


def test_values_that_are_kept_come_from_their_stage(cpu: CpuBackend) -> None:
    plan = PLANS["llama"]()
    kept = [value for op in plan.operations for value, _ in op.products if value.rows == "batch"]
    split, whole = (backend.bind(plan, LIMITS, CacheTypes(), None, kept) for backend in (local(cpu, 3), cpu))
    for executable in (split, whole):
        Driver(executable).step([(0, np.arange(9))])
    for value in kept:
        np.testing.assert_array_equal(split.value(value), whole.value(value))
    for call in (lambda: split.routing(kept[0]), lambda: split.replace(next(iter(plan.weights.values())))):
        with pytest.raises(BackendError, match="only where all layers run in one process; load the model without stag"):
            call()


def test_heads_draft_in_the_last_stage_after_micro_batches(cpu: CpuBackend) -> None:
    """The hidden states of a prompt's micro-batches come back together."""
    metadata, tensors = KIT["qwen35-mtp"].loaded()
    plan = record_with_heads(metadata, architecture_of(metadata), tensors)
    head, ids = plan.drafts[0], np.random.default_rng(3).integers(0, 90, 200).tolist()
    found = []
    for backend in (cpu, local(cpu, 3)):
        executable: Executable = backend.bind(
            plan, LONG, CacheTypes(), None, (head.hidden, head.logits, head.following)
        )
        engine = Engine(executable, BlockPool(LONG.blocks, BLOCK, windowed=BlockPool(12, BLOCK, plan.window)), LONG)
        engine.draft_heads = plan.drafts
        sequence = engine.add()
        [result] = engine.step([SequenceRows(sequence, ids)])
        hidden = result.hidden.copy()
        with engine.drafting([(sequence, 1)]):
            rows = localllm.engine.DraftRows(sequence, 0, ids[1:], hidden[:-1], 1)
            logits, following = engine.draft([rows])
            found.append([hidden, logits.copy(), following.copy()])
        executable.close()
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_failed_step_names_its_stage_and_changes_nothing(cpu: CpuBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = PLANS["llama"]()
    engine, whole = engine_of(local(cpu, 3), plan, LIMITS), engine_of(cpu, plan, ALONE)
    sequence, tokens = engine.add(), list(range(20))
    engine.step([SequenceRows(sequence, tokens[:10])])
    stage = engine.executable._exchange.ring._stages[0]  # type: ignore[attr-defined]
    with monkeypatch.context() as patch:
        patch.setattr(stage.executable, "run", lambda received: 1 / 0)
        with pytest.raises(BackendError, match=r"^stage 1: ZeroDivisionError: division by zero$"):
            engine.step([SequenceRows(sequence, tokens[10:])])
    assert sequence.tokens == tokens[:10]
    [result] = engine.step([SequenceRows(sequence, tokens[10:], "all")])
    np.testing.assert_array_equal(result.logits, alone(whole, tokens, 20)[10:])


def test_errors_of_all_micro_batches_are_one_error(cpu: CpuBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, tokens = PLANS["llama"](), [token % 29 for token in range(256)]
    engine, whole = engine_of(local(cpu, 2), plan, LONG), engine_of(cpu, plan, LONG)
    stage, sequence = engine.executable._exchange.ring._stages[0], engine.add()  # type: ignore[attr-defined]
    with monkeypatch.context() as patch:
        patch.setattr(stage.executable, "run", lambda received: 1 / 0)
        with pytest.raises(BackendError, match=r"^stage 1: ZeroDivisionError"):
            engine.step([SequenceRows(sequence, tokens)])
    assert len(engine.executable._exchange.ring._answers) == 256 // MICRO_ROWS - 1  # type: ignore[attr-defined]
    [result] = engine.step([SequenceRows(sequence, tokens, "all")])
    np.testing.assert_array_equal(result.logits, alone(whole, tokens, 256))


def test_a_copy_that_failed_fails_the_next_step(cpu: CpuBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(local(cpu, 2), PLANS["llama"](), LIMITS)
    stage, sequence = engine.executable._exchange.ring._stages[0], engine.add()  # type: ignore[attr-defined]
    engine.step([SequenceRows(sequence, [1, 2, 3])])
    fork = engine.fork(sequence)
    monkeypatch.setattr(stage.executable, "copy_blocks", lambda *arguments: 1 / 0)
    with pytest.raises(BackendError, match=r"^stage 1: ZeroDivisionError"):
        engine.step([SequenceRows(fork, [4])])
    assert fork.tokens == [1, 2, 3]


def test_answers_to_an_interrupted_step_are_skipped(cpu: CpuBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C arrives after a step was sent: its answer comes before the answer to the next step."""
    plan = PLANS["llama"]()
    engine, whole = engine_of(local(cpu, 2), plan, LIMITS), engine_of(cpu, plan, ALONE)
    sequence, tokens = engine.add(), list(range(20))
    executable = engine.executable
    assert isinstance(executable, SplitExecutable)
    with monkeypatch.context() as patch:

        def interrupted(*arguments: object) -> None:
            raise KeyboardInterrupt

        patch.setattr(executable, "_answer", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step([SequenceRows(sequence, [28, 27, 26])])
    assert not sequence.tokens
    [result] = engine.step([SequenceRows(sequence, tokens, "all")])
    np.testing.assert_array_equal(result.logits, alone(whole, tokens, 20))


def test_a_measured_bandwidth_is_that_of_reading_one_stage_after_the_other(cpu: CpuBackend) -> None:
    split = local(cpu, 2).bind(PLANS["llama"](), LIMITS)
    first, second = split._first.executable, split._exchange.ring._stages[0].executable  # type: ignore[attr-defined]
    first.read_bandwidth, second.read_bandwidth = (lambda: 1e9), (lambda: 3e9)
    sizes = [stage.memory.weights_per_token for stage in split.stages]
    assert split.read_bandwidth() == pytest.approx(sum(sizes) / (sizes[0] / 1e9 + sizes[1] / 3e9))
    assert split.memory.weights_per_token == sum(sizes)
