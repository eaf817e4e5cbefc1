"""Several answers at a time on one `Model`, interleaved or in threads. Each answer has the same tokens as
without the others.
"""

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
from localllm.base.errors import LocalLLMError
from localllm.generation.interfaces import SchedulerLimits
from localllm.options import SamplingOptions
from tests.localllm.diffusion.test_diffusion import write_diffusion
from tests.localllm.generation.speculation.support import eager
from tests.localllm.test_embedding import write_embedder
from tests.models.kit import KIT

PROMPTS = (
    "Once upon a time there was a little bird. The little bird",
    "the cat sat on the mat. the cat sat on",
    "a b a b",
)
CACHES = ("f16", "f32", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "fp8")
SOURCES: dict[str, dict[str, Any]] = {  # sources of drafts
    "none": {},
    "n-grams": {"spec": "ngram"},
    "draft model": {"spec": "draft", "model_draft": "draft"},
    "both": {"spec": "auto", "model_draft": "draft"},
}


class Asked(NamedTuple):
    """The prompt, length and seed of a request. A seed of None means greedy decoding."""

    prompt: int
    seed: int | None
    count: int

    def begin(self, model: localllm.Model, **more: Any) -> localllm.Reply:
        sampling = {"temperature": 0.0} if self.seed is None else {"temperature": 1.0, "seed": self.seed}
        prompt: Any = PROMPTS[self.prompt] if model.maybe_tokenizer is not None else KIT_PROMPTS[self.prompt]
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
    """Open the bundled model or a test model. All drafts are verified."""
    with TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the warning that drafts cost more time than they save
        path = name if name == "demo" else KIT[name].write(Path(folder) / "m.gguf")
        types = {"cache_type_k": cache_type, "cache_type_v": cache_type, "any_cache": True}
        model = localllm.load(path, ctx_size=512, threads=1, **types, **SOURCES[source])  # type: ignore[arg-type]
    OPENED.append(model)
    if source != "none":
        eager(model)
    return model


@cache
def alone(name: str, cache_type: str, asked: Asked) -> list[int]:
    """Return the tokens of an uninterrupted answer without drafts."""
    return tokens(asked.begin(opened(name, "none", cache_type)))


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
    """An interleaved answer has the tokens of the same answer alone: for every source of drafts and every KV
    cache type, in any reading order, and after another answer is closed midway.
    """
    check(model, asked, order, dropped)


@settings(max_examples=10, deadline=None)
@given(
    asked=st.lists(st.builds(Asked, st.integers(0, 2), st.none(), st.integers(8, 24)), min_size=2, max_size=4),
    order=st.lists(st.integers(0, 3), max_size=30),
)
def test_two_drafters_at_once(asked: list[Asked], order: list[int]) -> None:
    check(("demo", "both", "f16"), asked, order, set())


def check(model: tuple[str, str, str], asked: list[Asked], order: list[int], dropped: set[int]) -> None:
    """Read from the answers in this order, repeatedly, until all have ended. Close the `dropped` answers midway."""
    shared = opened(*model)
    free = all_free(shared)
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
        assert found[number] == alone(model[0], model[2], one)[: 5 if number in dropped else None]
    assert all_free(shared) == free


def all_free(model: localllm.Model) -> int:
    """Empty the prefix cache. Return the number of free blocks."""
    model.new_core(SchedulerLimits())
    return model.engine.free_blocks


def test_both_answers_of_one_thread_go_on_from_row_to_row() -> None:
    """Steps of one answer must not invalidate the drafts of the other."""
    model = opened("demo", "draft model", "f16")
    asked = [Asked(0, None, 40), Asked(1, None, 40)]
    replies = [one.begin(model) for one in asked]
    for _ in zip(*replies, strict=True):
        pass
    for reply, one in zip(replies, asked, strict=True):
        assert reply.tokens == alone("demo", "f16", one)
        assert reply.usage.decode_passes < 30  # for 40 tokens, so drafts were accepted


# -- threads ---------------------------------------------------------------------------------------------------------


