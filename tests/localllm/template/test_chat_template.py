"""Chat templates: supported features, messages adapted to templates that reject them, and formats for models without a
template.
"""

from __future__ import annotations

import re
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from localllm.base.errors import LocalLLMError
from localllm.template import (
    ChatTemplate,
    TemplateError,
    TemplateRejected,
    choose_template,
    encode_chat,
    given_template,
)
from localllm.tokenizer import Tokenizer
from localllm.tokenizer.encoders import BYTE_LETTERS

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": "Bye"},
]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m.content + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def render(source: str, messages: list[dict[str, Any]] | None = None, **extra: Any) -> str:
    return ChatTemplate(source, "<s>", "</s>").render(TALK if messages is None else messages, extra=extra).text


def one(source: str, **extra: Any) -> str:
    return render(source, [], **extra)


def tokenizer(*special: str, bos: str | None = None, eos: str = "a") -> Tokenizer:
    key = "tokenizer.ggml."
    tokens = [*BYTE_LETTERS, *special]
    metadata = {
        key + "model": "gpt2",
        key + "tokens": tokens,
        key + "token_type": [1] * 256 + [3] * len(special),
        key + "merges": [],
        key + "add_bos_token": bos is not None,
        key + "bos_token_id": tokens.index(bos or "a"),
        key + "eos_token_id": tokens.index(eos),
    }
    return Tokenizer.from_metadata(metadata)


def test_chatml_by_hand() -> None:
    assert render(CHATML, TALK[1:2]) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    no_prompt = ChatTemplate(CHATML, "", "").render(TALK[1:2], add_generation_prompt=False)
    assert no_prompt.text == "<|im_start|>user\nHi<|im_end|>\n"
    assert no_prompt.notes == ()


def test_a_longer_conversation_begins_with_the_shorter_one() -> None:
    """The rendered conversation begins with the rendering of its first messages, so the prefix cache applies.

    Rendering is deterministic.
    """
    template = ChatTemplate(CHATML, "", "")
    before = template.render(TALK[:2], add_generation_prompt=False).text
    assert template.render(TALK).text.startswith(before)
    assert template.render(TALK) == template.render(TALK)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ bos_token }}|{{ eos_token }}", "<s>|</s>"),
        ("{% if true %}\n  x\n  {% endif %}\ny", "  x\ny"),  # trim_blocks and lstrip_blocks
        # tojson neither escapes HTML nor sorts keys
        ("{{ {'b': 'é<', 'a': [1, none]} | tojson }}", '{"b": "é<", "a": [1, null]}'),
        ("{{ [1] | tojson(indent=2) }}", "[\n  1\n]"),
        ("{{ {'b': 1, 'a': 2} | tojson(separators=(',', ':'), sort_keys=true) }}", '{"a":2,"b":1}'),
        ("{{ [1, 2] | map('string') | tojson }}", '["1", "2"]'),
        (
            "{% for i in range(9) %}{% if i == 2 %}{% continue %}{% elif i > 3 %}{% break %}{% endif %}{{ i }}"
            "{% endfor %}",
            "013",
        ),
        (
            "{% for x in 'abc' %}{{ loop.index }}{{ x }}{{ loop.last }}{{ loop.length }} {% endfor %}",
            "1aFalse3 2bFalse3 3cTrue3 ",
        ),
        ("{% for x in [[1, [2]]] recursive %}{{ x if x is number else loop(x) }}{% endfor %}", "12"),
        ("{% generation %}answer{% endgeneration %}", "answer"),
        ("{{ strftime_now('%Y-%m-%d') }}", "2024-02-29"),
        ("{% set ns = namespace(a=1) %}{% for i in range(3) %}{% set ns.a = ns.a + i %}{% endfor %}{{ ns.a }}", "4"),
        (
            "{% macro m(x) %}<{{ x }}{{ caller() if caller }}>{% endmacro %}{{ m(1) }}{% call m(2) %}!{% endcall %}",
            "<1><2!>",
        ),
        ("{{ 'a' ~ 1 ~ none ~ missing }}", "a1None"),
        (
            "{{ 'a,b'.split(',') | join('+') }}{{ 'x' * 3 }}{{ 'aXb' | replace('X', '-') }}{{ '%s!' % 'y' }}",
            "a+bxxxa-by!",
        ),
        (
            "{{ '{}:{x}'.format(1, x=2) }}{{ 'a\nb' | indent(2) }}{{ 'abcd'[1:3] }}{{ [3, 1] | sort }}",
            "1:2a\n  bbc[1, 3]",
        ),
        ("{{ [{'r': 'u'}, {'r': 'v'}] | selectattr('r', 'equalto', 'v') | list | length }}", "1"),
        ("{{ tools is none }}{{ messages }}", "True[]"),
        ("{{ name }}{{ messages }}", "given[]"),
    ],
)
def test_what_templates_use(source: str, text: str) -> None:
    template = ChatTemplate(source, "<s>", "</s>", clock=lambda: datetime(2024, 2, 29))
    assert template.render([], extra={"name": "given", "messages": "not these"}).text == text


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ 'to ' + tools[0].function.description }}.", "to ."),  # as in Functionary 3.1's template
        ("{{ tools[0].function.description is defined }}", "False"),  # the template handles a missing description
        ("{{ 'to ' + tools[0].function.description }}: {{ functions }}", None),
    ],
)
def test_a_tool_without_a_description(source: str, text: str | None) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    found = ChatTemplate(source, "", "").render([], tools=[tool]).text
    assert found == text or (text is None and '"name": "f"' in found)


