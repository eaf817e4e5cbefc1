"""Speculative decoding on real models gives the same answers as plain decoding, for any drafts and any way to end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import localllm
from localllm.cli.terminal.answer import MeasuredRoof, full_statistics
from localllm.generation.interfaces import SchedulerLimits
from localllm.generation.speculation.policy import Costs
from localllm.generation.speculation.rule import DraftToken
from localllm.generation.statistics import Usage
from localllm.gguf import open_gguf, write_gguf
from localllm.options import OptionError
from tests.localllm.generation.speculation.support import Told, drafting_by, eager
from tests.localllm.support import SPECIAL, write_model
from tests.localllm.support import localllm as cli
from tests.models.kit import KIT

PROMPT = "Once upon a time there was a little bird. The little bird"
GREEDY: dict[str, Any] = {"temperature": 0.0}
END = SPECIAL.index("<|im_end|>")

OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "greedy with penalties": {
        "temperature": 0.0, "repeat_penalty": 1.2, "dry_multiplier": 0.5, "presence_penalty": 0.1
    },
    "temperature 0.8": {"temperature": 0.8, "seed": 3},
    "seeded with penalties": {"seed": 3, "xtc_probability": 0.3, "repeat_penalty": 1.1, "frequency_penalty": 0.2},
    "mirostat": {"seed": 3, "mirostat": 1},
    "mirostat 2": {"seed": 3, "mirostat": 2},
    "a grammar": {"temperature": 0.8, "seed": 3, "grammar": 'root ::= ([a-z]+ [ ,.])+'},
}  # fmt: skip


@pytest.fixture(scope="module")
def demo() -> Iterator[localllm.Model]:
    with localllm.load("demo", ctx_size=160, threads=1, spec="off") as model:
        yield model


@pytest.fixture(scope="module")
def drafted() -> Iterator[localllm.Model]:
    """Provide the bundled model with its draft model. All drafts are verified."""
    with localllm.load("demo", ctx_size=160, threads=1, model_draft="draft", spec="draft") as model:
        eager(model)
        yield model


@pytest.fixture(scope="module")
def repeating() -> Iterator[localllm.Model]:
    """Provide the bundled model with n-gram drafts. All drafts are verified."""
    with localllm.load("demo", ctx_size=160, threads=1, spec="ngram") as model:
        eager(model)
        yield model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[localllm.Model]:
    with localllm.load(write_model(tmp_path_factory.mktemp("m") / "m.gguf", context=96), threads=1) as model:
        yield model


def seen(reply: localllm.Reply) -> tuple[Any, ...]:
    """Return everything that a reader receives of an answer."""
    pieces = [(piece.text, piece.token) for piece in reply]
    return pieces, reply.end.reason, reply.end.stop, reply.usage.answer_tokens, reply.end.cached_tokens


# Functions that return the next draft token from the text, the model's continuation, and the vocabulary size.
HOSTILE: dict[str, Callable[[list[int], list[int], int], int]] = {
    "always wrong": lambda text, truth, size: (truth[len(text)] + 1) % size if len(text) < len(truth) else 0,
    "always right": lambda text, truth, size: truth[len(text)] if len(text) < len(truth) else 0,
    "right, then wrong": lambda text, truth, size: (
        truth[len(text)] if len(text) % 4 and len(text) < len(truth) else size - 1
    ),
    "the end of the answer": lambda text, truth, size: END,
    "the same again": lambda text, truth, size: text[-1],
    "anything": lambda text, truth, size: hash((len(text), text[-1], 7)) % size,
}


@contextmanager
def sources(kind: str, truth: list[int], demo: localllm.Model, drafted: localllm.Model) -> Iterator[localllm.Model]:
    """Provide a model with drafts of this kind. All drafts are verified."""
    if kind == "its draft":
        yield drafted
    else:
        size = demo.vocabulary
        with drafting_by(demo, Told(lambda text, _: DraftToken(HOSTILE[kind](text, truth, size), 0))) as model:
            yield model


# -- the same answer -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
@pytest.mark.parametrize("kind", ["its draft", *HOSTILE])
def test_answers_are_the_same(
    demo: localllm.Model, drafted: localllm.Model, kind: str, options: dict[str, Any]
) -> None:
    """The logits from which tokens are sampled are equal bit for bit. Otherwise the texts would diverge."""
    demo.new_core(SchedulerLimits())
    plain = demo.generate(PROMPT, max_tokens=100, **options)
    expected = seen(plain)
    truth = demo.tokenize(PROMPT) + plain.tokens
    with sources(kind, truth, demo, drafted) as model:
        model.new_core(SchedulerLimits())
        reply = model.generate(PROMPT, max_tokens=100, **options)
        assert seen(reply) == expected
        assert reply.usage.drafting
        if kind != "the end of the answer" or "grammar" not in options:  # a grammar forbids the end token until the end
            assert reply.usage.drafted > 0


@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
def test_n_grams_give_the_same_answers(
    demo: localllm.Model, repeating: localllm.Model, options: dict[str, Any]
) -> None:
    prompt = f"{PROMPT} sang. {PROMPT} sang. {PROMPT}"
    expected = demo.generate(prompt, max_tokens=80, **options)
    reply = repeating.generate(prompt, max_tokens=80, **options)
    assert reply.tokens == expected.tokens
    assert reply.text == expected.text
    if options is GREEDY:
        assert reply.usage.accepted > 0


@pytest.mark.parametrize("options", [OPTIONS["greedy"], OPTIONS["temperature 0.8"]], ids=["greedy", "seeded"])
def test_a_chat_is_the_same(
    demo: localllm.Model, drafted: localllm.Model, repeating: localllm.Model, options: dict[str, Any]
) -> None:
    expected = demo.chat("Tell me of a bird.", max_tokens=60, **options)
    for model in (drafted, repeating):
        reply = model.chat("Tell me of a bird.", max_tokens=60, **options)
        assert (reply.tokens, reply.text, reply.finish_reason) == (
            expected.tokens, expected.text, expected.finish_reason
        )  # fmt: skip


def test_logits_of_a_checked_row_are_those_of_a_single_one(demo: localllm.Model) -> None:
    ids = demo.tokenize(PROMPT)
    demo.new_core(SchedulerLimits())
    session = demo.session()
    session.evaluate(ids[:4], logits=False)
    together = session.evaluate(ids[4:12], logits=True).copy()
    session.rewind(4)
    alone = np.concatenate([session.evaluate([token], logits=False).copy() for token in ids[4:12]])
    session.close()
    assert (together == alone).all()


@pytest.mark.parametrize("kind", ["its draft", "always right", "right, then wrong"])
def test_however_an_answer_ends_it_ends_the_same(demo: localllm.Model, drafted: localllm.Model, kind: str) -> None:
    """An answer ends by the token limit, a stop string, a full context, the end token, or a reader who stops."""
    ids = demo.tokenize(PROMPT)
    whole = demo.generate(ids, max_tokens=300, ignore_eos=True, **GREEDY)
    assert whole.end.reason == "context"
    text = whole.text
    endings: list[dict[str, Any]] = [{"max_tokens": n} for n in (0, 1, 2, 3, 5, 17, 18)]
    endings += [{"stop": (text[at : at + 5],)} for at in (0, 30, 100)] + [{"stop": ("never",)}, {}]
    expected = [seen(demo.generate(ids, ignore_eos=more != {}, **GREEDY, **more)) for more in endings]
    with sources(kind, ids + whole.tokens, demo, drafted) as model:
        for more, wanted in zip(endings, expected, strict=True):
            assert seen(model.generate(ids, ignore_eos=more != {}, **GREEDY, **more)) == wanted, more
        for leave_after in (1, 2, 7):
            reply = model.generate(ids, ignore_eos=True, **GREEDY)
            for _ in range(leave_after):
                next(reply)
            reply.close()
            assert reply.tokens == whole.tokens[:leave_after]
        model.stepper.core.running.end(None)
        assert model.pool.free_blocks == model.pool.blocks
        assert model.draft is None or model.draft.pool.free_blocks == model.draft.pool.blocks


def test_a_cancelled_answer_has_what_was_verified(drafted: localllm.Model, demo: localllm.Model) -> None:
    """The answer has the tokens of the finished step and no more."""
    expected, cancel = demo.generate(PROMPT, ignore_eos=True, **GREEDY).tokens, threading.Event()
    reply = drafted.generate(PROMPT, cancel=cancel, ignore_eos=True, **GREEDY)
    for _ in range(5):
        next(reply)
    cancel.set()
    assert reply.end.reason == "cancelled"
    assert 5 <= len(reply.tokens) <= 5 + 16
    assert reply.tokens == expected[: len(reply.tokens)]


def test_an_end_that_was_guessed_ends_the_answer(tiny: localllm.Model) -> None:
    """The model generates its end token at once. A drafted end token is accepted, and later tokens are not shown."""
    with drafting_by(tiny, Told(lambda text, _: DraftToken(END, 0))) as model:
        reply = model.generate([1, 70], logit_bias={END: 50.0}, **GREEDY)
        assert (reply.tokens, reply.text, reply.end.reason) == ([], "", "end")


def test_turns_go_on_from_what_the_cache_holds(drafted: localllm.Model, demo: localllm.Model) -> None:
    """The second of three turns starts in the middle of the first. The draft model and the model both rewind to the
    divergence.
    """
    for model in (drafted, demo):
        model.new_core(SchedulerLimits())
    prompt = demo.tokenize(PROMPT)
    for cut in (None, 12, None):
        expected = demo.generate(prompt, max_tokens=20, **GREEDY)
        found = drafted.generate(prompt, max_tokens=20, **GREEDY)
        assert seen(found) == seen(expected)
        assert found.usage.reused_tokens == expected.usage.reused_tokens
        prompt = [*[*prompt, *expected.tokens][:cut], 500, 501]


# -- unsuitable drafts -----------------------------------------------------------------------------------------------


def test_a_draft_of_another_vocabulary(tmp_path: Path, demo: localllm.Model) -> None:
    """Each vocabulary has the other's bytes and letters as tokens. Drafting is slow but correct."""
    path = write_model(tmp_path / "m.gguf", context=256)
    with localllm.load("demo", ctx_size=128, threads=1, model_draft=path, spec="draft") as model:
        eager(model)
        for options in (GREEDY, OPTIONS["temperature 0.8"]):
            reply = model.generate(PROMPT, max_tokens=40, **options)
            assert reply.tokens == demo.generate(PROMPT, max_tokens=40, **options).tokens
            assert reply.usage.drafted > 0