@settings(max_examples=12, deadline=None)
@given(
    model=st.one_of(
        st.tuples(st.just("demo"), st.sampled_from(list(SOURCES)), st.sampled_from(CACHES)),
        st.tuples(st.sampled_from(["gemma3-12", "qwen35-dense", "rwkv7"]), st.just("n-grams"), st.just("f16")),
    ),
    asked=st.lists(ASKED, min_size=2, max_size=6),
)
def test_threads_get_the_tokens_of_alone(model: tuple[str, str, str], asked: list[Asked]) -> None:
    """Answers in threads have the same tokens as alone, with every source of drafts and every KV cache type, for greedy
    and seeded sampling.
    """
    shared = opened(*model)
    free = all_free(shared)
    assert in_threads(shared, asked) == [alone(model[0], model[2], one) for one in asked]
    assert all_free(shared) == free


def in_threads(model: localllm.Model, asked: list[Asked]) -> list[list[int]]:
    """Return the tokens of answers that start at the same time, each in its own thread."""
    found: list[list[int]] = [[] for _ in asked]
    start = threading.Barrier(len(asked))

    def work(number: int) -> None:
        start.wait(60)
        found[number] = tokens(asked[number].begin(model))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(asked))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    return found


class Watch:
    """Records the number of sequences in each step of an engine."""

    def __init__(self) -> None:
        self.together: list[int] = []

    @contextmanager
    def step(self, rows: Any) -> Iterator[None]:
        self.together.append(len(rows))
        yield


def test_threads_share_steps() -> None:
    model = opened("demo", "none", "f16")
    asked = [Asked(number % 3, None, 40) for number in range(4)]
    watch = Watch()
    model.engine.watch = watch
    try:
        found = in_threads(model, asked)
    finally:
        model.engine.watch = None
    assert found == [alone("demo", "f16", one) for one in asked]
    assert max(watch.together) > 1


class Gate(threading.Event):
    """A cancel event that blocks the answer within the step of one piece, until `go_on` is set."""

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
    """Within the block, another thread is inside a step of an answer. Afterwards the yielded list has the answer's
    tokens.
    """
    gate, found = Gate(5), list[Any]()

    def work() -> None:
        try:
            found.append(tokens(asked.begin(model, cancel=gate)))
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    assert gate.inside.wait(60)
    try:
        yield found
    finally:
        gate.go_on.set()
        thread.join(60)
        assert not thread.is_alive()


USES: dict[str, Callable[[localllm.Model], Any]] = {
    "generate": lambda model: tokens(model.generate("Hello", max_tokens=3, temperature=0)),
    "chat": lambda model: tokens(model.chat("Hello", max_tokens=3, temperature=0)),
    "logits": lambda model: model.logits([1, 2, 3]).tolist(),
}


@pytest.mark.parametrize("source", ["none", "draft model"])
@pytest.mark.parametrize("use", USES)
def test_a_second_thread_waits_for_the_step_of_the_first(use: str, source: str) -> None:
    model, asked = opened("demo", source, "f16"), Asked(0, None, 20)
    expected, free, found = USES[use](model), all_free(model), list[Any]()
    second = threading.Thread(target=lambda: found.append(USES[use](model)))
    with stopped_inside(model, asked) as first:
        second.start()
        second.join(0.2)
        assert found == []
    second.join(60)
    assert found == [expected]
    assert first == [alone("demo", "f16", asked)]
    assert all_free(model) == free


@contextmanager
def used_elsewhere(model: localllm.Model) -> Iterator[None]:
    """Within the block, another thread uses the engine."""
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
    "embed": lambda model: model.embed(["a cat", "dogs"]).tolist(),
    "embed one by one": lambda model: model.embed("a cat").tolist(),
    "token_embeddings": lambda model: model.token_embeddings("a cat").tolist(),
    "rank": lambda model: model.rank("a cat", ["dogs", "cats"]).tolist(),
    "diffuse": lambda model: [
        tuple(canvas.answer) for canvas in model.diffuse("Fill this", sampling=SamplingOptions(seed=1), max_tokens=8)
    ],
}


