"""The output items of a response: their events in a stream, and their final form."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import ClassVar

from localllm.server.openai.head import new_id
from localllm.server.openai.responses.tools import Named
from localllm.server.turn import Json

Status = str  # in_progress, completed or incomplete


class Item:
    """An output item. Its methods yield events with all fields except `sequence_number`."""

    PREFIX: ClassVar[str]

    def __init__(self, index: int) -> None:
        self.id = new_id(self.PREFIX)
        self.status: Status = "in_progress"
        self._index = index
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def json(self) -> Json:
        """Return the item."""
        raise NotImplementedError

    def opened(self) -> Iterator[Json]:
        """Yield the events that start the item."""
        yield {"type": "response.output_item.added", "output_index": self._index, "item": self.json()}

    def add(self, text: str, logprobs: list[Json]) -> Iterator[Json]:
        """Append text to the item, and yield the events."""
        raise NotImplementedError

    def closed(self, status: Status) -> Iterator[Json]:
        """Yield the events that end the item."""
        self.status = status
        yield {"type": "response.output_item.done", "output_index": self._index, "item": self.json()}

    def _event(self, kind: str) -> Json:
        return {"type": f"response.{kind}", "item_id": self.id, "output_index": self._index}

    def _part_event(self, kind: str) -> Json:
        return self._event(kind) | {"content_index": 0}


class TextItem(Item):
    """An item with one part of text."""

    TEXT: ClassVar[str]  # the type of the text: reasoning_text or output_text

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self._logprobs: list[Json] = []

    @property
    def _content(self) -> list[Json]:
        return [self._part(self.text)] if self.status != "in_progress" else []

    def opened(self) -> Iterator[Json]:
        yield from super().opened()
        yield self._part_event("content_part.added") | {"part": self._part("")}

    def add(self, text: str, logprobs: list[Json]) -> Iterator[Json]:
        self._texts.append(text)
        self._logprobs += logprobs
        yield self._part_event(f"{self.TEXT}.delta") | {"delta": text} | self._extra(logprobs)

    def closed(self, status: Status) -> Iterator[Json]:
        yield self._part_event(f"{self.TEXT}.done") | {"text": self.text} | self._extra(self._logprobs)
        yield self._part_event("content_part.done") | {"part": self._part(self.text)}
        yield from super().closed(status)

    def _extra(self, logprobs: list[Json]) -> Json:
        """Return the fields of an event besides the text."""
        return {}

    def _part(self, text: str) -> Json:
        return {"type": self.TEXT, "text": text}


class ReasoningItem(TextItem):
    """A reasoning item."""

    PREFIX, TEXT = "rs_", "reasoning_text"

    def json(self) -> Json:
        return {
            "id": self.id,
            "type": "reasoning",
            "status": self.status,
            "summary": [],
            "content": self._content,
            "encrypted_content": None,
        }


class Message(TextItem):
    """A message with the text of the output."""

    PREFIX, TEXT = "msg_", "output_text"

    def json(self) -> Json:
        return {
            "id": self.id,
            "type": "message",
            "status": self.status,
            "role": "assistant",
            "content": self._content,
        }

    def _extra(self, logprobs: list[Json]) -> Json:
        return {"logprobs": logprobs}

    def _part(self, text: str) -> Json:
        return super()._part(text) | {"annotations": [], "logprobs": list(self._logprobs)}


class FunctionCall(Item):
    """A function call."""

    PREFIX = "fc_"

    def __init__(self, index: int, call_id: str, tool: Named) -> None:
        super().__init__(index)
        self._call_id, self._tool = call_id, tool

    def json(self) -> Json:
        return self._call("function_call") | {"arguments": self._arguments}

    @property
    def _arguments(self) -> str:
        return self.text or ("{}" if self.status != "in_progress" else "")

    def add(self, text: str, logprobs: list[Json]) -> Iterator[Json]:
        self._texts.append(text)
        yield self._event("function_call_arguments.delta") | {"delta": text}

    def closed(self, status: Status) -> Iterator[Json]:
        done = {"arguments": self.text or "{}", "name": self._tool.name}
        yield self._event("function_call_arguments.done") | done
        yield from super().closed(status)

    def _call(self, kind: str) -> Json:
        found = {
            "id": self.id,
            "type": kind,
            "status": self.status,
            "call_id": self._call_id,
            "name": self._tool.name,
        }
        return found | ({"namespace": self._tool.namespace} if self._tool.namespace else {})


class CustomCall(FunctionCall):
    """A call of a custom tool. Its input is a string inside the arguments, and is sent in one piece."""

    PREFIX = "ctc_"

    def json(self) -> Json:
        return self._call("custom_tool_call") | {"input": self._input if self.status != "in_progress" else ""}

    @property
    def _input(self) -> str:
        """Return the `input` string of the arguments, or the raw arguments if they are not an object with `input`."""
        try:
            found = json.loads(self.text or "{}").get("input", self.text)
        except (ValueError, AttributeError, RecursionError):
            found = self.text
        return found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)

    def add(self, text: str, logprobs: list[Json]) -> Iterator[Json]:
        self._texts.append(text)
        yield from ()

    def closed(self, status: Status) -> Iterator[Json]:
        yield self._event("custom_tool_call_input.delta") | {"delta": self._input}
        yield self._event("custom_tool_call_input.done") | {"input": self._input}
        yield from Item.closed(self, status)
