"""Convert the messages of chat completions, in OpenAI's current and older formats and in similar formats, to the format
of `Turn`."""

from __future__ import annotations

import json

from localllm.server.content import read_text_field
from localllm.server.fields import Fields
from localllm.server.turn import Json

ROLES = {  # role in a request: role in templates
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
THOUGHTS = ("reasoning_content", "reasoning")
NAME_LENGTH = 256


def read_messages(fields: Fields) -> list[Json]:
    """Return the messages of a request with string contents, ids on all `tool_calls`, and the roles that templates
    use."""
    if not fields.list("messages"):
        raise fields.wrong("messages", "expected at least one message")
    return [_message(each) for each in fields.each("messages")]


def _message(fields: Fields) -> Json:
    role = ROLES[fields.choice("role", tuple(ROLES))]
    content = read_text_field(fields, "content")
    found: Json = {"role": role, "content": content or ""}
    if name := fields.text("name", ""):
        found["name"] = name
    if role == "assistant":
        found |= _assistant(fields)
        if content is None and len(found) == 2:
            raise fields.wrong("content", "an assistant message needs content, tool_calls or reasoning_content")
    elif content is None:
        raise fields.wrong("content", "required, but missing")
    if role == "tool":
        found["tool_call_id"] = fields.text("tool_call_id", "") or legacy_id(found.get("name", ""))
    return found


def _assistant(fields: Fields) -> Json:
    found: Json = {}
    if reasoning := next((text for name in THOUGHTS if (text := fields.text(name, ""))), ""):
        found["reasoning_content"] = reasoning
    calls = [_call(each, number) for number, each in enumerate(fields.each("tool_calls"))]
    if fields.has("function_call"):
        function = fields.inner("function_call")
        calls.append(tool_call(legacy_id(function.text("name")), function.text("name"), read_arguments(function)))
    return found | ({"tool_calls": calls} if calls else {})


def _call(fields: Fields, number: int) -> Json:
    kind = fields.choice("type", ("function", "custom"), "function")
    inner = Fields(fields.object(kind), fields.path(kind))
    text = custom_arguments(inner.text("input")) if kind == "custom" else read_arguments(inner)
    return tool_call(fields.text("id", "") or f"call_{number}", inner.text("name"), text)


def tool_call(id: str, name: str, arguments: str) -> Json:
    """Return an entry of `tool_calls`."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def legacy_id(name: str) -> str:
    """Return an id for a tool call that lacks an id, as in messages with `function_call`."""
    return f"call_{name}"


def read_arguments(fields: Fields) -> str:
    """Return the arguments of a tool call as JSON text; some clients send an object."""
    value = fields.data.get("arguments")
    if isinstance(value, dict):
        return json.dumps(value, ensure_ascii=False)
    return fields.text("arguments", "{}")


def custom_arguments(text: str) -> str:
    """Return the arguments of the function that represents a custom tool. The input of a custom tool is one string."""
    return json.dumps({"input": text}, ensure_ascii=False)