def test_a_damaged_draft_guesses_nothing(demo: localllm.Model) -> None:
    """The logits of the draft model are NaN, so no drafts are proposed."""
    with localllm.load("demo", ctx_size=160, threads=1, model_draft="draft", spec="draft") as model:
        eager(model)
        assert model.draft is not None
        executable: Any = model.draft.executable
        step = executable.step
        executable.step = lambda batch: step(batch) * np.float32("nan")
        for options in (GREEDY, {"seed": 1}):
            found = model.generate(PROMPT, max_tokens=20, **options)
            assert found.tokens == demo.generate(PROMPT, max_tokens=20, **options).tokens
            assert found.usage.drafted == 0


def test_a_draft_whose_context_is_full_guesses_nothing(demo: localllm.Model) -> None:
    with localllm.load("demo", ctx_size=128, threads=1, model_draft="draft", spec="draft") as model:
        eager(model)
        assert model.draft is not None
        model.draft.engine.limits = replace(model.draft.engine.limits, positions=24)
        found = model.generate(PROMPT, max_tokens=40, **GREEDY)
        assert found.tokens == demo.generate(PROMPT, max_tokens=40, **GREEDY).tokens
        assert found.usage.drafted > 0


# -- options and usage -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"spec": "draft"}, "requires one"),
        ({"spec": "ngram", "model_draft": "draft"}, "ngram does not use it"),
        ({"spec": "maybe"}, "off, ngram, draft, mtp, auto"),
        ({"spec": "ngram", "draft_max": 0}, "at least 1"),
    ],
)
def test_options_that_contradict(options: dict[str, Any], says: str) -> None:
    with pytest.raises(OptionError, match=says):
        localllm.load("demo", **options)


