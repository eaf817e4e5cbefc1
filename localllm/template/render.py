"""Renders a conversation with a template, in the confined child process, on request of
`localllm.template.chat_template`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import product
from types import CodeType, TracebackType
from typing import Any, NoReturn

from jinja2 import TemplateSyntaxError
from jinja2.environment import Template

from localllm.template.errors import TemplateError, TemplateRejected
from localllm.template.jinja import ChatEnvironment
from localllm.template.origin import GIVEN, MODEL, OWN, Text, given, joined, least

Message = dict[str, Any]

_FILE = "<chat template>"  # as in Python tracebacks
_KEPT = 8  # maximum number of compiled templates to keep
_SYSTEM = ("system", "developer")
_MODELS = ("assistant", "model")
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")  # keys for a message's reasoning, most common first
_RUN = re.compile(rb"(?s)(.)\1*")
_SURROGATE = re.compile("[\ud800-\udfff]")

_NOTE_PARTS = "the chat template expects message contents as lists of parts; they were converted"
_NOTE_MERGED = "the chat template does not support system messages; it was put before the first user message"
_NOTE_TURNS = (
    "the chat template requires alternating user and assistant messages; adjacent messages of a role were joined"
)
_NOTE_LEFT_OUT = "the chat template omits the {} message; the model does not see it"

_environment = ChatEnvironment()
_compiled: dict[str, CodeType] = {}


def prepare() -> None:
    """Trigger all late imports of Jinja, because a confined process cannot open files."""
    start: dict[str, Any] = {"bos": "", "eos": "", "tools": None, "extra": {}, "now": "2000-01-01"}
    for source in (
        "{{ 'a' ~ messages[0].content | tojson ~ strftime_now('%d %B') }}",
        "{{ 1 / 0 }}",
        "{% if %}",
        "{{ é }}",
    ):
        answer(
            start | {"add_generation_prompt": True, "source": source, "messages": [{"role": "user", "content": "b"}]}
        )


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Compile `request["source"]`, and render it if the request has "messages".

    The result contains text, notes and marks ([mark, count] per run of characters), or the kind and message of an
    error.
    """
    try:
        code = _compile(request["source"])
        return _render_some(code, request) if "messages" in request else {}
    except TemplateError as error:
        return {"rejected": isinstance(error, TemplateRejected), "error": str(error)}


def _compile(source: str) -> CodeType:
    if source not in _compiled:
        if len(_compiled) == _KEPT:
            _compiled.clear()
        try:
            code = _environment.compile(source, _FILE, _FILE)
        except TemplateSyntaxError as error:
            raise TemplateError(f"the chat template is broken in line {error.lineno}: {error.message}") from None
        except (RecursionError, SyntaxError, ValueError, OverflowError) as error:
            raise TemplateError(f"the chat template cannot be compiled: {error}") from None
        _compiled[source] = code
    return _compiled[source]


def _render_some(code: CodeType, request: dict[str, Any]) -> dict[str, Any]:
    """Render the conversation with the fewest changes that make the template accept it."""
    messages: list[Message] = request["messages"]
    now = datetime.fromisoformat(request["now"])
    tools = request["tools"]
    variables = (
        {"documents": None}
        | _dates(now)
        | given(request["extra"])
        | {
            "tools": given(tools),
            "add_generation_prompt": request["add_generation_prompt"],
            "bos_token": Text.of(request["bos"], OWN),
            "eos_token": Text.of(request["eos"], OWN),
        }
    )
    # Some templates require these: tools even if empty, tool descriptions, and an older name of the tools.
    described = [_described(tool) for tool in tools or []]
    insisted = {"functions": given(json.dumps(described, indent=4, ensure_ascii=False))} | variables
    insisted["tools"] = given(described)
    first_error: TemplateError | None = None
    incomplete: dict[str, Any] | None = None
    for (changed, notes), chosen in product(_variants(messages), (variables, insisted)):
        try:
            text = _render(code, chosen | {"messages": [_marked(message) for message in changed]}, now)
        except TemplateError as error:
            first_error = first_error or error
            continue
        missing = _left_out(messages, text)
        if not missing:
            return _rendered(text, notes)
        incomplete = incomplete or _rendered(text, (*notes, _NOTE_LEFT_OUT.format(missing)))
    if incomplete is None:
        assert first_error is not None
        raise first_error
    return incomplete


