"""Anthropic's messages and blocks as the messages of `Turn`.

A user's message may hold the results of tools: they become messages of their own, before the user's text. Marks for
Anthropic's cache (`cache_control`) are not looked at.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from localllm.server.anthropic.stable import stable_prompt
from localllm.server.content import JOINT, MEDIA, not_text, part_text
from localllm.server.fields import Fields
from localllm.server.turn import Json

ROLES = ("user", "assistant", "system")
SKIPPED = (  # blocks of tools that Anthropic runs itself, and thoughts that nobody here can read
    "redacted_thinking",
    "server_tool_use",
    "web_search_tool_result",
    "web_fetch_tool_result",
    "code_execution_tool_result",
    "bash_code_execution_tool_result",
    "text_editor_code_execution_tool_result",
    "tool_search_tool_result",
    "mcp_tool_use",
    "mcp_tool_result",
    "tool_reference",
    "browser_state",
    "compaction",
)
ERROR = "Error: "  # before the result of a tool that failed


def read_messages(fields: Fields) -> list[Json]:
    """Return the messages of a request with `system` first. Messages of one role that follow each other are joined."""
    if not fields.list("messages"):
        raise fields.wrong("messages", "expected at least one message")
    system = read_blocks(fields, "system")
    found: list[Json] = [{"role": "system", "content": system}] if system else []
    for message in fields.each("messages"):
        _read(found, message)
    if not any(message["role"] != "system" for message in found):
        raise fields.wrong("messages", "expected a message with text, tool_use or tool_result")
    return found


def read_blocks(fields: Fields, name: str) -> str:
    """Return the text of a field that is a text or a list of blocks of text."""
    value = fields.data.get(name)
    if value is None or isinstance(value, str):
        return stable_prompt(value or "")
    return JOINT.join(filter(None, (text for block in fields.each(name) if (text := _text(block)) is not None)))


def _text(block: Fields) -> str | None:
    """Return the text of a block; None if it is one that is skipped."""
    kind = block.text("type", "text")
    if kind == "search_result":
        return JOINT.join((block.text("title", ""), block.text("source", ""), read_blocks(block, "content")))
    return None if kind in SKIPPED else stable_prompt(part_text(block))


def _read(found: list[Json], message: Fields) -> None:
    role = message.choice("role", ROLES)
    value = message.data.get("content")
    if value is None:
        raise message.wrong("content", "required, but missing")
    if isinstance(value, str):
        _add_text(found, role, stable_prompt(value))
        return
    if not isinstance(value, list):
        raise message.wrong("content", "expected a text or a list of blocks")
    blocks = list(message.each("content"))
    if role == "assistant":
        for block in blocks:
            _read_own(found, block)
        return
    for block in blocks:
        if block.data.get("type") == "tool_result":
            found.append(_result(block))
    texts = [text for block in blocks if block.data.get("type") != "tool_result" and (text := _text(block))]
    if texts or not any(block.data.get("type") == "tool_result" for block in blocks):
        _add_text(found, role, JOINT.join(texts))


def _add_text(found: list[Json], role: str, text: str) -> None:
    if found and found[-1]["role"] == role:
        found[-1]["content"] = JOINT.join(filter(None, (found[-1]["content"], text)))
    else:
        found.append({"role": role, "content": text})


def _result(block: Fields) -> Json:
    text = read_blocks(block, "content")
    if block.flag("is_error", False) and not text.startswith(ERROR):
        text = ERROR + text
    return {"role": "tool", "tool_call_id": block.text("tool_use_id"), "content": text}


# -- the assistant's blocks ------------------------------------------------------------------------------------------


def _read_own(found: list[Json], block: Fields) -> None:
    kind = block.text("type", "text")
    if kind in SKIPPED:
        return
    if kind not in OWN:
        raise not_text(block, kind) if kind in MEDIA else block.wrong("type", "unknown type of block")
    OWN[kind](_own(found), block)


def _own(found: list[Json]) -> Json:
    if not found or found[-1]["role"] != "assistant":
        found.append({"role": "assistant", "content": ""})
    return found[-1]


def _own_text(message: Json, block: Fields) -> None:
    text = stable_prompt(part_text(block))
    message["content"] = JOINT.join(filter(None, (message["content"], text)))


def _own_thought(message: Json, block: Fields) -> None:
    before = message.get("reasoning_content", "")
    if thought := JOINT.join(filter(None, (before, block.text("thinking", "")))):
        message["reasoning_content"] = thought


def _own_call(message: Json, block: Fields) -> None:
    arguments = json.dumps(block.object("input", {}), ensure_ascii=False)
    function = {"name": block.text("name"), "arguments": arguments}
    message.setdefault("tool_calls", []).append({"id": block.text("id"), "type": "function", "function": function})


OWN: dict[str, Callable[[Json, Fields], None]] = {
    "text": _own_text,
    "thinking": _own_thought,
    "tool_use": _own_call,
}