def test_tools_are_given() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    assert ChatTemplate("{{ tools[0].function.name }}", "", "").render([], tools=[tool]).text == "f"


NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML
IGNORES_SYSTEM = CHATML.replace(
    "{{ '<|im_start|>'", "{% if m.role == 'system' %}{% continue %}{% endif %}{{ '<|im_start|>'"
)
TURNS = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('in turn!') }}"
    "{% endif %}{{ m.role }}:{{ m.content }};{% endfor %}"
)
PARTS = "{% for m in messages %}{{ m.role }}:{% for p in m.content %}{{ p.text }}{% endfor %};{% endfor %}"


@pytest.mark.parametrize("source", [NO_SYSTEM, IGNORES_SYSTEM])
def test_a_system_message_that_is_refused_or_left_out_goes_before_the_first_user_message(source: str) -> None:
    rendered = ChatTemplate(source, "", "").render(TALK[:2])
    assert "<|im_start|>user\nBe brief.\n\nHi<|im_end|>" in rendered.text
    assert rendered.notes == (
        "the chat template does not support system messages; it was put before the first user message",
    )


def test_a_system_message_alone_becomes_the_users() -> None:
    assert "<|im_start|>user\nBe brief.<|im_end|>" in render(NO_SYSTEM, TALK[:1])


def test_messages_in_a_row_are_joined_where_the_template_wants_turns() -> None:
    twice = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    rendered = ChatTemplate(TURNS, "", "").render(twice)
    assert rendered.text == "user:a\n\nb;"
    assert "alternating" in rendered.notes[0]
    assert len(ChatTemplate(TURNS, "", "").render([TALK[0], *twice]).notes) == 2


def test_contents_are_given_as_parts_where_the_template_wants_them() -> None:
    rendered = ChatTemplate(PARTS, "", "").render(TALK[:2])
    assert rendered.text == "system:Be brief.;user:Hi;"
    assert "lists of parts" in rendered.notes[0]


def test_what_a_template_leaves_out_is_said() -> None:
    rendered = ChatTemplate("constant", "", "").render(TALK)
    assert rendered.text == "constant"
    assert rendered.notes == ("the chat template omits the system message; the model does not see it",)


def test_a_conversation_is_not_changed_by_rendering_it() -> None:
    talk = [dict(message) for message in TALK]
    ChatTemplate(NO_SYSTEM, "", "").render(talk)
    assert talk == TALK


