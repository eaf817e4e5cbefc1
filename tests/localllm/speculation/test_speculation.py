"""Speculation on real models: the same pieces as without it, whatever is guessed, and a session that stays usable."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import localllm
from localllm.cli.terminal.answer import Roof, full_statistics
from localllm.generation.statistics import Speculated
from localllm.gguf import open_gguf, write_gguf
from localllm.options import OptionError, SamplingOptions
from localllm.sampling.sampler import Sampler
from localllm.session import Session
from localllm.speculation.policy import Costs
from localllm.speculation.rule import Guess
from localllm.speculation.speculator import Speculator
from tests.localllm.speculation.support import Clock, ToldDrafter, reckless
from tests.localllm.support import SPECIAL, write_model
from tests.localllm.support import localllm as cli

PROMPT = "Once upon a time there was a little bird. The little bird"
GREEDY = SamplingOptions(temperature=0)
REPEATING = SamplingOptions(temperature=0, repeat_penalty=1.2, dry_multiplier=0.5, presence_penalty=0.1)
END = SPECIAL.index("<|im_end|>")


@pytest.fixture(scope="module")
def demo() -> Iterator[localllm.Model]:
    with localllm.load("demo", ctx_size=160, threads=1) as model:
        yield model


@pytest.fixture(scope="module")
def again() -> Iterator[localllm.Model]:
    """The same with a cache of its own."""
    with localllm.load("demo", ctx_size=160, threads=1) as model:
        yield model


@pytest.fixture(scope="module")
def drafted() -> Iterator[localllm.Model]:
    with localllm.load("demo", ctx_size=160, threads=1, model_draft="draft", spec="draft") as model:
        yield model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[localllm.Model]:
    with localllm.load(write_model(tmp_path_factory.mktemp("m") / "m.gguf", context=96), threads=1) as model:
        yield model


def answer(session: Session, model: localllm.Model, options: SamplingOptions, prompt: Any, **more: Any) -> list[Any]:
    ids = model.tokenize(prompt) if isinstance(prompt, str) else prompt
    return list(session.generate(ids, model.sampler(options), **more))


def seen(pieces: list[Any]) -> tuple[Any, ...]:
    """All that a reader sees of an answer."""
    last = pieces[-1].statistics
    return [(piece.text, piece.token) for piece in pieces], last.reason, last.answer_tokens, last.decode_steps


def guessing(model: localllm.Model, speculator: Speculator | None) -> Session:
    session = model.session()
    session._speculator = speculator
    return session


def believing(model: localllm.Model) -> Session:
    """A session with the model's own draft, every guess of which is checked."""
    assert model.speculation is not None
    session = model.session()
    assert session._speculator is not None
    drafter = session._speculator.draftings[-1].drafter
    session._speculator = reckless(drafter)
    return session


# What is guessed after a text, given what the model itself will say.
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


def hostile(kind: str, truth: list[int], size: int) -> Speculator:
    return reckless(ToldDrafter(lambda text, _: Guess(HOSTILE[kind](text, truth, size), 0, None), Clock()))


# -- the same answer -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [GREEDY, REPEATING], ids=["greedy", "greedy with penalties"])
@pytest.mark.parametrize("kind", ["its draft", *HOSTILE])
def test_greedy_answers_are_the_same(
    demo: localllm.Model, again: localllm.Model, drafted: localllm.Model, kind: str, options: SamplingOptions
) -> None:
    """To the bit: every logit that a token was chosen by is the same, or the texts would part."""
    plain = demo.session()
    expected = seen(answer(plain, demo, options, PROMPT, max_tokens=120))
    model = drafted if kind == "its draft" else again
    truth = demo.tokenize(PROMPT) + [token for _, token in expected[0] if token is not None]
    session = believing(drafted) if kind == "its draft" else guessing(again, hostile(kind, truth, demo.vocabulary))
    assert seen(answer(session, model, options, PROMPT, max_tokens=120)) == expected
    assert session.tokens == plain.tokens
    plain.close()
    session.close()