def test_more_drafted_tokens_than_a_pass_takes_are_clamped_with_a_note() -> None:
    """Larger values are accepted because users may pass llama-server's default of 16 explicitly."""
    with pytest.warns(UserWarning, match="draft_max=16: at most 15 tokens are drafted"):
        model = localllm.load("demo", ctx_size=64, spec="ngram", draft_max=16)
    model.close()


@pytest.mark.parametrize(("kind", "drafts"), [(None, False), ("draft", True)])
def test_a_model_as_its_own_draft_is_noted(kind: str | None, drafts: bool) -> None:
    with pytest.warns(UserWarning, match="it is the model itself") as told:
        model = localllm.load("demo", ctx_size=64, model_draft="demo", spec=kind)
    with model:
        assert len(told) == 1
        assert (model.draft is not None) is drafts


def test_by_default_repetitions_are_drafted_and_costs_learned(demo: localllm.Model) -> None:
    """Nothing is measured when the model is loaded. Once passes turn out to be too short, drafting ends for good."""
    assert demo.speculation is None
    with localllm.load("demo", ctx_size=160, threads=1) as model:
        found = model.speculation
        assert found is not None
        assert not found.costs.known
        expected = demo.generate(PROMPT * 2, max_tokens=40, **GREEDY).tokens
        for seconds, drafting in ((0.02, True), (0.0001, False)):
            found.costs = Costs.unknown(16)
            model.draft_with(found)
            slow(model, seconds)
            reply = model.generate(PROMPT * 2, max_tokens=40, **GREEDY)
            assert reply.tokens == expected
            assert (model.stepper.core.running.drafts is not None) is drafting
            assert found.costs.seconds(1) == pytest.approx(seconds)
            assert not reply.usage.drafting or reply.usage.drafted
        assert found.drafts() is None
    with localllm.load("demo", ctx_size=64, spec="off", model_draft="draft") as model:
        assert model.speculation is None