def test_a_refusal_that_nothing_helps_against_is_the_templates_own_words_and_line() -> None:
    with pytest.raises(TemplateRejected, match=r"failed in line 2: it refuses the conversation: never") as error:
        render("\n{{ raise_exception('never') }}")
    assert isinstance(error.value, LocalLLMError)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("a\n{% if %}", "the chat template is broken in line 2: Expected an expression"),
        ("a\nb\n{{ x.y.z }}", "failed in line 3: UndefinedError: 'x' is undefined"),
        ("{% macro m() %}\n{{ 1 / 0 }}{% endmacro %}\n\n{{ m() }}", "failed in line 2: ZeroDivisionError"),
        ("{{ 'a' | nofilter }}", "broken in line 1: No filter named 'nofilter'"),
        ("{% include 'other' %}", "failed in line 1"),
    ],
)
def test_errors_name_the_line(source: str, message: str) -> None:
    with pytest.raises(TemplateError, match=message):
        render(source)


def test_bos_never_doubles() -> None:
    adds = tokenizer("<s>", bos="<s>")
    bos = adds.bos
    text = render("{{ bos_token }}{{ messages[0].content }}")
    assert text == "<s>Be brief."
    assert encode_chat(adds, text).count(bos or -1) == 1
    assert encode_chat(adds, "Be brief.")[0] == bos
    assert encode_chat(tokenizer("<s>"), "Be")[0] != tokenizer("<s>").id("<s>")


