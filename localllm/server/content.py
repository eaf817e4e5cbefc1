"""Convert the content of a message to one string, or to texts, pictures and sounds.

Content is a string or a list of typed parts. Text parts are joined by line breaks, because chat templates expect a
string. Videos and files are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from localllm.server.structs import MISSING, Body, Wrong, read, wrong
from localllm.server.turn import Json
from localllm.server.uploads import Upload

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
UPLOADS = {  # types of pictures and sounds that are read, and the field that holds them
    "image_url": "image_url",
    "input_image": "image_url",
    "image": "source",
    "input_audio": "input_audio",
}
JOINT = "\n"


class ImageUrl(Body):
    """A picture in OpenAI's chat format."""

    url: str


class AudioData(Body):
    """A sound in OpenAI's chat format. Its format is found in the data."""

    data: str


class Source(Body):
    """A picture in Anthropic's format."""

    type: Literal["base64", "url"]
    data: str = ""
    url: str = ""


class Part(Body):
    """A part of a message's content."""

    type: str = "text"
    text: str | None = None
    refusal: str | None = None
    image_url: str | ImageUrl | None = None
    input_audio: AudioData | None = None
    source: Source | None = None

    def __post_init__(self) -> None:
        if self.type in MEDIA and self.type not in UPLOADS:
            raise Wrong("", f"{MEDIA[self.type]} input is not supported; send text")
        if self.type not in TEXTS and self.type not in UPLOADS:
            raise Wrong("type", f"unknown type of content; supported: {', '.join((*TEXTS, *UPLOADS))}")
        name = TEXTS.get(self.type) or UPLOADS[self.type]
        if getattr(self, name) is None:
            raise Wrong(name, MISSING)

    @property
    def content(self) -> str | Json:
        """The text, or a picture or a sound as a part of `Turn`'s format."""
        if self.type in TEXTS:
            return str(getattr(self, TEXTS[self.type]))
        if self.input_audio is not None:
            return Upload("audio", self.input_audio.data).part
        given = self.source or self.image_url
        if isinstance(given, Source):
            return Upload("image", given.url if given.type == "url" else given.data).part
        return Upload("image", given.url if isinstance(given, ImageUrl) else given or "").part


Parts = str | list[Part]


def joined(content: str | Sequence[Part] | None, where: str = "content") -> str:
    """Return the text of a content field, which is "" if it is missing. Raises BadRequest for pictures and sound."""
    found = contents(content)
    if not isinstance(found, str):
        raise wrong("image and audio input is not supported here; send text", where)
    return found


def contents(content: str | Sequence[Part] | None) -> str | list[Json]:
    """Return a content field as a text, or as a list of parts if it has pictures or sounds."""
    return content if isinstance(content, str) else together([part.content for part in content or ()])


def listed_contents(content: str | Sequence[Part] | None) -> list[str | Json]:
    """Return the texts, pictures and sounds of a content field."""
    return [content] if isinstance(content, str) else [part.content for part in content or ()]


def together(found: Sequence[str | Json]) -> str | list[Json]:
    """Return texts joined by line breaks, or with pictures and sounds as a list of parts."""
    texts = [each for each in found if isinstance(each, str)]
    if len(texts) == len(found):
        return JOINT.join(texts)
    return [{"type": "text", "text": each} if isinstance(each, str) else each for each in found]


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

    def __init__(self, role: str, *texts: str | Json, call_id: str = "") -> None:
        self.role, self.call_id = role, call_id
        self.texts = list(texts)  # and parts with pictures and sounds
        self.reasoning: list[str] = []
        self.calls: list[Json] = []

    def json(self) -> Json:
        """Return the message in `Turn`'s format."""
        found: Json = {"role": self.role, "content": together([text for text in self.texts if text])}
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
