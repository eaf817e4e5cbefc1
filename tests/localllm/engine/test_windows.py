"""Sliding-window and recurrent layers give the same bits as with a full KV cache, in less memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import localllm as api
import localllm.loading.loader
from localllm.engine.paging import SLACK
from localllm.generation.interfaces import SchedulerLimits
from localllm.gguf import NewTensor, write_gguf
from localllm.plan import BLOCK
from localllm.saved.prompt_cache import read_prompt_cache, restore, save
from tests.models.kit import KIT
from tests.models.tiny_families import FAMILIES

WINDOW, CONTEXT, PAST = 100, 1500, 256  # tokens
AGREEING = 480  # tokens for the reference backend, which is slow: a third more than the blocks of a window hold
IDS = np.random.RandomState(3).randint(0, 29, 1100).tolist()
Opener = tuple[Path, str]


RECURRENT = [
    "lfm2-dense", "qwen35-mtp", "jamba-dense", "kimi-linear-moe", "kimi-k3-moe", "minimax-01-moe", "rwkv7",
    "glm5-next-8of40", "qwen4exp-8of40", "deepseek4-8of50",
]  # fmt: skip


@pytest.fixture(scope="module", params=["gpt-oss", "gemma3", "gemma2", *RECURRENT])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param in RECURRENT:
        return KIT[request.param].write(tmp_path_factory.mktemp("model") / "m.gguf")
    metadata, tensors = FAMILIES[request.param]()
    metadata |= {f"{request.param}.attention.sliding_window": WINDOW}
    written = tmp_path_factory.mktemp("model") / "m.gguf"
    write_gguf(written, metadata, [NewTensor(t.name, t.format, t.shape, t.rows) for t in tensors.values()])
    return written


@pytest.fixture
def model(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[api.Model]:
    monkeypatch.setattr(localllm.loading.loader, "WINDOW_PAST", PAST)
    monkeypatch.setattr(localllm.loading.loader, "BATCH_ROWS", 64)
    with api.load(path, ctx_size=CONTEXT, threads=2) as opened:
        yield opened


@pytest.fixture(scope="module")
def truth(path: Path) -> np.ndarray:
    """Return the float32 logits (1100, vocabulary) computed with a full KV cache."""
    with api.load(path, ctx_size=CONTEXT, threads=1) as whole:
        assert whole.pool.windowed is None
        return whole.logits(IDS)


def feed(session: api.Session, start: int, stop: int, size: int = 64) -> np.ndarray:
    parts = [session.evaluate(IDS[at : min(at + size, stop)], logits=True).copy() for at in range(start, stop, size)]
    return np.concatenate(parts)


def test_the_bits_are_those_of_a_cache_that_keeps_everything(model: api.Model, truth: np.ndarray) -> None:
    assert model.pool.windowed is not None
    assert (model.logits(IDS) == truth).all()
    session = model.session()
    feed(session, 0, 1000)
    assert (feed(session, 1000, 1100, 1) == truth[1000:]).all()
    for back in (1, 16, SLACK):  # tokens to rewind, as after rejected drafts
        session.rewind(len(IDS))
        assert session.rewind(len(IDS) - back) == len(IDS) - back
        assert (feed(session, len(IDS) - back, len(IDS)) == truth[-back:]).all()
    session.close()


def test_the_reference_backend_agrees(path: Path, truth: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(localllm.loading.loader, "WINDOW_PAST", 0)
    monkeypatch.setattr(localllm.loading.loader, "BATCH_ROWS", 32)
    with api.load(path, backend="reference", ctx_size=600) as model:
        assert model.pool.windowed is not None
        found = model.logits(IDS[:AGREEING])
        assert np.abs(found - truth[:AGREEING]).max() < 0.05 * np.abs(truth).max()
        monkeypatch.setattr(localllm.loading.loader, "WINDOW_PAST", CONTEXT)
        with api.load(path, backend="reference", ctx_size=600) as whole:
            assert whole.pool.windowed is None
            assert (whole.logits(IDS[:AGREEING]) == found).all()


def test_memory_is_the_window_and_the_layers_without(model: api.Model) -> None:
    executable = model.executable
    assert model.plan is not None
    window = model.plan.window
    blocks = -(-(window + SLACK + 64) // BLOCK) + 2 + PAST // BLOCK
    assert executable.limits.window_blocks == blocks < executable.limits.blocks
    parts = [
        size * (blocks if layer.window else executable.limits.blocks)
        for layer, size in zip(model.layers, executable.block_bytes, strict=True)
    ]
    assert executable.memory.cache == pytest.approx(sum(parts), abs=64 * 2 * len(parts))
    memory = executable.memory
    assert memory.window in (window, 0, 32)  # 0 without sliding-window layers; 32 in LFM2's GGUF
    assert memory.read_after(1000) - memory.weights_per_token == (
        memory.cache_per_token * 1000
        + memory.window_per_token * memory.window
        + memory.selected_per_token * memory.selected
        + memory.state_per_token
    )


def test_far_back_means_from_the_start(model: api.Model, truth: np.ndarray) -> None:
    """A prompt that diverges before the window is evaluated in full, with the same answer."""
    session = model.session()
    feed(session, 0, 1100)
    assert session.shared(IDS[:1090]) == session.shared(IDS[:1100]) - 10 == 1090
    assert session.rewind(1090) == 1090
    assert session.rewind(300) == session.length == session.shared(IDS[:300]) == 0
    assert (session.evaluate(IDS[:64], logits=True) == truth[:64]).all()
    session.close()
    for stop, reused in ((1100, 0), (1095, 1094), (300, 0), (299, 298)):
        reply = model.generate(IDS[:stop], max_tokens=1, ignore_eos=True, temperature=0.0)
        assert reply.tokens == [truth[stop - 1].argmax()]
        assert reply.usage.reused_tokens == reused
    model.new_core(SchedulerLimits())
    assert model.pool.windowed is not None
    for pool in (model.pool, model.pool.windowed):
        assert pool.free_blocks == pool.blocks


def test_forks_and_neighbours(model: api.Model, truth: np.ndarray) -> None:
    """Two sequences continue from the same tokens, and each writes to its own copy of the last block. A third
    sequence allocates blocks meanwhile.
    """
    session, other, third = model.session(), model.session(), model.session()
    feed(session, 0, 290)
    other.sequence = model.engine.fork(session.sequence)
    third.evaluate(IDS[:60], logits=False)
    other.evaluate(IDS[:20], logits=False)
    assert (feed(session, 290, 420) == truth[290:420]).all()
    assert other.rewind(290) == 290
    assert (feed(other, 290, 330, 3) == truth[290:330]).all()
    for each in (session, other, third):
        each.close()
    assert model.pool.windowed is not None
    for pool in (model.pool, model.pool.windowed):
        assert pool.free_blocks == pool.blocks


def test_a_file_holds_the_window_alone(
    model: api.Model, path: Path, truth: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = model.session()
    feed(session, 0, 1000)
    written = save(tmp_path / "c", model, session.sequence, [])
    sizes = [(layer.window, size) for layer, size in zip(model.layers, model.executable.block_bytes, strict=True)]
    assert model.plan is not None
    kept = 15 - (15 * BLOCK - SLACK // 2 + 1 - model.plan.window) // BLOCK
    content = sum(size * (kept if window else 15) for window, size in sizes)
    assert content < written < content + 8000
    session.close()
    fresh = model.session()
    restore(read_prompt_cache(tmp_path / "c", model), model, fresh.sequence)
    assert len(fresh.tokens) == 1000
    assert fresh.rewind(950) == 950
    assert (feed(fresh, 950, 1100) == truth[950:]).all()
    fresh.close()
    monkeypatch.setattr(localllm.loading.loader, "WINDOW_PAST", CONTEXT)
    with api.load(path, ctx_size=CONTEXT) as whole:  # a full KV cache, because the GGUF's windows are too small for it
        found = read_prompt_cache(tmp_path / "c", whole)
        assert found.problem == "its cache keeps a different window"


@pytest.mark.parametrize("rows", [128, 512])
def test_prompts_fit_even_if_no_block_is_spare(
    path: Path, truth: np.ndarray, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Simulates large states, for which only the required blocks are kept.
    monkeypatch.setattr(localllm.loading.loader, "WINDOW_PAST", 0)
    monkeypatch.setattr(localllm.loading.loader, "BATCH_ROWS", rows)
    with api.load(path, ctx_size=CONTEXT, threads=2) as opened:
        session = opened.session()
        logits = [session.evaluate(IDS[at : at + rows], logits=False)[0].copy() for at in range(0, len(IDS), rows)]
    ends = [*range(rows - 1, len(IDS), rows), len(IDS) - 1][: len(logits)]
    np.testing.assert_array_equal(np.stack(logits), truth[ends])