def _described(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool whose function has a description, which may be empty."""
    function = tool.get("function")
    return tool | {"function": {"description": "", **function}} if isinstance(function, dict) else tool


def _dates(now: datetime) -> dict[str, str]:
    """Return today's date under the names that templates use, formatted as in llama.cpp."""
    return {"date_string": given(now.strftime("%d %b %Y")), "datetime": given(now.strftime("%b %d %Y"))}


def _marked(message: Message) -> Message:
    """Mark a message by origin: the role as the template's, an answer as the model's, everything else as user text.

    Reasoning is set under all key names that templates use, as in transformers.
    """
    role = message["role"]
    reasoning = next((message[name] for name in _THOUGHTS if message.get(name) is not None), None)
    if reasoning is not None:
        message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
    content = given(message, MODEL if role in _MODELS else GIVEN)
    return content | {
        key: given(message[key], mark) for key, mark in (("role", OWN), ("name", GIVEN)) if key in message
    }


def _rendered(text: Text, notes: tuple[str, ...]) -> dict[str, Any]:
    marks = [(run[0][0], len(run[0])) for run in _RUN.finditer(text._marks)]
    return {"text": _SURROGATE.sub("\ufffd", text), "marks": marks, "notes": notes}


def _render(code: CodeType, variables: dict[str, Any], now: datetime) -> Text:
    def strftime_now(form: str) -> Text:
        return Text.of(now.strftime(form), least(form))

    own = {"raise_exception": _reject, "strftime_now": strftime_now}
    template = Template.from_code(_environment, code, _environment.make_globals(own))
    try:
        return joined(template.generate(variables), plain=OWN)
    except TemplateError as error:
        raise type(error)(f"{_place(error)}: {error}") from None
    except RecursionError as error:
        raise TemplateError(f"{_place(error)}: endless recursion") from None
    except MemoryError:
        raise
    except Exception as error:  # any exception in a template is the template's fault
        raise TemplateError(f"{_place(error)}: {type(error).__name__}: {error}") from None


def _reject(message: Any) -> NoReturn:
    raise TemplateRejected(f"it refuses the conversation: {message}")


def _place(error: BaseException) -> str:
    """Return the line number in the template; Jinja puts template lines into the traceback."""
    line = None
    trace: TracebackType | None = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == _FILE:
            line = trace.tb_lineno
        trace = trace.tb_next
    return "the chat template failed" if line is None else f"the chat template failed in line {line}"


def _variants(messages: list[Message]) -> Iterator[tuple[list[Message], tuple[str, ...]]]:
    """Yield the conversation unchanged, then with more and more changes, each with the notes that describe them."""
    merged, turns = _merge_system(messages), _join_turns(messages)
    both = _join_turns(merged)
    variants = (
        (messages, ()),
        (_as_parts(messages), (_NOTE_PARTS,)),
        (merged, (_NOTE_MERGED,)),
        (turns, (_NOTE_TURNS,)),
        (both, (_NOTE_MERGED, _NOTE_TURNS)),
        (_as_parts(both), (_NOTE_PARTS, _NOTE_MERGED, _NOTE_TURNS)),
    )
    seen: list[list[Message]] = []
    for changed, notes in variants:
        if changed not in seen:
            seen.append(changed)
            yield changed, notes


def _left_out(messages: Sequence[Message], text: str) -> str:
    """Return which message is missing from the text, the system message or the last user message; "" if neither."""
    last_of = {_SYSTEM if message.get("role") in _SYSTEM else message.get("role"): message for message in messages}
    for role, name in ((_SYSTEM, "system"), ("user", "last user")):
        content = last_of.get(role, {}).get("content")
        if isinstance(content, str) and content.strip() not in text:
            return name
    return ""


def _merge_system(messages: list[Message]) -> list[Message]:
    if not messages or messages[0].get("role") not in _SYSTEM or not isinstance(messages[0].get("content"), str):
        return messages
    system, rest = messages[0]["content"], messages[1:]
    if rest and rest[0].get("role") == "user" and isinstance(rest[0].get("content"), str):
        return [rest[0] | {"content": f"{system}\n\n{rest[0]['content']}"}, *rest[1:]]
    return [{"role": "user", "content": system}, *rest]


def _join_turns(messages: list[Message]) -> list[Message]:
    joined: list[Message] = []
    for message in messages:
        before = joined[-1] if joined else {}
        plain = all(set(m) == {"role", "content"} and isinstance(m["content"], str) for m in (before, message))
        if plain and before["role"] == message["role"]:
            joined[-1] = before | {"content": f"{before['content']}\n\n{message['content']}"}
        else:
            joined.append(message)
    return joined


def _as_parts(messages: list[Message]) -> list[Message]:
    return [
        message | {"content": [{"type": "text", "text": message["content"]}]}
        if isinstance(message.get("content"), str)
        else message
        for message in messages
    ]