@pytest.mark.parametrize("use", OTHER_USES)
def test_every_use_of_the_engine_waits_for_another_thread(use: str, tmp_path: Path) -> None:
    if use == "diffuse":
        path = write_diffusion(tmp_path / "model.gguf", "dream")
    else:
        path = write_embedder(tmp_path / "model.gguf", "bert-rank")
    with localllm.load(path, threads=1, ctx_size=64) as model:
        expected, free, found = OTHER_USES[use](model), model.engine.free_blocks, list[Any]()
        second = threading.Thread(target=lambda: found.append(OTHER_USES[use](model)))
        with used_elsewhere(model):
            second.start()
            second.join(0.1)
            assert found == []
        second.join(60)
        assert found == [expected]
        assert model.engine.free_blocks == free


def test_tokenizing_goes_on_in_other_threads() -> None:
    model = opened("demo", "none", "f16")
    expected = model.tokenize("a text")
    with stopped_inside(model, Asked(0, None, 8)):
        assert model.tokenize("a text") == expected
        assert model.detokenize(expected) == "a text"


def test_an_answer_that_is_dropped_gives_its_blocks_back() -> None:
    """Another thread may be inside a step of the answer. The blocks of the answer are freed when that step ends."""
    model, asked = opened("demo", "draft model", "f16"), Asked(1, None, 20)
    free = all_free(model)
    dropped, closed = Asked(0, None, 20).begin(model), Asked(2, None, 20).begin(model)
    next(dropped)
    next(closed)
    with stopped_inside(model, asked) as first:
        del dropped
        closed.close()
        with pytest.raises(StopIteration):
            next(closed)
    assert first == [alone("demo", "f16", asked)]
    assert not model.stepper.core.running.active
    assert not model.stepper.core.running.waiting
    assert all_free(model) == free


@pytest.mark.parametrize("source", ["none", "draft model"])
def test_closing_waits_for_the_step_of_another_thread(source: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = localllm.load("demo", ctx_size=256, threads=1, **SOURCES[source])
    if source != "none":
        eager(model)
    with stopped_inside(model, Asked(0, None, 20)) as first:
        model.close()
    assert isinstance(first[0], LocalLLMError)
    assert "this model is closed" in str(first[0])
    with pytest.raises(LocalLLMError, match="closed"):
        model.generate("more")


def read_on(number: int, model: localllm.Model, found: list[Any], begun: threading.Barrier) -> None:
    """Read an answer. Store the text or the error in `found`."""
    reply = Asked(number, 7 if number else None, 400).begin(model)
    next(reply)
    begun.wait(60)
    try:
        found[number] = reply.text
    except Exception as error:
        found[number] = error


def test_closing_while_threads_read_gives_each_one_error() -> None:
    """Closing a model gives each reading thread one error, even between steps of the model and of the draft model."""
    for delay in (0.0, 0.002, 0.01, 0.03):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = localllm.load("demo", ctx_size=512, threads=1, **SOURCES["draft model"])
        eager(model)
        found: list[Any] = [None] * 3
        begun = threading.Barrier(4)

        threads = [threading.Thread(target=read_on, args=(number, model, found, begun)) for number in range(3)]
        for thread in threads:
            thread.start()
        begun.wait(60)
        threading.Event().wait(delay)
        model.close()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        for error in found:
            assert isinstance(error, LocalLLMError), error
            assert "this model is closed" in str(error)


def test_threads_may_take_turns() -> None:
    """Answers in two threads alternate, one step at a time."""
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
    assert found == [alone("demo", "f16", one) for one in asked]


@pytest.mark.parametrize("source", ["none", "draft model"])
def test_many_threads_get_exact_tokens(source: str) -> None:
    model = opened("demo", source, "f16")
    asked = [Asked(number % 3, (None, 7)[number % 2], 24) for number in range(4)]
    expected = [alone("demo", "f16", one) for one in asked]
    free = all_free(model)
    for _ in range(5):
        assert in_threads(model, asked) == expected
    assert all_free(model) == free
