"""Convert Ollama's requests to turns and completions: messages, tools, format, think and options."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Annotated, Literal

from msgspec import Meta
from starlette.requests import Request

from localllm.base.errors import LocalLLMError
from localllm.server.content import together
from localllm.server.derived import OllamaOptions, sampling_of, stops_of
from localllm.server.errors import BadRequest
from localllm.server.info import ModelInfo
from localllm.server.openai.generation import schema_structure
from localllm.server.openai.messages import tool_call
from localllm.server.permission import may_unload
from localllm.server.service import Service
from localllm.server.settings import ServerSettings
from localllm.server.structs import Body, Wrong, read
from localllm.server.turn import Generation, Json, Structure, Thinking
from localllm.server.uploads import Upload

MAX_MESSAGES = 10_000
MAX_CALLS = 1024
MAX_TOOLS = 1024
MAX_PROBS = 20
MAX_IMAGES = 256
Images = Annotated[list[str], Meta(max_length=MAX_IMAGES)]
ROLES = ("system", "user", "assistant", "tool")
_DURATION = re.compile(r"([-+]?)((?:\d{1,9}(?:\.\d{0,9})?(?:ns|us|µs|ms|s|m|h))+|\d{1,9}(?:\.\d{0,9})?)")
MAX_SECONDS = 10 * 365 * 86_400
_UNITS = {"": 1.0, "ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


class ModelBody(Body):
    """The model of a request, under its current or older name."""

    model: str | None = None
    name: str = ""

    @property
    def wanted(self) -> str:
        return self.name if self.model is None else self.model

    def find(self, service: Service) -> ModelInfo:
        """Return the model of a request. "name:latest" also means "name", since models without a tag are listed with
        `latest`."""
        known = {model.id for model in service.models()}
        short = self.wanted.removesuffix(":latest")
        return service.find(short if self.wanted not in known and short in known else self.wanted)

    def shown(self, model: ModelInfo) -> str:
        """Return the model name from the request, which replies repeat."""
        return self.model or model.id


class KeptBody(ModelBody):
    """A request that may say how long the model stays loaded: in seconds, or as a text such as "5m" or "1h30m"."""

    keep_alive: float | str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.keep_alive, str) and _seconds(self.keep_alive) is None:
            raise Wrong("keep_alive", 'expected a number of seconds, or a text such as "5m"')

    @property
    def kept(self) -> float | None:
        """The seconds to stay loaded without requests; None: until memory is needed."""
        given = _seconds(self.keep_alive) if isinstance(self.keep_alive, str) else self.keep_alive
        return None if given is None or given < 0 else min(given, MAX_SECONDS)

    def keep(self, request: Request, service: Service, settings: ServerSettings, model: ModelInfo) -> None:
        """Let the model stay loaded as the request says, if its client may decide that."""
        try:
            may_unload(settings, request)
        except LocalLLMError:
            if self.kept == 0 and self.only_loads:
                raise
            return
        service.registry.keep(model.id, self.kept)

    @property
    def only_loads(self) -> bool:
        """Whether the request has no prompt, and only loads or unloads the model."""
        return False


def _seconds(text: str) -> float | None:
    """Return the seconds of a duration, or None for other texts."""
    number = _DURATION.fullmatch(text.strip())
    if number is None:
        return None
    parts = re.findall(r"([\d.]+)([a-zµ]*)", number[2])
    total = sum(float(amount) * _UNITS[unit] for amount, unit in parts)
    return -total if number[1] == "-" else total


class AnswerBody(KeptBody):
    """The fields that /api/chat and /api/generate share."""

    options: OllamaOptions | None = None
    format: Literal["", "json"] | Json = ""
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_PROBS)] = 0
    stream: bool = True


class Function(Body):
    """A called function."""

    name: str
    arguments: Json = {}


class Call(Body):
    """A tool call of the assistant."""

    function: Function
    id: str = ""


class Message(Body):
    """A message of a chat."""

    role: str
    content: str = ""
    thinking: str = ""
    tool_calls: Annotated[list[Call], Meta(max_length=MAX_CALLS)] = []
    tool_call_id: str = ""
    tool_name: str | None = None
    name: str = ""
    images: Images = []

    def __post_init__(self) -> None:
        self.role = self.role.lower()
        if self.role not in ROLES:
            raise Wrong("role", f"expected one of {', '.join(ROLES)}")


class Parameters(Body):
    """The definition of a function."""

    name: str
    parameters: Json = {}


class Tool(Body):
    """A tool."""

    function: Parameters
    type: Literal["function"] = "function"


class ChatBody(AnswerBody):
    """The body of /api/chat."""

    messages: Annotated[list[Message], Meta(max_length=MAX_MESSAGES)] = []
    tools: Annotated[list[Json], Meta(max_length=MAX_TOOLS)] = []

    @property
    def only_loads(self) -> bool:
        return not self.messages


def with_images(images: Sequence[str], text: str) -> str | list[Json]:
    """Return the content of a message: pictures, in base64, then the text."""
    pictures: list[str | Json] = [Upload("image", image).part for image in images]
    return together([*pictures, text]) if pictures else text


def generation_of(
    body: AnswerBody, service: Service, model: ModelInfo, settings: ServerSettings, client: str
) -> Generation:
    """Return the options of a request."""
    options = body.options or OllamaOptions()
    return Generation(
        sampling=sampling_of(options, model.context),
        max_tokens=options.num_predict if options.num_predict > 0 else settings.max_tokens,
        stops=stops_of(options),
        logprobs=body.top_logprobs if body.logprobs else None,
        structure=_structure(body.format),
        client=client,
    )


def _structure(format: str | Json) -> Structure | None:
    if isinstance(format, str):
        return Structure(any_object=True) if format else None
    return schema_structure(format)


def thinking_of(body: AnswerBody, model: ModelInfo) -> Thinking:
    """Return the reasoning options for `think`: true, false or a level."""
    if body.think is None:
        return Thinking()
    if body.think and "thinking" not in model.capabilities:
        raise BadRequest(f'"{model.id}" does not support thinking', "think")
    if isinstance(body.think, bool):
        return Thinking(enabled=body.think)
    return Thinking(enabled=True, effort="high" if body.think == "max" else body.think)


def messages_json(messages: Sequence[Message]) -> list[Json]:
    """Return the messages in OpenAI's format. Calls without an id get one; a tool message answers the oldest call."""
    found: list[Json] = []
    unanswered: list[tuple[str, str]] = []  # (id, name) of each unanswered call
    for each in messages:
        message: Json = {"role": each.role, "content": with_images(each.images, each.content)}
        if each.thinking:
            message["reasoning_content"] = each.thinking
        if each.role == "assistant" and each.tool_calls:
            calls = [_call(call, f"call_{len(found)}_{number}") for number, call in enumerate(each.tool_calls)]
            message["tool_calls"] = calls
            unanswered += [(call["id"], call["function"]["name"]) for call in calls]
        if each.role == "tool":
            message |= _answered(each, unanswered)
        found.append(message)
    return found


def _call(call: Call, id: str) -> Json:
    arguments = json.dumps(call.function.arguments, ensure_ascii=False)
    return tool_call(call.id or id, call.function.name, arguments)


def _answered(message: Message, unanswered: list[tuple[str, str]]) -> Json:
    """Return the call that a tool message answers: by id, else by name, else the oldest call."""
    id, name = message.tool_call_id, message.name if message.tool_name is None else message.tool_name
    same = next((call for call in unanswered if call[0] == id or (not id and call[1] == name)), None)
    call = same or (unanswered[0] if unanswered and not id and not name else None)
    if call is not None:
        unanswered.remove(call)
    found = {"tool_call_id": call[0] if call else id, "name": name or (call[1] if call else "")}
    return {key: value for key, value in found.items() if value}


def tools_of(tools: Sequence[Json], model: ModelInfo) -> Sequence[Json]:
    """Return the tools, which have OpenAI's format."""
    for number, tool in enumerate(tools):
        read(tool, Tool, f"tools[{number}]")
    if tools and "tools" not in model.capabilities:
        raise BadRequest(f'"{model.id}" does not support tools', "tools")
    return [tool | {"type": "function"} for tool in tools]