def slow(model: localllm.Model, seconds: float) -> None:
    """Pretend that every pass takes `seconds`."""
    drafts = model.stepper.core.running.drafts
    assert drafts is not None
    observe = drafts.observe
    drafts.observe = lambda rows, prompt, took, of: observe(rows, prompt, seconds, of)  # type: ignore[method-assign]


@pytest.mark.parametrize("what", ["embeddings", "an encoder", "recurrent layers"])
def test_by_default_some_models_are_not_drafted_for(what: str, tmp_path: Path) -> None:
    given: dict[str, Any] = {"embeddings": True}
    path: str | Path = "demo"
    if what == "an encoder":
        path, given = KIT["t5-relu"].write(tmp_path / "m.gguf"), {}
    if what == "recurrent layers":
        path, given = KIT["qwen35-dense"].write(tmp_path / "m.gguf"), {}
    with localllm.load(path, threads=1, **given) as model:
        assert model.speculation is None


@pytest.mark.parametrize("longest", [2, 4])
def test_at_most_draft_max_tokens_are_drafted(longest: int) -> None:
    with localllm.load("demo", ctx_size=160, spec="draft", model_draft="draft", draft_max=longest) as model:
        eager(model)
        usage = model.generate(PROMPT, max_tokens=60, ignore_eos=True, **GREEDY).usage
        assert longest < usage.drafted <= longest * usage.rounds


def test_auto_leaves_a_model_alone_whose_passes_are_shorter_than_guessing() -> None:
    with localllm.load("demo", ctx_size=64, model_draft="draft") as model:
        assert model.speculation is not None
        model.speculation.costs = Costs({1: 0.0001, 16: 0.001})
        model.draft_with(model.speculation)
        assert not model.generate(PROMPT, max_tokens=20, **GREEDY).usage.drafting
        model.speculation.costs = Costs({1: 0.02, 16: 0.02})
        model.draft_with(model.speculation)
        assert model.generate(PROMPT, max_tokens=20, **GREEDY).usage.drafting


def test_drafts_may_change_while_an_answer_is_made(demo: localllm.Model) -> None:
    expected = demo.generate(PROMPT, max_tokens=60, **GREEDY).tokens
    with localllm.load("demo", ctx_size=160, threads=1, spec="ngram") as model:
        reply = model.generate(PROMPT, max_tokens=60, **GREEDY)
        for turn in range(4):
            for _ in range(10):
                next(reply)
            model.draft_with(None if turn % 2 else model.speculation)
        assert reply.tokens == expected