TEXTS = {  # family: the text of TALK
    "llama3": (
        "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|><|start_header_id|>user"
        "<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nHello!<|eot_id|><|start_header_id|>user"
        "<|end_header_id|>\n\nBye<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    ),
    "chatml": (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello!"
        "<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n"
    ),
    "gemma4": (
        "<s><|turn>system\nBe brief.<turn|>\n<|turn>user\nHi<turn|>\n<|turn>model\nHello!<turn|>\n<|turn>user\n"
        "Bye<turn|>\n<|turn>model\n"
    ),
    "gemma": (
        "<s><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\nHello!<end_of_turn>\n"
        "<start_of_turn>user\nBye<end_of_turn>\n<start_of_turn>model\n"
    ),
    "command-r": (
        "<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>Be brief.<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|USER_TOKEN|>"
        "Hi<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>Hello!<|END_OF_TURN_TOKEN|>"
        "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>Bye<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"
    ),
    "phi3": (
        "<|system|>\nBe brief.<|end|>\n<|user|>\nHi<|end|>\n<|assistant|>\nHello!<|end|>\n<|user|>\nBye<|end|>\n"
        "<|assistant|>\n"
    ),
    "deepseek": "<s>Be brief.<｜User｜>Hi<｜Assistant｜>Hello!<｜end▁of▁sentence｜><｜User｜>Bye<｜Assistant｜>",
    "mistral": "<s>[INST] Be brief.\n\nHi[/INST] Hello!</s>[INST] Bye[/INST]",
    "mistral-v1": "<s>[INST] Be brief.\n\nHi [/INST]Hello!</s>[INST] Bye [/INST]",
    "llama2": "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHi [/INST] Hello! </s><s>[INST] Bye [/INST]",
    "zephyr": (
        "<|system|>\nBe brief.</s>\n<|user|>\nHi</s>\n<|assistant|>\nHello!</s>\n<|user|>\nBye</s>\n<|assistant|>\n"
    ),
    "rwkv-world": "<s>System: Be brief.\n\nUser: Hi\n\nAssistant: Hello!\n\nUser: Bye\n\nAssistant:",
    "plain": "Be brief.\n\nUser: Hi\nAssistant: Hello!\nUser: Bye\nAssistant:",
}
MODELS = {  # family: a model's name, for families whose vocabulary has no tokens of the format
    "mistral-v1": "Mistral 7B",
    "llama2": "LLaMA-2 chat",
    "zephyr": "Zephyr 7B",
    "rwkv-world": "RWKV7 World",
}


@pytest.mark.parametrize("family", TEXTS)
def test_a_file_without_template_gets_its_familys_and_says_so(family: str) -> None:
    text = TEXTS[family]
    special = ["<s>", "</s>"] if family in MODELS else sorted({*re.findall(r"<[^<>\s]+>|\[/?INST\]", text)})
    bos, eos = ("<s>" if "<s>" in special else None), ("</s>" if "</s>" in special else "a")
    metadata = {"general.name": MODELS.get(family, "")}
    template, note = choose_template(metadata, tokenizer(*special, bos=bos, eos=eos))
    assert note is not None
    assert f"the file has no chat template; using the '{family}' format" in note
    assert template.render(TALK).text == text
    assert template.stops == {"plain": ("\nUser:",), "rwkv-world": ("\n\nUser:",)}.get(family, ())


def test_a_file_with_a_template_gets_it_without_a_word() -> None:
    template, note = choose_template({"tokenizer.chat_template": CHATML}, tokenizer("<s>"))
    assert (template.source, note) == (CHATML, None)


def test_a_file_may_name_a_format() -> None:
    """llama.cpp's converter wrote "rwkv-world" as the template of RWKV models.

    The name selects the built-in template.
    """
    template, note = choose_template({"tokenizer.chat_template": "rwkv-world"}, tokenizer("<|im_start|>"))
    assert (template.source, note) == (given_template("rwkv-world").source, None)


def test_a_template_may_be_given_by_name_as_text_or_as_a_file(tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text("It says {{ messages[0].content }}", encoding="utf-8")
    metadata = {"tokenizer.chat_template": "{{ messages }}"}
    for given, text in (
        ("chatml", "<|im_start|>user\nHi<|im_end|>\n"),
        ("{{ messages[0].content }}!", "Hi!"),
        ("No Jinja, no messages", "No Jinja, no messages"),  # plain text is a valid template, as in llama-server
        (str(tmp_path / "own.jinja"), "It says Hi"),
    ):
        template, note = choose_template(metadata, tokenizer("<s>"), given=given_template(given))
        assert note is None
        assert template.render([{"role": "user", "content": "Hi"}]).text.startswith(text)
    with pytest.raises(TemplateError, match="broken in line 1"):
        choose_template(metadata, tokenizer("<s>"), given=given_template("{% if %}"))


def test_templates_read_the_date_in_llama_server_s_forms() -> None:
    """The date variables have llama-server's formats.

    Llama 3.1 and 3.3 read date_string, and default to a day of 2024; firefunction fails without datetime.
    """
    source = "{{ date_string }}; {{ datetime }}; {{ strftime_now('%Y') }}"
    template = ChatTemplate(source, "", "", clock=lambda: datetime(2024, 2, 29))
    assert template.render([{"role": "user", "content": ""}]).text == "29 Feb 2024; Feb 29 2024; 2024"
    mine = template.render([{"role": "user", "content": ""}], extra={"date_string": "1 Jan 1970"})
    assert mine.text == "1 Jan 1970; Feb 29 2024; 2024"


@pytest.mark.parametrize(
    ("given", "says"),
    [("my template.jinja", "is not a chat template"), ("my folder/a b", "is not a chat template"),
     ("chatml3", "'chatml3' is not a chat template: give a file, a Jinja text, or one of llama3, chatml"),
     ("", "the chat template cannot be read: "), ("x" * 5000, "the chat template cannot be read: "),
     ("\0", "the chat template cannot be read: ")],
)  # fmt: skip
def test_what_is_no_template_is_refused_in_a_line(given: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(TemplateError) as error:
        given_template(given or str(tmp_path))
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("source", "why"),
    [("{% if %}", "broken in line 1"), ("  ", "is empty"), (7, "is not a string")],
)
def test_a_broken_template_is_replaced_and_said(source: Any, why: str) -> None:
    template, note = choose_template({"tokenizer.chat_template": source}, tokenizer("<|im_start|>", "<|im_end|>"))
    assert note is not None
    assert why in note
    assert "using the 'chatml' format" in note
    assert "<|im_start|>user\nHi" in template.render(TALK).text
