"""The Python API as a person meets it: `help(localllm)`, answers to messages, and what a wrong value says."""

from __future__ import annotations

import pydoc
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import localllm
from localllm.conversation import Conversation, template_of
from localllm.options import AnswerOptions, SamplingOptions

GREEDY = SamplingOptions(temperature=0.0)


@pytest.fixture(scope="module")
def model() -> Iterator[localllm.Model]:
    with localllm.load("demo") as opened:
        yield opened


def text(pieces: Iterator[localllm.Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def test_help_shows_what_there_is() -> None:
    page = pydoc.plain(pydoc.render_doc(localllm))
    for shown in ("load(path", "chat(self, messages", "generate(self, prompt", "class Model(", "class LocalLLMError("):
        assert shown in page
    assert page.count("for piece in model.") >= 3


def test_chat_answers_as_a_conversation_does(model: localllm.Model) -> None:
    talk = Conversation(model, template_of(model)[0], GREEDY, pytest.fail, AnswerOptions(max_tokens=30))
    first = text(talk.say("Hello!"))
    second = text(talk.say("Tell me a story."))
    talk.close()
    assert text(model.chat("Hello!", max_tokens=30, temperature=0)) == first
    messages = [
        {"role": "user", "content": "Hello!"},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "Tell me a story."},
    ]
    assert text(model.chat(messages, max_tokens=30, sampling=GREEDY)) == second


def test_a_stop_that_is_one_text_is_not_taken_for_its_letters(model: localllm.Model) -> None:
    whole = text(model.chat("Hello!", max_tokens=30, temperature=0))
    end = whole[6:9]
    assert text(model.chat("Hello!", max_tokens=30, temperature=0, stop=end)) == whole[: whole.index(end)]
    assert text(model.generate("Once", max_tokens=9, temperature=0, stop="@#")) == text(
        model.generate("Once", max_tokens=9, temperature=0)
    )


def test_no_tokens_are_no_tokens(model: localllm.Model) -> None:
    assert text(model.generate("Once", max_tokens=0)) == ""


@pytest.mark.parametrize(
    ("ask", "told"),
    [
        (lambda m: m.generate([{"role": "user", "content": "x"}]), r"use model\.chat\(messages\)"),
        (lambda m: m.generate("x", max_tokens=-5), "max_tokens is -5: it must be a whole number from 0 up, or None"),
        (lambda m: m.generate("x", max_tokens=1.5), "max_tokens is 1.5"),
        (lambda m: m.generate("x", stop=["END", ""]), r"stop is \['END', ''\]: it must be a text, or several"),
        (lambda m: m.generate("x", stop=[1]), r"stop is \[1\]"),
        (lambda m: m.generate("x", top_p=3), "top_p is 3: it must be a number from 0 to 1"),
        (lambda m: m.chat([]), "chat answers messages such as"),
        (lambda m: m.chat(["Hello!"]), "chat answers messages such as"),
        (lambda m: m.chat([{"role": "boss", "content": "x"}]), "role 'boss' is unknown; supported: system"),
        (lambda m: m.chat("x" * 10_000_000), "the prompt has 100.* characters, the context of"),
    ],
)
def test_wrong_values_raise_at_once_and_say_what_to_do(
    ask: Callable[[localllm.Model], Any], told: str, model: localllm.Model
) -> None:
    with pytest.raises(localllm.LocalLLMError, match=told) as error:
        ask(model)
    assert "\n" not in str(error.value)


def test_what_is_changed_for_a_template_is_a_warning(model: localllm.Model) -> None:
    twice = [{"role": "user", "content": "Hello!"}, {"role": "user", "content": "Who are you?"}]
    source, _ = model.template
    del model.__dict__["template"]
    strict = "{% if messages | length > 1 %}{{ raise_exception('one!') }}{% endif %}" + source.source
    changed = dict(model.file.metadata) | {"tokenizer.chat_template": strict}
    kept, model.file.metadata = model.file.metadata, changed  # type: ignore[misc]
    try:
        with pytest.warns(UserWarning, match="messages of one role in a row were joined"):
            model.chat(twice)
    finally:
        del model.__dict__["template"]
        model.file.metadata = kept  # type: ignore[misc]


def test_closing_ends_the_templates_process() -> None:
    with localllm.load("demo") as opened:
        text(opened.chat("Hello!", max_tokens=1))
        confined = opened._confined
        assert confined is not None
        assert confined._child is not None
    assert confined._child is None
