"""Convert Anthropic's messages and content blocks to the messages of `Turn`.

A user's message may contain tool results, which become separate messages before the user's text. Cache markers
(`cache_control`) are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from localllm.server.anthropic.stable import stable_prompt
from localllm.server.content import JOINT, MEDIA, Draft, drafted, not_text, part_text
from localllm.server.fields import Fields
from localllm.server.turn import Json

ROLES = ("user", "assistant", "system")
SKIPPED = (  # blocks of tools that Anthropic runs, and encrypted reasoning
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
RESULT = "tool_result"
ERROR = "Error: "  # prefix of the result of a failed tool


def read_messages(fields: Fields) -> list[Json]:
    """Return the messages of a request with `system` first. Consecutive messages of the same role are joined."""
    if not fields.list("messages"):
        raise fields.wrong("messages", "expected at least one message")
    drafts: list[Draft] = []
    for message in fields.each("messages"):
        _read(drafts, message)
    if all(draft.role == "system" for draft in drafts):
        raise fields.wrong("messages", "expected a message with text, tool_use or tool_result")
    system = read_blocks(fields, "system")
    first = [{"role": "system", "content": system}] if system else []
    return first + [draft.json() for draft in drafts]


def read_blocks(fields: Fields, name: str) -> str:
    """Return the text of a field that is a string or a list of text blocks."""
    value = fields.data.get(name)
    if value is None or isinstance(value, str):
        return stable_prompt(value or "")
    return JOINT.join(filter(None, (text for block in fields.each(name) if (text := _text(block)) is not None)))


def _text(block: Fields) -> str | None:
    """Return the text of a block, or None if its type is skipped."""
    kind = block.text("type", "text")
    if kind == "search_result":
        return JOINT.join((block.text("title", ""), block.text("source", ""), read_blocks(block, "content")))
    return None if kind in SKIPPED else stable_prompt(part_text(block))


def _read(drafts: list[Draft], message: Fields) -> None:
    role = message.choice("role", ROLES)
    value = message.data.get("content")
    if value is None:
        raise message.wrong("content", "required, but missing")
    if isinstance(value, str):
        drafted(drafts, role).texts.append(stable_prompt(value))
    elif not isinstance(value, list):
        raise message.wrong("content", "expected a text or a list of blocks")
    elif role == "assistant":
        for block in message.each("content"):
            _read_own(drafts, block)
    else:
        _read_given(drafts, role, list(message.each("content")))


def _read_given(drafts: list[Draft], role: str, blocks: list[Fields]) -> None:
    """Read the blocks of a user's message: tool results first, then all other blocks."""
    results = [_result(block) for block in blocks if block.data.get("type") == RESULT]
    texts = [text for block in blocks if block.data.get("type") != RESULT and (text := _text(block)) is not None]
    drafts += results
    if texts or not results:
        drafted(drafts, role).texts += texts


def _result(block: Fields) -> Draft:
    text = read_blocks(block, "content")
    if block.flag("is_error", False) and not text.startswith(ERROR):
        text = ERROR + text
    return Draft("tool", text, call_id=block.text("tool_use_id"))


# -- the assistant's blocks ------------------------------------------------------------------------------------------


def _read_own(drafts: list[Draft], block: Fields) -> None:
    kind = block.text("type", "text")
    if kind in OWN:
        OWN[kind](drafted(drafts, "assistant"), block)
    elif kind not in SKIPPED:
        raise not_text(block, kind) if kind in MEDIA else block.wrong("type", "unknown type of block")


def _own_text(draft: Draft, block: Fields) -> None:
    draft.texts.append(stable_prompt(part_text(block)))


def _own_reasoning(draft: Draft, block: Fields) -> None:
    if reasoning := block.text("thinking", ""):
        draft.reasoning.append(reasoning)


def _own_call(draft: Draft, block: Fields) -> None:
    arguments = json.dumps(block.object("input", {}), ensure_ascii=False)
    function = {"name": block.text("name"), "arguments": arguments}
    draft.calls.append({"id": block.text("id"), "type": "function", "function": function})


OWN: dict[str, Callable[[Draft, Fields], None]] = {
    "text": _own_text,
    "thinking": _own_reasoning,
    "tool_use": _own_call,
}
