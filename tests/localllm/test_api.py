"""The Python API as a person meets it: `help(localllm)`, answers to messages, and what a wrong value says."""

from __future__ import annotations

import inspect
import pydoc
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import localllm
from localllm.conversation import Conversation, template_of
from localllm.gguf import NewTensor, write_gguf
from localllm.models import ModelError
from localllm.options import AnswerOptions, LoadOptions, Options, SamplingOptions, declared
from localllm.options.keywords import CHAT_ONLY
from tests.localllm.support import REPOSITORY, write_model
from tests.test_notices import flags_in

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


@pytest.mark.parametrize(
    ("function", "groups", "left_out"),
    [
        (localllm.load, (LoadOptions,), ()),
        (localllm.Model.chat, (AnswerOptions, SamplingOptions), ()),
        (localllm.Model.generate, (AnswerOptions, SamplingOptions), CHAT_ONLY),
    ],
)
def test_help_shows_every_option_with_type_default_and_what_it_does(
    function: Callable[..., Any], groups: tuple[type[Options], ...], left_out: tuple[str, ...]
) -> None:
    page = pydoc.plain(pydoc.render_doc(function))
    parameters = inspect.signature(function).parameters
    options = [each for group in groups for each in declared(group)]
    assert [each.name for each in options if each.name not in parameters] == list(left_out)
    for each in options:
        if each.name not in left_out:
            assert f"\n        {each.name}: {each.type} = {each.default!r}" in page
            assert f"\n            {each.option.help}" in page
            assert parameters[each.name].default == each.default
    assert not any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    assert flags_in(page) == set()


def test_an_unknown_option_is_an_error_that_names_the_nearest(model: localllm.Model) -> None:
    with pytest.raises(localllm.LocalLLMError, match=r"unknown option ctx; did you mean ctx_size\?"):
        localllm.load("demo", ctx=5)  # type: ignore[call-arg]
    with pytest.raises(localllm.LocalLLMError, match="expected LoadOptions, got 'cpu'; give single options by keyword"):
        localllm.load("demo", "cpu")  # type: ignore[arg-type]
    with pytest.raises(localllm.LocalLLMError, match=r"unknown option temp; did you mean temperature\?"):
        model.generate("x", temp=0.5)  # type: ignore[call-arg]
    with pytest.raises(localllm.LocalLLMError, match="unknown option system_prompt"):
        model.generate("x", system_prompt="Be brief.")  # type: ignore[call-arg]
    with pytest.raises(localllm.LocalLLMError, match="generate takes no system_prompt"):
        model.generate("x", AnswerOptions(system_prompt="Be brief."))


def test_options_come_as_a_value_by_keyword_or_both() -> None:
    options = LoadOptions(ctx_size=100, threads=1)
    with localllm.load("demo", options, ctx_size=50) as small, localllm.load("demo", options) as large:
        assert (small.context, large.context) == (50, 100)


def test_options_of_a_chat_reach_it(model: localllm.Model) -> None:
    def length(messages: Any, **options: Any) -> int:
        last = list(model.chat(messages, max_tokens=1, **options))[-1]
        assert last.statistics is not None
        return last.statistics.prompt_tokens

    told = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello!"}]
    assert length("Hello!", system_prompt="Be brief.") == length(told) > length("Hello!")
    words = model.tokenizer
    assert words is not None
    end = max(words.eog)
    bias = {end: 1e6}
    assert text(model.chat("Hello!", max_tokens=4, temperature=0, logit_bias=bias)) == ""
    pieces = list(model.chat("Hello!", max_tokens=4, temperature=0, logit_bias=bias, ignore_eos=True))
    assert [piece.token for piece in pieces[:-1]] == [end] * 4
    assert length(words.text(end), parse_special_in_content=True) < length(words.text(end))


def test_variables_of_the_chat_template_count(tmp_path: Path) -> None:
    template = "{{ mood }}{% for m in messages %}{{ m.content }}{% endfor %}"
    counts = []
    with localllm.load(write_model(tmp_path / "m.gguf", template=template), threads=1) as tiny:
        for variables in ({}, {"mood": "12345"}):
            last = list(tiny.chat("Hello!", max_tokens=1, chat_template_kwargs=variables))[-1]
            assert last.statistics is not None
            counts.append(last.statistics.prompt_tokens)
    assert counts[1] == counts[0] + 5


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
        (lambda m: m.generate(3), r"use model\.chat\(messages\)"),
        (
            lambda m: m.logits("Hello"),
            r"expected token ids, got 'Hello'; model\.tokenize\(text\) gives those of a text",
        ),
        (lambda m: m.logits(3), "expected token ids, got 3"),
        (lambda m: m.logits([1, 1.5]), "1.5 is not a token id"),
        (lambda m: m.tokenize(3), "tokenize expects a text, got 3"),
        (lambda m: m.detokenize("x"), "expected token ids, got 'x'"),
        (lambda m: m.chat(3), "chat answers messages such as"),
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


def test_formats_convert_as_the_documentation_says() -> None:
    """In a process that has imported nothing else."""
    program = (
        "import localllm, numpy as np; values = np.ones((1, 32), np.float32);"
        "rows = localllm.quant.quantize(values, 'Q4_0'); print(localllm.quant.dequantize(rows, 'Q4_0').sum())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=REPOSITORY)
    assert (done.stdout, done.stderr) == ("32.0\n", "")


def test_what_is_no_model_is_named_with_its_file(tmp_path: Path) -> None:
    numbers = {"in_sum2": np.ones((1, 4), np.float32), "counts": np.ones((1, 1), np.float32)}
    tensors = [NewTensor(f"x.weight.{name}", "F32", value.shape, value.tobytes()) for name, value in numbers.items()]
    write_gguf(tmp_path / "i.gguf", {"general.type": "imatrix"}, tensors)
    write_gguf(tmp_path / "x.gguf", {"general.architecture": "lama"}, tensors)
    for name, told in (
        ("i", "an importance matrix, not a model"),
        ("x", "general.architecture: 'lama' is not supported"),
    ):
        with pytest.raises(ModelError, match=f"^{tmp_path}/{name}.gguf: {told}"):
            localllm.load(tmp_path / f"{name}.gguf")
