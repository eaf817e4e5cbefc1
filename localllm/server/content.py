"""Convert the content of a message to one string.

Content is a string or a list of typed parts. Text parts are joined by line breaks, because chat templates expect a
string. Images, audio and files are refused.
"""

from __future__ import annotations

from localllm.server.errors import BadRequest
from localllm.server.fields import Fields
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


def read_text_field(fields: Fields, name: str) -> str | None:
    """Return the text of a content field, or None if it is missing or null. Raise BadRequest for types other than
    text."""
    value = fields.data.get(name)
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise fields.wrong(name, "expected a text or a list of parts")
    return JOINT.join(part_text(part) for part in fields.each(name))


def part_text(part: Fields) -> str:
    """Return the text of a part."""
    kind = part.text("type", "text")
    if kind not in TEXTS:
        raise not_text(part, kind)
    return part.text(TEXTS[kind])


def not_text(part: Fields, kind: str) -> BadRequest:
    """Return the error for a part that is not text."""
    if kind in MEDIA:
        return BadRequest(f"{part.where}: {MEDIA[kind]} input is not supported; send text", part.where)
    return part.wrong("type", f"unknown type of content; supported: {', '.join(TEXTS)}")


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
