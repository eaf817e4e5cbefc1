"""The input of a response, which is a text or a list of items, as messages.

Items that follow each other on the assistant's side (reasoning, text, calls) are one message.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from localllm.server.content import JOINT, read_text
from localllm.server.fields import Fields
from localllm.server.openai.messages import ROLES, custom_arguments, read_arguments, tool_call
from localllm.server.turn import Json

NAMESPACE = "__"  # between the name of a namespace and that of a tool in it
OWN = ("type", "id", "call_id", "status")  # fields of a call that are not its arguments


def read_input(fields: Fields) -> list[Json]:
    """Return the messages of `input`; none if it is empty."""
    value = fields.data.get("input")
    if value is None:
        raise fields.wrong("input", "required, but missing")
    if isinstance(value, str):
        return [{"role": "user", "content": value}] if value else []
    if not isinstance(value, list):
        raise fields.wrong("input", "expected a text or a list of items")
    messages: list[Json] = []
    for item in fields.each("input"):
        _reader(item)(messages, item)
    return messages


def flat_name(namespace: str, name: str) -> str:
    """Return the name by which the model knows a tool of a namespace."""
    return f"{namespace}{NAMESPACE}{name}" if namespace else name


def _reader(item: Fields) -> Callable[[list[Json], Fields], None]:
    kind = item.text("type", "message" if item.has("role") else "item_reference")
    if kind in READERS:
        return READERS[kind]
    if kind.endswith("_call_output"):
        return _output
    if kind.endswith("_call"):
        return _other_call
    raise item.wrong("type", f"unknown type of item; supported: {', '.join(READERS)}")


def _assistant(messages: list[Json]) -> Json:
    """Return the assistant's message that is being read."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _message(messages: list[Json], item: Fields) -> None:
    role = ROLES[item.choice("role", ("user", "assistant", "system", "developer"))]
    content = read_text(item, "content")
    if content is None:
        raise item.wrong("content", "required, but missing")
    if role == "assistant":
        message = _assistant(messages)
        message["content"] = JOINT.join(filter(None, (message["content"], content)))
    else:
        messages.append({"role": role, "content": content})


def _reasoning(messages: list[Json], item: Fields) -> None:
    """Add what the model thought, or the summary of it. Encrypted thoughts of other servers cannot be read."""
    thought = read_parts(item, "content") or read_parts(item, "summary")
    if not thought:
        return
    message = _assistant(messages)
    if message["content"] or "tool_calls" in message:
        message = {"role": "assistant", "content": ""}
        messages.append(message)
    before = message.get("reasoning_content", "")
    message["reasoning_content"] = JOINT.join(filter(None, (before, thought)))


def read_parts(item: Fields, name: str) -> str:
    """Return the texts of a reasoning item's parts."""
    return JOINT.join(part.text("text", "") for part in item.each(name))


def _add_call(messages: list[Json], item: Fields, name: str, arguments: str) -> None:
    call = tool_call(item.text("call_id"), flat_name(item.text("namespace", ""), name), arguments)
    _assistant(messages).setdefault("tool_calls", []).append(call)


def _function_call(messages: list[Json], item: Fields) -> None:
    _add_call(messages, item, item.text("name"), read_arguments(item))


def _custom_call(messages: list[Json], item: Fields) -> None:
    _add_call(messages, item, item.text("name"), custom_arguments(item.text("input")))


def _other_call(messages: list[Json], item: Fields) -> None:
    """Keep a call of a built-in tool that the client ran, such as local_shell; others are not the client's."""
    if item.has("call_id"):
        arguments = {name: value for name, value in item.data.items() if name not in OWN}
        kind = item.text("type").removesuffix("_call")
        _add_call(messages, item, kind, json.dumps(arguments, ensure_ascii=False))


def _output(messages: list[Json], item: Fields) -> None:
    value = item.data.get("output")
    typed = isinstance(value, str) or (isinstance(value, list) and item.text("type") in OUTPUTS)
    content = read_text(item, "output") if typed else json.dumps(value, ensure_ascii=False)
    id = item.text("call_id", "") or item.text("id")
    messages.append({"role": "tool", "tool_call_id": id, "content": content or ""})


def _reference(messages: list[Json], item: Fields) -> None:
    raise item.wrong("type", "references to items are not supported: nothing is stored; send the items themselves")


def _compaction(messages: list[Json], item: Fields) -> None:
    raise item.wrong("type", "compacted conversations of other servers cannot be read; send the items themselves")


def _screenshot(messages: list[Json], item: Fields) -> None:
    raise item.wrong("output", "image input is not supported; send text")


def _skip(messages: list[Json], item: Fields) -> None:
    pass


OUTPUTS = ("function_call_output", "custom_tool_call_output")
READERS: dict[str, Callable[[list[Json], Fields], None]] = {
    "message": _message,
    "reasoning": _reasoning,
    "function_call": _function_call,
    "function_call_output": _output,
    "custom_tool_call": _custom_call,
    "custom_tool_call_output": _output,
    "computer_call_output": _screenshot,
    "item_reference": _reference,
    "compaction": _compaction,
    "additional_tools": _skip,  # `tools.py` reads them
    "compaction_trigger": _skip,
    "configuration_update": _skip,
    "mcp_list_tools": _skip,
    "mcp_approval_request": _skip,
    "mcp_approval_response": _skip,
    "program": _skip,
    "program_output": _skip,
    "tool_search_call": _skip,
    "tool_search_output": _skip,
}
