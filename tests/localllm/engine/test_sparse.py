"""With sparse attention, the logits of a conversation are bitwise identical no matter how it was split into steps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import localllm as api
from localllm.saved.prompt_cache import read_prompt_cache, restore, save
from tests.models.kit import KIT

CONTEXT = 256
IDS = np.random.RandomState(3).randint(0, 128, 200).tolist()


MODELS = ["glm-dsa-8of40", "dots3note-8of40", "minimax-m3-3of10", "deepseek4-8of50", "qwen4exp-8of40"]


@pytest.fixture(scope="module", params=MODELS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return KIT[request.param].write(tmp_path_factory.mktemp("model") / "m.gguf")


@pytest.fixture(scope="module")
def model(path: Path) -> Iterator[api.Model]:
    with api.load(path, ctx_size=CONTEXT, threads=2) as opened:
        yield opened


@pytest.fixture(scope="module")
def truth(path: Path) -> np.ndarray:
    """Return the float32 logits (200, vocabulary) of one batch on one thread."""
    with api.load(path, ctx_size=CONTEXT, threads=1) as whole:
        return whole.logits(IDS)


def feed(session: api.Session, start: int, stop: int, size: int = 64) -> np.ndarray:
    parts = [session.evaluate(IDS[at : min(at + size, stop)], logits=True).copy() for at in range(start, stop, size)]
    return np.concatenate(parts)


def test_the_layers_hold_index_keys_and_read_a_selection(model: api.Model) -> None:
    assert any(layer.value_dim == 0 for layer in model.plan.attention_layers)
    selected = {layer.selected for layer in model.plan.attention_layers if layer.selected}
    assert selected
    assert max(selected) == model.executable.memory.selected < len(IDS)
    memory = model.executable.memory
    deep = memory.read_after(200) - memory.read_after(100)  # reads of indexer keys, and of layers with full attention
    assert deep == 100 * memory.cache_per_token


def test_prompts_decoding_and_guesses_that_did_not_stand(model: api.Model, truth: np.ndarray) -> None:
    session = model.session()
    assert (feed(session, 0, 150, 37) == truth[:150]).all()
    assert (feed(session, 150, 200, 1) == truth[150:]).all()
    for back in (1, 9, 64, 130):
        assert session.rewind(200 - back) == 200 - back
        session.evaluate([1] * 5, logits=True)
        session.rewind(200 - back)
        assert (feed(session, 200 - back, 200, 6) == truth[-back:]).all()
    session.close()


def test_forks_and_neighbours(model: api.Model, truth: np.ndarray) -> None:
    session, other, third = model.session(), model.session(), model.session()
    feed(session, 0, 90)
    other.sequence = model.engine.fork(session.sequence)
    third.evaluate(IDS[:30], logits=False)
    other.evaluate(IDS[:20], logits=False)
    assert (feed(session, 90, 120) == truth[90:120]).all()
    assert other.rewind(90) == 90
    assert (feed(other, 90, 110, 3) == truth[90:110]).all()
    for each in (session, other, third):
        each.close()


def test_a_file_holds_index_keys_too(model: api.Model, truth: np.ndarray, tmp_path: Path) -> None:
    session = model.session()
    feed(session, 0, 140)
    save(tmp_path / "c", model, session.sequence, [])
    session.close()
    fresh = model.session()
    restore(read_prompt_cache(tmp_path / "c", model), model, fresh.sequence)
    assert len(fresh.tokens) == 140
    assert (feed(fresh, 140, 200, 7) == truth[140:]).all()
    fresh.close()