def test_logits_of_a_checked_row_are_those_of_a_single_one(demo: localllm.Model) -> None:
    ids = demo.tokenize(PROMPT)
    session = demo.session()
    session.evaluate(ids[:4], logits=False)
    together = session.evaluate(ids[4:12], logits=True).copy()
    session.rewind(4)
    alone = np.concatenate([session.evaluate([token], logits=False).copy() for token in ids[4:12]])
    session.close()
    assert (together == alone).all()


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_certain_guess_leaves_the_dice_alone(demo: localllm.Model, again: localllm.Model, kind: str) -> None:
    """At a temperature too, n-grams and their like do not change what a seed gives."""
    options = SamplingOptions(seed=3, xtc_probability=0.3, repeat_penalty=1.1)
    plain = demo.session()
    expected = seen(answer(plain, demo, options, PROMPT, max_tokens=60))
    truth = demo.tokenize(PROMPT) + [token for _, token in expected[0] if token is not None]
    session = guessing(again, hostile(kind, truth, demo.vocabulary))
    assert seen(answer(session, again, options, PROMPT, max_tokens=60)) == expected
    plain.close()
    session.close()


@pytest.mark.parametrize("kind", ["its draft", "always right", "right, then wrong"])
def test_however_an_answer_ends_it_ends_the_same(
    demo: localllm.Model, again: localllm.Model, drafted: localllm.Model, kind: str
) -> None:
    """By any number of tokens, a stop string, the end of the context, the model's own end, a reader who leaves."""
    ids = demo.tokenize(PROMPT)
    plain = demo.session()
    whole = answer(plain, demo, GREEDY, ids, max_tokens=300, ignore_eos=True)
    truth = ids + [piece.token for piece in whole if piece.token is not None]
    text = "".join(piece.text for piece in whole)
    model = drafted if kind == "its draft" else again
    session = believing(drafted) if kind == "its draft" else guessing(again, hostile(kind, truth, demo.vocabulary))
    assert whole[-1].statistics.reason == "context"
    endings: list[dict[str, Any]] = [{"max_tokens": n} for n in (0, 1, 2, 3, 5, 17, 18)]
    endings += [{"stop": (text[at : at + 5],)} for at in (0, 30, 100)] + [{"stop": ("never",)}, {}]
    for more in endings:
        expected = seen(answer(plain, demo, GREEDY, ids, ignore_eos=more != {}, **more))
        assert seen(answer(session, model, GREEDY, ids, ignore_eos=more != {}, **more)) == expected, more
        assert session.tokens == plain.tokens, more
    for leave_after in (1, 2, 7):
        for each, owner in ((plain, demo), (session, model)):
            pieces = each.generate(ids, owner.sampler(GREEDY))
            for _ in range(leave_after):
                next(pieces)
            pieces.close()  # type: ignore[attr-defined]
        assert session.tokens == plain.tokens
    plain.close()
    session.close()
    assert model.pool.free_blocks == model.pool.blocks


def test_an_answer_is_cancelled_at_once(drafted: localllm.Model) -> None:
    """After the token that was being read, though more were checked already."""
    session, cancel = believing(drafted), threading.Event()
    pieces = []
    for piece in session.generate(drafted.tokenize(PROMPT), drafted.sampler(GREEDY), cancel=cancel, ignore_eos=True):
        pieces.append(piece)
        if len(pieces) == 5:
            cancel.set()
    assert (len(pieces), pieces[-1].statistics.reason) == (6, "cancelled")
    assert session.tokens == [*drafted.tokenize(PROMPT), *(piece.token for piece in pieces[:5])]
    session.close()


def test_an_end_that_was_guessed_ends_the_answer(tiny: localllm.Model) -> None:
    """A model that always ends: its end token is accepted out of a pass, and nothing after it is shown."""
    options = SamplingOptions(temperature=0, logit_bias={END: 50.0})
    session = guessing(tiny, hostile("the end of the answer", [], tiny.vocabulary))
    pieces = answer(session, tiny, options, [1, 70])
    assert seen(pieces) == ([("", None)], "end", 0, 0)
    session.close()


def test_turns_go_on_from_what_the_cache_holds(drafted: localllm.Model, demo: localllm.Model) -> None:
    """Three turns, the second from the middle of the first: draft and model both go back to where the text parts."""
    session, plain = believing(drafted), demo.session()
    prompt = demo.tokenize(PROMPT)
    for cut in (None, 12, None):
        expected = answer(plain, demo, GREEDY, prompt, max_tokens=20)
        found = answer(session, drafted, GREEDY, prompt, max_tokens=20)
        assert seen(found) == seen(expected)
        assert found[-1].statistics.reused_tokens == expected[-1].statistics.reused_tokens
        prompt = [*prompt, *(piece.token for piece in expected if piece.token is not None)][:cut]
        prompt += [500, 501]
    session.close()
    plain.close()


