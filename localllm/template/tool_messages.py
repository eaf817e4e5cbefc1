"""Adapts messages with tools to a chat template: tools and calls that the template cannot render are written into the
text.

form = call_form(template)                                     # once per model
messages = fitted(messages, tools, find_format(template.source), form)
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from localllm.template.call_writer import written_call
from localllm.template.format import AnswerFormat

if TYPE_CHECKING:
    from localllm.template import ChatTemplate

Json = Mapping[str, Any]
CallForm = Literal["object", "text", "none"]  # form of arguments in earlier calls; none: the template drops calls

_PROBE = ("zqname", "zqkey", "zqvalue")


def call_form(template: ChatTemplate) -> CallForm:
    """Return how a template expects the arguments of earlier calls, found by rendering a sample."""
    from localllm.template import TemplateError

    name, key, value = _PROBE
    tools = [{"type": "function", "function": {"name": "zqother", "description": "-", "parameters": {
        "type": "object", "properties": {"zqother": {"type": "string", "description": "-"}}, "required": [],
    }}}]  # fmt: skip
    forms: tuple[tuple[CallForm, Any], ...] = (("object", {key: value}), ("text", json.dumps({key: value})))
    for form, arguments in forms:
        for content in ("", None):
            call = {"id": "zq0000000", "type": "function", "function": {"name": name, "arguments": arguments}}
            answer = {"role": "assistant", "content": content, "tool_calls": [call]}
            result = {"role": "tool", "tool_call_id": "zq0000000", "name": name, "content": "zqresult"}
            try:
                text = template.render([{"role": "user", "content": "zquestion"}, answer, result], tools=tools).text
            except TemplateError:
                continue
            quoted = json.dumps(json.dumps({key: value}))[1:-1] in text  # a string that is rendered as JSON of a string
            if all(part in text for part in (*_PROBE, "zqresult")) and not quoted:
                return form
    return "none"


def fitted(
    messages: Sequence[Json], tools: Sequence[Json], format_: AnswerFormat, form: CallForm
) -> list[dict[str, Any]]:
    """Return messages (OpenAI's format) that the template can render, with tool descriptions if it
    cannot render tools."""
    made: list[dict[str, Any]] = []
    for message in messages:
        if form == "none" and message.get("role") == "tool":
            result = f"<tool_response>\n{_text(message.get('content'))}\n</tool_response>"
            if made and made[-1].get("role") == "user" and message is not messages[0]:
                made[-1]["content"] = f"{_text(made[-1].get('content'))}\n{result}"
            else:
                made.append({"role": "user", "content": result})
        elif message.get("tool_calls"):
            made.append(_with_calls(dict(message), format_, form))
        else:
            made.append(dict(message))
    if tools and not format_.native:
        _describe(made, tools, format_)
    return made


def _with_calls(message: dict[str, Any], format_: AnswerFormat, form: CallForm) -> dict[str, Any]:
    calls = [dict(call) for call in message["tool_calls"] if isinstance(call, Mapping)]
    for call in calls:
        function = dict(call.get("function") or {})
        arguments = _object(function.get("arguments"))
        function["arguments"] = json.dumps(arguments, ensure_ascii=False) if form == "text" else arguments
        call["function"] = function
    if form != "none":
        return {**message, "tool_calls": calls}
    texts = [
        written_call(format_.calls, str(call["function"].get("name")), call["function"]["arguments"], number)
        for number, call in enumerate(calls)
    ]
    del message["tool_calls"]
    return {**message, "content": "\n".join(filter(None, (_text(message.get("content")), *texts)))}


def _object(arguments: Any) -> dict[str, Any]:
    """Return arguments as an object. Invalid JSON, which a client may send back, is stored under a reserved key."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            arguments = {"arguments": arguments}
    return dict(arguments) if isinstance(arguments, Mapping) else {}


def _text(content: Any) -> str:
    """Return the text of a message's content, which is a string or a list of parts."""
    if isinstance(content, list):
        return "\n".join(str(part.get("text") or "") for part in content if isinstance(part, Mapping))
    return str(content or "")


def _describe(messages: list[dict[str, Any]], tools: Sequence[Json], format_: AnswerFormat) -> None:
    """Add the description of the tools to the system message, or to a new first message."""
    functions = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    example = written_call(format_.calls, "NAME", {"PARAMETER": "VALUE"})
    text = (
        "# Tools\n\nYou can call functions. Each is described by its name, what it does, and a JSON schema of its "
        f"parameters:\n<tools>\n{functions}\n</tools>\n\nTo call one, write exactly this, with its name and its "
        f"arguments, and nothing after it:\n{example}\nYou may call several, one after the other. Results come in the "
        "next message within <tool_response></tool_response>. If no function is needed, answer normally."
    )
    if messages and messages[0].get("role") in ("system", "developer"):
        messages[0]["content"] = f"{_text(messages[0].get('content'))}\n\n{text}".lstrip()
    else:
        messages.insert(0, {"role": "system", "content": text})
