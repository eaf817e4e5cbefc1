"""Convert the input of a responses request, a string or a list of items, to messages.

Consecutive items of the assistant (reasoning, text, calls) form one message.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from localllm.server.content import JOINT, Draft, drafted, read_text_field
from localllm.server.fields import Fields
from localllm.server.openai.messages import ROLES, custom_arguments, read_arguments, tool_call
from localllm.server.turn import Json

NAMESPACE = "__"  # separator between the name of a namespace and the name of a tool in it
OWN = ("type", "id", "call_id", "status")  # fields of a call that are not arguments


def read_input(fields: Fields) -> list[Json]:
    """Return the messages of `input`, which may be empty."""
    value = fields.data.get("input")
    if value is None:
        raise fields.wrong("input", "required, but missing")
    if isinstance(value, str):
        return [{"role": "user", "content": value}] if value else []
    if not isinstance(value, list):
        raise fields.wrong("input", "expected a text or a list of items")
    drafts: list[Draft] = []
    for item in fields.each("input"):
        _reader(item)(drafts, item)
    return [draft.json() for draft in drafts]


def flat_name(namespace: str, name: str) -> str:
    """Return the name of a namespaced tool as the model sees it."""
    return f"{namespace}{NAMESPACE}{name}" if namespace else name


def _reader(item: Fields) -> Callable[[list[Draft], Fields], None]:
    kind = item.text("type", "message" if item.has("role") else "item_reference")
    if kind in READERS:
        return READERS[kind]
    if kind.endswith("_call_output"):
        return _output
    if kind.endswith("_call"):
        return _other_call
    raise item.wrong("type", f"unknown type of item; supported: {', '.join(READERS)}")


def _message(drafts: list[Draft], item: Fields) -> None:
    role = ROLES[item.choice("role", ("user", "assistant", "system", "developer"))]
    content = read_text_field(item, "content")
    if content is None:
        raise item.wrong("content", "required, but missing")
    if role == "assistant":
        drafted(drafts, role).texts.append(content)
    else:
        drafts.append(Draft(role, content))


def _reasoning(drafts: list[Draft], item: Fields) -> None:
    """Add the reasoning or its summary. Encrypted reasoning of other servers cannot be read."""
    text = read_parts(item, "content") or read_parts(item, "summary")
    if not text:
        return
    draft = drafted(drafts, "assistant")
    if draft.texts or draft.calls:
        draft = Draft("assistant")
        drafts.append(draft)
    draft.reasoning.append(text)


def read_parts(item: Fields, name: str) -> str:
    """Return the joined texts of a reasoning item's parts."""
    return JOINT.join(part.text("text", "") for part in item.each(name))


def _add_call(drafts: list[Draft], item: Fields, name: str, arguments: str) -> None:
    call = tool_call(item.text("call_id"), flat_name(item.text("namespace", ""), name), arguments)
    drafted(drafts, "assistant").calls.append(call)


def _function_call(drafts: list[Draft], item: Fields) -> None:
    _add_call(drafts, item, item.text("name"), read_arguments(item))


def _custom_call(drafts: list[Draft], item: Fields) -> None:
    _add_call(drafts, item, item.text("name"), custom_arguments(item.text("input")))


def _other_call(drafts: list[Draft], item: Fields) -> None:
    """Keep a call of a built-in tool that the client ran, such as local_shell. Calls that OpenAI ran are skipped."""
    if item.has("call_id"):
        arguments = {name: value for name, value in item.data.items() if name not in OWN}
        kind = item.text("type").removesuffix("_call")
        _add_call(drafts, item, kind, json.dumps(arguments, ensure_ascii=False))


def _output(drafts: list[Draft], item: Fields) -> None:
    value = item.data.get("output")
    typed = isinstance(value, str) or (isinstance(value, list) and item.text("type") in OUTPUTS)
    content = read_text_field(item, "output") if typed else json.dumps(value, ensure_ascii=False)
    id = item.text("call_id", "") or item.text("id")
    drafts.append(Draft("tool", content or "", call_id=id))


def _reference(drafts: list[Draft], item: Fields) -> None:
    raise item.wrong("type", "references to items are not supported: nothing is stored; send the items themselves")


def _compaction(drafts: list[Draft], item: Fields) -> None:
    raise item.wrong("type", "compacted conversations of other servers cannot be read; send the items themselves")


def _screenshot(drafts: list[Draft], item: Fields) -> None:
    raise item.wrong("output", "image input is not supported; send text")


def _skip(drafts: list[Draft], item: Fields) -> None:
    pass


OUTPUTS = ("function_call_output", "custom_tool_call_output")
READERS: dict[str, Callable[[list[Draft], Fields], None]] = {
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
