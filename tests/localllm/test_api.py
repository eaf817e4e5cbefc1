"""The Python API as users see it: `help(localllm)`, answers to messages, and errors for wrong values."""

from __future__ import annotations

import asyncio
import inspect
import pydoc
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import localllm
from localllm.chat import Conversation, template_of
from localllm.gguf import NewTensor, write_gguf
from localllm.models import ModelError
from localllm.options import AnswerOptions, LoadOptions, Options, SamplingOptions, declared
from localllm.options.keywords import CHAT_ONLY
from localllm.template import ChatTemplate
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
    assert page.count("for piece in model.") >= 2
    assert page.count("print(model.chat(") >= 2


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
    with pytest.raises(localllm.LocalLLMError, match="expected LoadOptions, got 'cpu'; pass single options by keyword"):
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
        return model.chat(messages, max_tokens=1, **options).usage.prompt_tokens

    told = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello!"}]
    assert length("Hello!", system_prompt="Be brief.") == length(told) > length("Hello!")
    tokenizer = model.tokenizer
    assert tokenizer is not None
    end = max(tokenizer.eog)
    bias = {end: 1e6}
    assert text(model.chat("Hello!", max_tokens=4, temperature=0, logit_bias=bias)) == ""
    pieces = list(model.chat("Hello!", max_tokens=4, temperature=0, logit_bias=bias, ignore_eos=True))
    assert [piece.token for piece in pieces[:-1]] == [end] * 4
    assert length(tokenizer.text(end), parse_special_in_content=True) < length(tokenizer.text(end))


def test_variables_of_the_chat_template_count(tmp_path: Path) -> None:
    template = "{{ mood }}{% for m in messages %}{{ m.content }}{% endfor %}"
    counts = []
    with localllm.load(write_model(tmp_path / "m.gguf", template=template), threads=1) as tiny:
        for variables in ({}, {"mood": "12345"}):
            reply = tiny.chat("Hello!", max_tokens=1, chat_template_kwargs=variables)
            counts.append(reply.usage.prompt_tokens)
    assert counts[1] == counts[0] + 5


def test_chat_answers_as_a_conversation_does(model: localllm.Model) -> None:
    talk = Conversation(model, template_of(model)[0], GREEDY, pytest.fail, AnswerOptions(max_tokens=30))
    first = text(talk.say("Hello!"))
    second = text(talk.say("Tell me a story."))
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
        (lambda m: m.generate([[1, "a"]]), r"use model\.chat\(messages\)"),
        (lambda m: m.generate("x", logprobs=-1), "logprobs is -1; give a number of alternatives"),
        (lambda m: m.chat("x", logits_processor=3), "logits_processor must be a function"),
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
        with pytest.warns(UserWarning, match="adjacent messages of a role were joined"):
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
    """The documented import must work in a process that has imported nothing else."""
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


def test_a_model_lists_what_programs_use(model: localllm.Model) -> None:
    shown = [name for name in dir(model) if not name.startswith("_")]
    assert {"chat", "generate", "conversation", "tokenizer"} <= set(shown)
    assert all(hasattr(type(model), name) or name in vars(model) for name in shown)
    assert not {"pool", "engine", "maybe_tokenizer", "stepper", "new_core"} & set(shown)
    assert re.fullmatch(r"<Model .*demo\.gguf: llama, context 1024, cpu: .*>", repr(model))


def test_several_prompts_are_answered_together(model: localllm.Model) -> None:
    prompts = ["Once upon a time", "The dog", "A cat was"]
    replies = model.generate(prompts, max_tokens=20, seed=3)
    assert len(replies) == 3
    assert [reply.tokens for reply in replies] == [
        model.generate(prompt, max_tokens=20, seed=3).tokens for prompt in prompts
    ]
    ids = [model.tokenize(prompt) for prompt in prompts]
    assert [str(reply) for reply in model.generate(ids, max_tokens=20, seed=3)] == [str(reply) for reply in replies]
    with pytest.raises(localllm.LocalLLMError, match="the prompt has no tokens"):
        model.generate(["a", []], max_tokens=2)  # type: ignore[list-item]


def test_a_reply_waits_for_its_end(model: localllm.Model) -> None:
    reply = model.chat("Hello!", max_tokens=5, temperature=0, logprobs=2)
    first = next(reply)
    assert (first.token, first.finish_reason) == (reply.tokens[0], None)
    assert (reply.finish_reason, reply.reasoning, reply.tool_calls) == ("length", "", [])
    assert str(reply) == reply.text == reply.message["content"]
    assert [one.token for one in reply.logprobs] == reply.tokens
    assert all(len(one.top) == 2 and one.logprob <= 0 for one in reply.logprobs)
    assert list(reply) == []
    assert repr(reply).startswith("Reply('")


