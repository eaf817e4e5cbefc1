"""Convert the content of a message to one string.

Content is a string or a list of typed parts. Text parts are joined by line breaks, because chat templates expect a
string. Images, audio and files are refused.
"""

from __future__ import annotations

from collections.abc import Sequence

from localllm.server.structs import MISSING, Body, Wrong, read, wrong
from localllm.server.turn import Json

# Types of text parts and the field that holds the text, in OpenAI's chat and responses APIs and in Anthropic's API.
TEXTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
}
MEDIA = {
    "image_url": "image",
    "input_image": "image",
    "image": "image",
    "computer_screenshot": "image",
    "input_audio": "audio",
    "audio": "audio",
    "video_url": "video",
    "input_video": "video",
    "file": "file",
    "input_file": "file",
    "document": "document",
    "container_upload": "file",
}
JOINT = "\n"


class Part(Body):
    """A part of a message's content."""

    type: str = "text"
    text: str | None = None
    refusal: str | None = None

    def __post_init__(self) -> None:
        if self.type in MEDIA:
            raise Wrong("", f"{MEDIA[self.type]} input is not supported; send text")
        if self.type not in TEXTS:
            raise Wrong("type", f"unknown type of content; supported: {', '.join(TEXTS)}")
        if getattr(self, TEXTS[self.type]) is None:
            raise Wrong(TEXTS[self.type], MISSING)

    def __str__(self) -> str:
        return str(getattr(self, TEXTS[self.type]))


Parts = str | list[Part]


def joined(content: str | Sequence[Part] | None) -> str:
    """Return the text of a content field, which is "" if it is missing."""
    return content if isinstance(content, str) else JOINT.join(map(str, content or ()))


class _Typed(Body):
    type: str | None = None


def type_of(item: Json, where: str, default: str = "") -> str:
    """Return the `type` of an object that has one of several forms; raise BadRequest if it is required."""
    found = read(item, _Typed, where).type
    if found is None and not default:
        raise wrong(MISSING, where, "type")
    return default if found is None else found


class Draft:
    """A message that is being read. Its texts are joined at the end, since joining them one by one would take quadratic
    time."""

    __slots__ = ("call_id", "calls", "reasoning", "role", "texts")

    def __init__(self, role: str, *texts: str, call_id: str = "") -> None:
        self.role, self.call_id = role, call_id
        self.texts = list(texts)
        self.reasoning: list[str] = []
        self.calls: list[Json] = []

    def json(self) -> Json:
        """Return the message in `Turn`'s format."""
        found: Json = {"role": self.role, "content": JOINT.join(filter(None, self.texts))}
        if self.reasoning:
            found["reasoning_content"] = JOINT.join(self.reasoning)
        if self.calls:
            found["tool_calls"] = self.calls
        return found | ({"tool_call_id": self.call_id} if self.role == "tool" else {})


def drafted(drafts: list[Draft], role: str) -> Draft:
    """Return the last draft if it has this role; otherwise append a new draft and return it."""
    if not drafts or drafts[-1].role != role:
        drafts.append(Draft(role))
    return drafts[-1]
