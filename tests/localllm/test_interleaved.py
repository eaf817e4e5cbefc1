"""Several answers at a time on one `Model`: interleaved they are exact, and a second thread gets one clear error."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import localllm
from localllm.backends.base import BackendError
from localllm.errors import LocalLLMError
from localllm.generation.exclusive import ModelBusy
from tests.localllm.diffusion.test_diffusion import write_diffusion
from tests.localllm.speculation.support import eager
from tests.localllm.support import write_model
from tests.localllm.test_embedding import write_embedder
from tests.models.kit import KIT

PROMPTS = (
    "Once upon a time there was a little bird. The little bird",
    "the cat sat on the mat. the cat sat on",
    "a b a b",
)
CACHES = ("f16", "f32", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "fp8")
SOURCES: dict[str, dict[str, Any]] = {  # of drafts
    "none": {},
    "n-grams": {"spec": "ngram"},
    "draft model": {"spec": "draft", "model_draft": "draft"},
    "both": {"spec": "auto", "model_draft": "draft"},
}


class Asked(NamedTuple):
    """An answer: its prompt, and a seed, or None for the likeliest tokens."""

    prompt: int
    seed: int | None
    count: int

    def begin(self, model: localllm.Model, **more: Any) -> Iterator[localllm.Piece]:
        sampling = {"temperature": 0.0} if self.seed is None else {"temperature": 1.0, "seed": self.seed}
        prompt: Any = PROMPTS[self.prompt] if model.tokenizer is not None else KIT_PROMPTS[self.prompt]
        return model.generate(prompt, max_tokens=self.count, ignore_eos=True, **sampling, **more)


KIT_PROMPTS = ([5, 6, 7, 8, 5, 6, 7, 8, 5, 6], [40, 41, 40, 41, 40, 41, 40], [99, 3, 17, 99, 3])


def tokens(pieces: Iterator[localllm.Piece]) -> list[int]:
    return [piece.token for piece in pieces if piece.token is not None]


@pytest.fixture(scope="module", autouse=True)
def closing() -> Iterator[None]:
    yield
    for model in OPENED:
        model.close()
    opened.cache_clear()


OPENED: list[localllm.Model] = []


@cache
def opened(name: str, source: str, cache_type: str) -> localllm.Model:
    """The model in the box, or one of the kit; all drafts are verified."""
    with TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that drafts do not pay
        path = name if name == "demo" else KIT[name].write(Path(folder) / "m.gguf")
        types = {"cache_type_k": cache_type, "cache_type_v": cache_type, "any_cache": True}
        model = localllm.load(path, ctx_size=512, threads=1, **types, **SOURCES[source])  # type: ignore[arg-type]
    OPENED.append(model)
    if source != "none":
        eager(model)
    return model


@cache
def alone(name: str, source: str, cache_type: str, asked: Asked) -> list[int]:
    """The tokens of an answer that nothing interrupts; n-grams and greedy answers need no drafts for the same."""
    source = "draft model" if asked.seed is not None and source == "draft model" else "none"
    return tokens(asked.begin(opened(name, source, cache_type)))


ASKED = st.builds(Asked, st.integers(0, 2), st.sampled_from([None, 7]), st.integers(1, 24))


@settings(max_examples=40, deadline=None)
@given(
    model=st.one_of(
        st.tuples(st.just("demo"), st.just("none"), st.sampled_from(CACHES)),
        st.tuples(st.just("demo"), st.sampled_from(["n-grams", "draft model", "draft model"]), st.sampled_from(CACHES)),
        st.tuples(st.sampled_from(["gemma3-12", "qwen35-dense", "rwkv7"]), st.just("n-grams"), st.just("f16")),
    ),
    asked=st.lists(ASKED, min_size=2, max_size=4),
    order=st.lists(st.integers(0, 3), max_size=30),
    dropped=st.sets(st.integers(0, 3), max_size=1),
)
def test_interleaved_answers_are_those_alone(
    model: tuple[str, str, str], asked: list[Asked], order: list[int], dropped: set[int]
) -> None:
    """With every source of drafts, in every cache, in any order, and after an answer is dropped midway."""
    check(model, asked, order, dropped)


@settings(max_examples=10, deadline=None)
@given(
    asked=st.lists(st.builds(Asked, st.integers(0, 2), st.none(), st.integers(8, 24)), min_size=2, max_size=4),
    order=st.lists(st.integers(0, 3), max_size=30),
)
def test_two_drafters_at_once(asked: list[Asked], order: list[int]) -> None:
    check(("demo", "both", "f16"), asked, order, set())


def check(model: tuple[str, str, str], asked: list[Asked], order: list[int], dropped: set[int]) -> None:
    """Request pieces in this order, again and again until all answers have ended; `dropped` ones are closed midway."""
    shared = opened(*model)
    free = shared.engine.free_blocks
    running = {number: one.begin(shared) for number, one in enumerate(asked)}
    found: list[list[int]] = [[] for _ in asked]
    for number in cycle([*order, *range(len(asked))]):
        if number in running:
            piece = next(running[number])
            if piece.token is not None:
                found[number].append(piece.token)
            if piece.token is None or (number in dropped and len(found[number]) == 5):
                del running[number]
        if not running:
            break
    for number, one in enumerate(asked):
        assert found[number] == alone(*model, one)[: 5 if number in dropped else None]
    assert shared.engine.free_blocks == free


def test_both_answers_of_one_thread_go_on_from_row_to_row() -> None:
    """Every accepted draft of one answer is used after steps of the other."""
    model = opened("demo", "draft model", "f16")
    asked = [Asked(0, None, 40), Asked(1, None, 40)]
    pieces = list(zip(*[one.begin(model) for one in asked], strict=True))
    for number, one in enumerate(asked):
        assert [pair[number].token for pair in pieces[:-1]] == alone("demo", "none", "f16", one)
        statistics = pieces[-1][number].statistics
        assert statistics is not None
        assert statistics.decode_passes < 30  # of 40 tokens: drafts were accepted


# -- threads ---------------------------------------------------------------------------------------------------------


class Gate(threading.Event):
    """A cancel event that stops its answer inside the step of this piece, until `go_on` is set."""

    def __init__(self, piece: int) -> None:
        super().__init__()
        self.left = piece
        self.inside, self.go_on = threading.Event(), threading.Event()

    def is_set(self) -> bool:
        self.left -= 1
        if self.left == 0:
            self.inside.set()
            assert self.go_on.wait(60)
        return False


@contextmanager
def stopped_inside(model: localllm.Model, asked: Asked) -> Iterator[list[Any]]:
    """Inside the block another thread is within a step of an answer. Its tokens are in the list after the block."""
    gate, found = Gate(5), list[Any]()

    def work() -> None:
        try:
            found.append(tokens(asked.begin(model, cancel=gate)))
        except (LocalLLMError, BackendError) as error:
            found.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    assert gate.inside.wait(60)
    try:
        yield found
    finally:
        gate.go_on.set()
        thread.join()


USES: dict[str, Callable[[localllm.Model], object]] = {
    "generate": lambda model: tokens(model.generate("Hello", max_tokens=3)),
    "chat": lambda model: tokens(model.chat("Hello", max_tokens=3)),
    "logits": lambda model: model.logits([1, 2, 3]),
}


@pytest.mark.parametrize("source", ["none", "draft model"])
@pytest.mark.parametrize("use", USES)
def test_a_second_thread_gets_one_error_and_the_first_its_tokens(use: str, source: str) -> None:
    model, asked = opened("demo", source, "f16"), Asked(0, None, 20)
    free = model.engine.free_blocks
    with stopped_inside(model, asked) as first, pytest.raises(ModelBusy, match="another thread is using this model"):
        USES[use](model)
    assert first == [alone("demo", "none", "f16", asked)]
    assert model.engine.free_blocks == free
    USES[use](model)


@contextmanager
def used_elsewhere(model: localllm.Model) -> Iterator[None]:
    """Inside the block another thread is in the engine."""
    inside, leave = threading.Event(), threading.Event()

    def work() -> None:
        with model.engine.alone:
            inside.set()
            assert leave.wait(60)

    thread = threading.Thread(target=work)
    thread.start()
    assert inside.wait(60)
    try:
        yield
    finally:
        leave.set()
        thread.join()


OTHER_USES: dict[str, Callable[[localllm.Model], object]] = {
    "embed": lambda model: model.embed(["a cat", "dogs"]),
    "embed one by one": lambda model: model.embed("a cat"),
    "token_embeddings": lambda model: model.token_embeddings("a cat"),
    "rank": lambda model: model.rank("a cat", ["dogs", "cats"]),
    "diffuse": lambda model: list(model.diffuse("Fill this", max_tokens=8)),
    "session": lambda model: model.session().evaluate([1, 2], logits=False),
}


@pytest.mark.parametrize("use", OTHER_USES)
def test_every_use_of_the_engine_is_refused(use: str, tmp_path: Path) -> None:
    if use == "session":
        path = write_model(tmp_path / "model.gguf")
    elif use == "diffuse":
        path = write_diffusion(tmp_path / "model.gguf", "dream")
    else:
        path = write_embedder(tmp_path / "model.gguf", "bert-rank")
    with localllm.load(path, threads=1, ctx_size=64) as model:
        free = model.engine.free_blocks
        with used_elsewhere(model), pytest.raises(ModelBusy):
            OTHER_USES[use](model)
        assert model.engine.free_blocks == free
        OTHER_USES[use](model)


def test_tokenizing_goes_on_in_other_threads() -> None:
    model = opened("demo", "none", "f16")
    expected = model.tokenize("a text")
    with stopped_inside(model, Asked(0, None, 8)):
        assert model.tokenize("a text") == expected
        assert model.detokenize(expected) == "a text"


def test_a_refused_answer_and_a_dropped_one_give_their_blocks_back() -> None:
    """Though they end while another thread is inside; the blocks are free when it leaves."""
    model, asked = opened("demo", "draft model", "f16"), Asked(1, None, 20)
    free = model.engine.free_blocks
    dropped, refused = Asked(0, None, 20).begin(model), Asked(2, None, 20).begin(model)
    next(dropped)
    next(refused)
    with stopped_inside(model, asked) as first:
        del dropped
        with pytest.raises(ModelBusy):
            next(refused)
        with pytest.raises(StopIteration):
            next(refused)
    assert first == [alone("demo", "none", "f16", asked)]
    assert model.engine.free_blocks == free


def test_closing_waits_for_the_step_of_another_thread() -> None:
    model = localllm.load("demo", ctx_size=256, threads=1)
    with stopped_inside(model, Asked(0, None, 20)) as first:
        model.close()
    assert "closed" in str(first[0])


def test_threads_may_take_turns() -> None:
    """Two answers in two threads, one step after the other."""
    model = opened("demo", "draft model", "f16")
    turns = [threading.Semaphore(1), threading.Semaphore(0)]
    asked, found = [Asked(0, None, 20), Asked(1, 7, 20)], [list[int](), list[int]()]

    def work(number: int) -> None:
        pieces = asked[number].begin(model)
        for _ in range(21):
            assert turns[number].acquire(timeout=60)
            piece = next(pieces)
            if piece.token is not None:
                found[number].append(piece.token)
            turns[1 - number].release()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [alone("demo", "draft model", "f16", one) for one in asked]


@pytest.mark.parametrize("source", ["none", "draft model"])
def test_many_threads_get_exact_tokens_or_the_error(source: str) -> None:
    model = opened("demo", source, "f16")
    asked = [Asked(number % 3, None, 24) for number in range(4)]
    expected = [alone("demo", "none", "f16", one) for one in asked]
    free, right = model.engine.free_blocks, 0
    for _ in range(5):
        found: list[Any] = [None] * len(asked)
        start = threading.Barrier(len(asked))

        def work(number: int, found: list[Any] = found, start: threading.Barrier = start) -> None:
            start.wait()
            try:
                found[number] = tokens(asked[number].begin(model))
            except ModelBusy as error:
                found[number] = error

        threads = [threading.Thread(target=work, args=(number,)) for number in range(len(asked))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for answer, own in zip(found, expected, strict=True):
            assert isinstance(answer, ModelBusy) or answer == own
        right += sum(answer == own for answer, own in zip(found, expected, strict=True))
    assert right >= 5  # one of each round at least
    assert model.engine.free_blocks == free
