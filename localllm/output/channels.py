"""Headers of messages in the output, for formats that have them: the kind of a message and its recipient."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from localllm.template.format import Channels

_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_OWN = {"assistant", "user", "all"}  # recipients that are not tools
HEADER_STARTS = ("<|channel|>", "<|start|>", "<|message|>", "<|constrain|>", "to=")
_OPEN = re.compile(r"(?:<\|channel\|>|<\|start\|>)(?:(?!<\|message\|>|<\|end\|>).)*<\|message\|>\s*\Z", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ChannelHeader:
    """The kind of a message. The kind "goes on" continues the previous message."""

    kind: Literal["content", "reasoning", "call", "goes on"]
    name: str = ""  # name of the tool in the header

    @classmethod
    def read(cls, channels: Channels, header: str) -> ChannelHeader:
        """Parse a header, given without its end marker."""
        if channels.kind == "arrows":
            name = header.removeprefix(channels.start).strip()
            return cls("content") if name in _OWN else cls("call", name)
        recipients = [name for name in _RECIPIENT.findall(header) if name not in _OWN]
        if recipients[-1:] == ["self"]:
            return cls("reasoning")
        if recipients:
            return cls("call", recipients[-1])
        named = _CHANNEL.findall(header)
        return cls("reasoning") if named[-1:] == ["analysis"] else cls("content")


def open_header(channels: Channels, prompt_tail: str) -> ChannelHeader | None:
    """Return the header of the message that the prompt begins, or None if the output starts with a header."""
    if channels.kind == "arrows":
        return None if prompt_tail.endswith(channels.start) else ChannelHeader("content")
    found = _OPEN.search(prompt_tail)
    return ChannelHeader.read(channels, found[0]) if found is not None else None