def test_a_reply_can_be_awaited(model: localllm.Model) -> None:
    async def main() -> tuple[str, str, str]:
        streamed = "".join([piece.text async for piece in model.chat("Hello!", max_tokens=8, temperature=0)])
        both = await asyncio.gather(*(model.chat("Hello!", max_tokens=8, temperature=0) for _ in range(2)))
        return streamed, both[0].text, both[1].text

    one, two, three = asyncio.run(main())
    assert one == two == three == str(model.chat("Hello!", max_tokens=8, temperature=0))


def test_logits_can_be_processed(model: localllm.Model) -> None:
    [banned] = model.generate("Once", max_tokens=1, temperature=0).tokens
    seen: list[tuple[int, ...]] = []

    def without(tokens: Any, logits: Any) -> Any:
        seen.append(tokens)
        logits[banned] = -np.inf
        return logits

    reply = model.generate("Once", max_tokens=3, temperature=0, logits_processor=without)
    prompt, tokens = model.tokenize("Once"), reply.tokens
    assert banned not in tokens
    assert seen == [tuple(prompt + tokens[:count]) for count in range(3)]
    assert tokens[0] == int(np.delete(model.logits("Once")[-1], banned).argmax()) + (tokens[0] > banned)
    for wrong, told in (
        (lambda tokens, logits: logits[:3], r"the logits processor returned an array of shape \(3,\)"),
        (lambda tokens, logits: 1 / 0, "the logits processor failed: ZeroDivisionError"),
    ):
        with pytest.raises(localllm.LocalLLMError, match=told):
            model.generate("Once", max_tokens=1, logits_processor=wrong).wait()


def test_a_template_can_be_applied(model: localllm.Model) -> None:
    text_ = model.apply_chat_template("Hi", tokenize=False)
    assert text_.endswith("<|im_start|>assistant<|im_sep|>")
    assert model.apply_chat_template("Hi") == model.tokenize(text_, add_special=False, parse_special=True)
    assert len(model.apply_chat_template("Hi", add_generation_prompt=False)) < len(model.apply_chat_template("Hi"))


def test_a_history_is_evaluated_once(model: localllm.Model) -> None:
    first = model.chat("Who are you?", max_tokens=20, temperature=0)
    messages = [{"role": "user", "content": "Who are you?"}, first.message, {"role": "user", "content": "Hello!"}]
    second = model.chat(messages, max_tokens=5, temperature=0).usage
    assert second.reused_tokens >= first.usage.prompt_tokens + 15


def forced(model: localllm.Model, text: str) -> Any:
    """Return a logits processor that forces a text and then the end of generation."""
    ids = [*model.tokenize(text, add_special=False), min(model.tokenizer.eog)]
    start: list[int] = []

    def processor(tokens: Any, logits: Any) -> Any:
        start[:] = start or [len(tokens)]
        logits[:] = -1e4
        logits[ids[len(tokens) - start[0]]] = 0
        return logits

    return processor


MESSAGES = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "


@pytest.mark.parametrize(
    ("marks", "written", "reasoning", "content"),
    [
        ("<think></think>", "<think>It is big.</think>Yes.", "It is big.", "Yes."),
        (
            "<|start|>assistant<|channel|>analysis<|message|><|end|><|channel|>final",
            "<|channel|>analysis<|message|>User greets.<|end|><|start|>assistant<|channel|>final<|message|>Hello!",
            "User greets.",
            "Hello!",
        ),
    ],
)
def test_reasoning_is_apart(model: localllm.Model, marks: str, written: str, reasoning: str, content: str) -> None:
    model.__dict__["template"] = (ChatTemplate(f"{MESSAGES}{{# {marks} #}}", "", "<|im_end|>"), None)
    try:
        reply = model.chat("Hi", temperature=0, logits_processor=forced(model, written))
        pieces = list(reply)
    finally:
        del model.__dict__["template"]
    assert (reply.reasoning, reply.text, reply.finish_reason) == (reasoning, content, "stop")
    assert "".join(piece.raw for piece in pieces) == written
    assert reply.message == {"role": "assistant", "content": content, "reasoning_content": reasoning}


def test_calls_of_tools_come_parsed(model: localllm.Model) -> None:
    function = {
        "name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    }  # fmt: skip
    written = 'So: <tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    source = f"{MESSAGES}{{% if tools %}}{{{{ tools | tojson }}}}{{% endif %}}{{# <tool_call> </tool_call> #}}"
    model.__dict__["template"] = (ChatTemplate(source, "", "<|im_end|>"), None)
    try:
        tools = [{"type": "function", "function": function}]
        reply = model.chat("Hi", temperature=0, tools=tools, logits_processor=forced(model, written)).wait()
    finally:
        del model.__dict__["template"]
    [call] = reply.tool_calls
    assert (call.name, call.arguments, reply.finish_reason) == ("weather", {"city": "Rome"}, "tool_calls")
    assert reply.text.strip() == "So:"
    assert reply.message["tool_calls"] == [call.message]