# -- drafts that are not what they should be -----------------------------------------------------------------------


def test_a_draft_of_another_vocabulary(tmp_path: Path, demo: localllm.Model) -> None:
    """Bytes and letters of the one are tokens of the other: slow, but right."""
    path = write_model(tmp_path / "m.gguf", context=256)
    with localllm.load("demo", ctx_size=128, threads=1, model_draft=path, spec="draft") as model:
        session = believing(model)
        plain = demo.session()
        assert (
            seen(answer(session, model, GREEDY, PROMPT, max_tokens=40))[0]
            == seen(answer(plain, demo, GREEDY, PROMPT, max_tokens=40))[0]
        )
        plain.close()
        session.close()


def test_a_damaged_draft_guesses_nothing(drafted: localllm.Model, demo: localllm.Model) -> None:
    """Logits that are no numbers."""
    session, plain = believing(drafted), demo.session()
    assert session._speculator is not None
    drafter: Any = session._speculator.draftings[0].drafter
    evaluate = drafter._evaluate
    drafter._evaluate = lambda tokens: evaluate(tokens) * np.float32("nan")
    for options in (GREEDY, SamplingOptions(seed=1)):
        found = answer(session, drafted, options, PROMPT, max_tokens=20)
        assert seen(found) == seen(answer(plain, demo, options, PROMPT, max_tokens=20))
        assert found[-1].statistics.speculation.drafted == 0
    session.close()
    plain.close()


def test_a_draft_whose_context_is_full_guesses_nothing(demo: localllm.Model) -> None:
    with localllm.load("demo", ctx_size=128, threads=1, model_draft="draft", spec="draft") as model:
        assert model.draft is not None
        model.draft.engine.limits = replace(model.draft.engine.limits, positions=24)
        session, plain = believing(model), demo.session()
        found = answer(session, model, GREEDY, PROMPT, max_tokens=40)
        assert seen(found) == seen(answer(plain, demo, GREEDY, PROMPT, max_tokens=40))
        assert found[-1].statistics.speculation.drafted > 0
        session.close()
        plain.close()


# -- options and statistics ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"spec": "draft"}, "requires one"),
        ({"spec": "ngram", "model_draft": "draft"}, "ngram does not use it"),
        ({"spec": "maybe"}, "off, ngram, draft, auto"),
        ({"spec": "ngram", "draft_max": 0}, "at least 1"),
    ],
)
def test_options_that_contradict(options: dict[str, Any], says: str) -> None:
    with pytest.raises(OptionError, match=says):
        localllm.load("demo", **options)


def test_more_drafted_tokens_than_a_pass_takes_are_clamped_with_a_note() -> None:
    """16 is llama-server's default, which its users write out."""
    with pytest.warns(UserWarning, match="draft_max=16: at most 15 tokens are drafted"):
        model = localllm.load("demo", ctx_size=64, spec="ngram", draft_max=16)
    with model:
        speculator = model.session()._speculator
        assert speculator is not None
        assert speculator.longest == 15


@pytest.mark.parametrize(("kind", "drafts"), [(None, False), ("draft", True)])
def test_a_model_as_its_own_draft_is_noted(kind: str | None, drafts: bool) -> None:
    with pytest.warns(UserWarning, match="it is the model itself") as told:
        model = localllm.load("demo", ctx_size=64, model_draft="demo", spec=kind)
    with model:
        assert len(told) == 1
        assert (model.draft is not None) is drafts


def test_nothing_guesses_unless_it_is_asked_to(demo: localllm.Model) -> None:
    assert demo.speculation is None
    with localllm.load("demo", ctx_size=64, spec="off", model_draft="draft") as model:
        assert model.speculation is None


@pytest.mark.parametrize(("kind", "names"), [("draft", ["draft model"]), ("auto", ["n-grams", "draft model"])])
def test_who_guesses(kind: str, names: list[str]) -> None:
    with localllm.load("demo", ctx_size=64, spec=kind, model_draft="draft", draft_max=4) as model:
        assert model.speculation is not None
        model.speculation.costs = Costs({1: 0.02, 16: 0.02})
        speculator = model.speculation.speculator()
        assert speculator is not None
        assert [drafting.drafter.name for drafting in speculator.draftings] == names
        assert speculator.longest == 4
        speculator.close()


