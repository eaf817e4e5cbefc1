"""Convert Anthropic's messages and content blocks to the messages of `Turn`.

A user's message may contain tool results, which become separate messages before the user's text. Cache markers
(`cache_control`) are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta

from localllm.server.anthropic.stable import stable_prompt
from localllm.server.content import JOINT, MEDIA, TEXTS, Draft, Part, drafted, together, type_of
from localllm.server.structs import Body, read, wrong
from localllm.server.turn import Json

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


class Message(Body):
    """A message. The types of its blocks depend on the role."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Json]


Blocks = str | list[Json] | None
MessageList = Annotated[list[Message], Meta(min_length=1)]


def messages_json(messages: Sequence[Message], system: Blocks) -> list[Json]:
    """Return the messages of a request with `system` first. Consecutive messages of the same role are joined."""
    drafts: list[Draft] = []
    for number, message in enumerate(messages):
        _read(drafts, message, f"messages[{number}]")
    if all(draft.role == "system" for draft in drafts):
        raise wrong("expected a message with text, tool_use or tool_result", "messages")
    rules = read_blocks(system, "system")
    first = [{"role": "system", "content": rules}] if rules else []
    return first + [draft.json() for draft in drafts]


def read_blocks(blocks: Blocks, where: str) -> str:
    """Return the text of a field that is a string or a list of text blocks."""
    if blocks is None or isinstance(blocks, str):
        return stable_prompt(blocks or "")
    found = together(_listed(blocks, where))
    if not isinstance(found, str):
        raise wrong("image input is not supported here; send it in a user message", where)
    return found


def _listed(blocks: list[Json], where: str) -> list[str | Json]:
    """Return the texts and pictures of blocks."""
    return list(filter(None, (_text(block, f"{where}[{number}]") for number, block in enumerate(blocks))))


def _text(block: Json, where: str) -> str | Json | None:
    """Return the text or the picture of a block, or None if its type is skipped."""
    kind = type_of(block, where, "text")
    if kind == "search_result":
        found = read(block, SearchResult, where)
        return JOINT.join((found.title, found.source, read_blocks(found.content, f"{where}.content")))
    return None if kind in SKIPPED else _stable(read(block, Part, where).content)


def _stable(content: str | Json) -> str | Json:
    return stable_prompt(content) if isinstance(content, str) else content


def _read(drafts: list[Draft], message: Message, where: str) -> None:
    role, content = message.role, message.content
    if isinstance(content, str):
        drafted(drafts, role).texts.append(stable_prompt(content))
        return
    blocks = [(block, f"{where}.content[{number}]") for number, block in enumerate(content)]
    if role == "assistant":
        for each in blocks:
            _read_own(drafts, *each)
    else:
        _read_given(drafts, role, blocks)


def _read_given(drafts: list[Draft], role: str, blocks: list[tuple[Json, str]]) -> None:
    """Read the blocks of a user's message: tool results first, then all other blocks."""
    results = [_result(*each) for each in blocks if each[0].get("type") == RESULT]
    texts = [_text(*each) for each in blocks if each[0].get("type") != RESULT]
    drafts += results
    if not results or any(text is not None for text in texts):
        drafted(drafts, role).texts += [text for text in texts if text is not None]


class SearchResult(Body):
    """A search result in the user's message."""

    title: str = ""
    source: str = ""
    content: Blocks = None


class ToolResult(Body):
    """The result of a tool."""

    tool_use_id: str
    content: Blocks = None
    is_error: bool = False


def _result(block: Json, where: str) -> Draft:
    found = read(block, ToolResult, where)
    place = f"{where}.content"
    texts = _listed(found.content, place) if isinstance(found.content, list) else [read_blocks(found.content, place)]
    text = texts[0] if texts and isinstance(texts[0], str) else ""
    if found.is_error and not text.startswith(ERROR):
        texts = [ERROR + text, *texts[bool(text) :]]
    return Draft("tool", *texts, call_id=found.tool_use_id)


# -- the assistant's blocks ------------------------------------------------------------------------------------------


class Thinking(Body):
    """A reasoning block."""

    thinking: str = ""


class ToolUse(Body):
    """A tool call."""

    id: str
    name: str
    input: dict[str, Any] = {}


def _read_own(drafts: list[Draft], block: Json, where: str) -> None:
    kind = type_of(block, where, "text")
    if kind in SKIPPED:
        return
    draft = drafted(drafts, "assistant")
    if kind == "thinking":
        draft.reasoning += filter(None, [read(block, Thinking, where).thinking])
    elif kind == "tool_use":
        use = read(block, ToolUse, where)
        function = {"name": use.name, "arguments": json.dumps(use.input, ensure_ascii=False)}
        draft.calls.append({"id": use.id, "type": "function", "function": function})
    elif kind in TEXTS or kind in MEDIA:
        draft.texts.append(_stable(read(block, Part, where).content))
    else:
        raise wrong("unknown type of block", where, "type")
