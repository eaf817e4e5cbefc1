"""Convert the input of a responses request, a string or a list of items, to messages.

Consecutive items of the assistant (reasoning, text, calls) form one message.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

from localllm.server.content import JOINT, Draft, Parts, drafted, listed_contents, type_of
from localllm.server.openai.messages import ROLES, arguments_text, custom_arguments, tool_call
from localllm.server.structs import MISSING, Body, Wrong, read, wrong
from localllm.server.turn import Json

NAMESPACE = "__"  # separator between the name of a namespace and the name of a tool in it
OWN = ("type", "id", "call_id", "status")  # fields of a call that are not arguments


def read_input(value: str | Sequence[Json]) -> list[Json]:
    """Return the messages of `input`, which may be empty."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}] if value else []
    drafts: list[Draft] = []
    for number, item in enumerate(value):
        where = f"input[{number}]"
        read(item, _kind_of(item, where), where).add(drafts, item)
    return [draft.json() for draft in drafts]


def flat_name(namespace: str, name: str) -> str:
    """Return the name of a namespaced tool as the model sees it."""
    return f"{namespace}{NAMESPACE}{name}" if namespace else name


class Item(Body):
    """An item of the input. Items of this type itself are skipped."""

    def add(self, drafts: list[Draft], data: Json) -> None:
        """Add the item to the messages that are being read."""


class Message(Item):
    """A message of any role."""

    role: Literal["user", "assistant", "system", "developer"]
    content: Parts

    def add(self, drafts: list[Draft], data: Json) -> None:
        role = ROLES.get(self.role, self.role)
        if role == "assistant":
            drafted(drafts, role).texts += listed_contents(self.content)
        else:
            drafts.append(Draft(role, *listed_contents(self.content)))


class Thought(Body):
    """A part of the reasoning."""

    text: str = ""


class ReasoningItem(Item):
    """The reasoning or its summary. Encrypted reasoning of other servers cannot be read."""

    content: list[Thought] = []
    summary: list[Thought] = []

    def add(self, drafts: list[Draft], data: Json) -> None:
        text = JOINT.join(each.text for each in self.content) or JOINT.join(each.text for each in self.summary)
        if not text:
            return
        draft = drafted(drafts, "assistant")
        if draft.texts or draft.calls:
            draft = Draft("assistant")
            drafts.append(draft)
        draft.reasoning.append(text)


class FunctionCall(Item):
    """A call of a function."""

    call_id: str
    name: str
    namespace: str = ""
    arguments: str | Json = "{}"

    def add(self, drafts: list[Draft], data: Json) -> None:
        self._add(drafts, arguments_text(self.arguments))

    def _add(self, drafts: list[Draft], arguments: str) -> None:
        call = tool_call(self.call_id, flat_name(self.namespace, self.name), arguments)
        drafted(drafts, "assistant").calls.append(call)


class CustomCall(FunctionCall, kw_only=True):
    """A call of a custom tool."""

    input: str

    def add(self, drafts: list[Draft], data: Json) -> None:
        self._add(drafts, custom_arguments(self.input))


class OtherCall(Item):
    """A call of a built-in tool that the client ran, such as local_shell. Calls that OpenAI ran are skipped."""

    type: str
    call_id: str | None = None
    namespace: str = ""

    def add(self, drafts: list[Draft], data: Json) -> None:
        if self.call_id is not None:
            arguments = {name: value for name, value in data.items() if name not in OWN}
            kind = flat_name(self.namespace, self.type.removesuffix("_call"))
            call = tool_call(self.call_id, kind, json.dumps(arguments, ensure_ascii=False))
            drafted(drafts, "assistant").calls.append(call)


class OtherOutput(Item):
    """The output of a built-in tool, which may have any type."""

    call_id: str = ""
    id: str | None = None
    output: Any = None

    def __post_init__(self) -> None:
        if not self.call_id and self.id is None:
            raise Wrong("id", MISSING)

    def add(self, drafts: list[Draft], data: Json) -> None:
        output = data.get("output")
        text = output if isinstance(output, str) else json.dumps(output, ensure_ascii=False)
        drafts.append(Draft("tool", text, call_id=self.call_id or self.id or ""))


class Output(OtherOutput):
    """The output of a function or custom tool: a text, parts, or any other value."""

    output: Parts | Json | float | bool | None = None

    def add(self, drafts: list[Draft], data: Json) -> None:
        if isinstance(self.output, list):
            drafts.append(Draft("tool", *listed_contents(self.output), call_id=self.call_id or self.id or ""))
        else:
            OtherOutput.add(self, drafts, data)


class Refused(Item):
    """An item that is refused, with the reason for each type."""

    type: str = "item_reference"

    def __post_init__(self) -> None:
        raise Wrong(*REFUSED[self.type])


REFUSED = {
    "item_reference": (
        "type",
        "references to items are not supported: nothing is stored; send the items themselves",
    ),
    "compaction": ("type", "compacted conversations of other servers cannot be read; send the items themselves"),
    "computer_call_output": ("output", "image input is not supported; send text"),
}
KINDS: dict[str, type[Item]] = {
    "message": Message,
    "reasoning": ReasoningItem,
    "function_call": FunctionCall,
    "function_call_output": Output,
    "custom_tool_call": CustomCall,
    "custom_tool_call_output": Output,
    **dict.fromkeys(REFUSED, Refused),
    "additional_tools": Item,  # `tools.py` reads them
    "compaction_trigger": Item,
    "configuration_update": Item,
    "mcp_list_tools": Item,
    "mcp_approval_request": Item,
    "mcp_approval_response": Item,
    "program": Item,
    "program_output": Item,
    "tool_search_call": Item,
    "tool_search_output": Item,
}


def _kind_of(item: Json, where: str) -> type[Item]:
    kind = type_of(item, where, "item_reference" if item.get("role") is None else "message")
    if kind in KINDS:
        return KINDS[kind]
    if kind.endswith("_call_output"):
        return OtherOutput
    if kind.endswith("_call"):
        return OtherCall
    raise wrong(f"unknown type of item; supported: {', '.join(KINDS)}", where, "type")