def test_auto_leaves_a_model_alone_whose_passes_are_shorter_than_guessing() -> None:
    with localllm.load("demo", ctx_size=64, model_draft="draft") as model:
        assert model.speculation is not None
        model.speculation.costs = Costs({1: 0.0001, 16: 0.001})
        assert model.session()._speculator is None


def test_statistics_count_what_was_guessed(demo: localllm.Model, again: localllm.Model) -> None:
    ids = demo.tokenize(PROMPT)
    plain = demo.session()
    truth = ids + [piece.token for piece in answer(plain, demo, GREEDY, ids, max_tokens=33) if piece.token is not None]
    plain.close()
    session = guessing(again, hostile("always right", truth, demo.vocabulary))
    statistics = answer(session, again, GREEDY, ids, max_tokens=33)[-1].statistics
    done = statistics.speculation
    assert (done.drafted, done.accepted, done.rounds) == (30, 30, 2)  # 32 tokens after the first: 16 and 16
    assert (statistics.decode_steps, statistics.decode_passes) == (32, 2)
    assert done.mean_accepted == 15
    assert statistics.speedup == pytest.approx(32 / statistics.decode_seconds)  # a pass of one row takes a second here
    session.close()


def test_statistics_of_two_parts_add_up() -> None:
    parts = Speculated(3, 1, 2, 0.5), Speculated(2, 2, 1, 0.25)
    assert parts[0].and_then(parts[1]) == Speculated(5, 3, 3, 0.75)
    assert parts[0].and_then(None) == parts[0]
    assert Speculated(0, 0, 0, 0.0).mean_accepted == 0


def test_a_draft_model_guesses_what_it_would_say(drafted: localllm.Model) -> None:
    """Against the draft asked alone; and again after a guess was taken back."""
    assert drafted.speculation is not None
    draft = drafted.draft
    assert draft is not None
    ids = drafted.tokenize(PROMPT)
    expected = [piece.token for piece in draft.generate(ids, temperature=0, max_tokens=6)][:6]
    speculator = drafted.speculation.speculator()
    assert speculator is not None
    drafter = speculator.draftings[-1].drafter
    sampler = Sampler(GREEDY)
    drafter.begin(ids)
    for _ in range(2):
        guesses = [guess.token for guess, _ in zip(drafter.propose(sampler), range(6), strict=False)]
        assert guesses == expected[:6]
    drafter.accept(expected[0])
    drafter.accept(600)
    other = draft.generate([*ids, expected[0], 600], temperature=0, max_tokens=3)
    assert [next(drafter.propose(sampler)).token] == [next(other).token]
    drafter.close()


def test_run_says_what_guessing_has_gained(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf")
    words = ("run", path, "hi", "-n", "40", "--temp", "0", "--ignore-eos", "-v", "--raw")
    plain, guessed = cli(*words), cli(*words, "--spec", "draft", "-md", path)
    assert (guessed.returncode, guessed.stdout) == (0, plain.stdout)
    assert "draft" not in plain.stderr
    assert "tokens drafted" in guessed.stderr or "drafted tokens" in guessed.stderr


def test_statistics_in_a_line() -> None:
    unknown = Roof(SimpleNamespace(executable=SimpleNamespace(read_bandwidth=lambda: 0.0)))  # type: ignore[arg-type]
    done = Speculated(drafted=20, accepted=15, rounds=6, plain_seconds=3.0)
    statistics = localllm.Statistics(1, 0, 0.1, 21, 1.5, 20, 0.1, 10**9, "length", decode_passes=6, speculation=done)
    line = full_statistics(statistics, unknown)
    assert "answer 21, 13 tokens/s | first token 0.10 s | 4.00 GB/s | " in line
    assert line.endswith("accepted 15 of 20 drafted tokens (2.5 a pass), estimated x2.00 of plain decoding")
    nothing = localllm.Statistics(1, 0, 0.1, 1, 0.0, 0, 0.1, 1, "end", speculation=Speculated(0, 0, 0, 0.0))
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