def test_usage_counts_what_was_guessed(demo: localllm.Model) -> None:
    ids = demo.tokenize(PROMPT)
    truth = ids + demo.generate(ids, max_tokens=33, **GREEDY).tokens
    right = HOSTILE["always right"]
    with drafting_by(demo, Told(lambda text, _: DraftToken(right(text, truth, demo.vocabulary), 0))) as model:
        usage = model.generate(ids, max_tokens=33, **GREEDY).usage
    # 32 tokens after the first, in two rounds of 16.
    assert (usage.drafted, usage.accepted, usage.rounds) == (30, 30, 2)
    assert (usage.decode_steps, usage.decode_passes) == (32, 2)
    assert usage.mean_accepted == 15
    # A forward pass of one token takes one second here by the engine's clock, and at least that in reality.
    assert usage.speedup >= 0.999 * 32 / usage.decode_seconds


def test_a_draft_model_guesses_what_it_would_say(demo: localllm.Model) -> None:
    """A model that is its own draft model is always right, also across turns."""
    with pytest.warns(UserWarning, match="it is the model itself"):
        model = localllm.load("demo", ctx_size=160, threads=1, model_draft="demo", spec="draft")
    with model:
        eager(model)
        ids = model.tokenize(PROMPT)
        for _ in range(3):
            reply = model.generate(ids, max_tokens=30, ignore_eos=True, **GREEDY)
            assert reply.tokens == demo.generate(ids, max_tokens=30, ignore_eos=True, **GREEDY).tokens
            assert reply.usage.accepted == reply.usage.drafted > 20
            ids = [*ids, *reply.tokens[:12], 500]


def test_run_says_what_guessing_has_gained(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf")
    words = ("run", path, "hi", "-n", "40", "--temp", "0", "--ignore-eos", "-v", "--raw")
    plain, guessed = cli(*words, "--spec", "off"), cli(*words, "--spec", "draft", "-md", path)
    assert (guessed.returncode, guessed.stdout) == (0, plain.stdout)
    assert "draft" not in plain.stderr
    assert "tokens drafted" in guessed.stderr or "drafted tokens" in guessed.stderr


def test_usage_in_a_line() -> None:
    unknown = MeasuredRoof(SimpleNamespace(executable=SimpleNamespace(read_bandwidth=lambda: 0.0)))  # type: ignore[arg-type]
    usage = Usage(
        prompt_tokens=1, prompt_seconds=0.1, first_token_seconds=0.1, answer_tokens=21, decode_seconds=1.5,
        decode_steps=20, decode_passes=6, bytes_per_step=10**9, drafting=True, drafted=20, accepted=15, rounds=6,
        plain_seconds=3.0,
    )  # fmt: skip
    line = full_statistics(usage, unknown)
    assert "answer 21, 13 tokens/s | first token 0.10 s | 4.00 GB/s | " in line
    assert line.endswith("accepted 15 of 20 drafted tokens (2.5 a pass), estimated x2.00 of plain decoding")
    nothing = Usage(prompt_tokens=1, answer_tokens=1, first_token_seconds=0.1, drafting=True)
    assert full_statistics(nothing, unknown).endswith("no tokens drafted")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("-md", "no.gguf"), "no.gguf"),
        (("--spec", "draft"), "-md FILE"),
        (("--spec", "ngram", "--draft-max", "0"), "at least 1"),
        (("-md", "vocabulary.gguf"), "no weights"),
    ],
)
def test_a_wrong_draft_is_one_line(tmp_path: Path, words: tuple[str, ...], says: str) -> None:
    model = write_model(tmp_path / "m.gguf")
    with open_gguf(model) as file:
        write_gguf(tmp_path / "vocabulary.gguf", dict(file.stored), [])
    given = [str(tmp_path / word) if word == "vocabulary.gguf" else word for word in words]
    done = cli("run", model, "hi", *given)
    assert (done.returncode, done.stdout) == (2 if words[-1] == "0" else 1, "")
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1
