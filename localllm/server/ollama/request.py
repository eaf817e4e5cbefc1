"""Convert Ollama's requests to turns and completions: messages, tools, format, think and options."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta

from localllm.server.errors import BadRequest, NotSupported
from localllm.server.info import ModelInfo
from localllm.server.openai.generation import schema_structure
from localllm.server.openai.messages import tool_call
from localllm.server.sampling import OLLAMA, OllamaSamplers, checked, samplers_of
from localllm.server.service import Service
from localllm.server.settings import ServerSettings
from localllm.server.structs import MAX_INT, Body, ShortText, Wrong, listed, read
from localllm.server.turn import Generation, Json, Structure, Thinking

MAX_MESSAGES = 10_000
MAX_CALLS = 1024
MAX_TOOLS = 1024
MAX_PROBS = 20
ROLES = ("system", "user", "assistant", "tool")


class Options(OllamaSamplers):
    """The options of the model. Unknown options only affect loading, and are ignored as in Ollama."""

    seed: int | None = None
    repeat_last_n: Annotated[int, Meta(ge=-1, le=MAX_INT)] | None = None  # -1: the whole context
    num_predict: Annotated[int, Meta(ge=-2, le=MAX_INT)] = -1
    stop: ShortText | Annotated[list[ShortText], Meta(max_length=256)] = ""
    tfs_z: float = 1  # obsolete; 1 disables it


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
    """A request that may say how long the model stays loaded."""

    keep_alive: float | str = 1

    def __post_init__(self) -> None:
        alive = self.keep_alive
        if isinstance(alive, str) and _seconds(alive) is None and not any(letter.isdigit() for letter in alive):
            raise Wrong("keep_alive", 'expected a number of seconds, or a text such as "5m"')

    @property
    def unloads(self) -> bool:
        """Whether `keep_alive` is 0. A text is a number with a unit, or several of them, such as "5m" or "1h30m"."""
        return (_seconds(self.keep_alive) if isinstance(self.keep_alive, str) else self.keep_alive) == 0


def _seconds(text: str) -> float | None:
    try:
        return float(text.rstrip("nusmhµ"))
    except ValueError:
        return None


class AnswerBody(KeptBody):
    """The fields that /api/chat and /api/generate share."""

    options: Options | None = None
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
    images: list[Any] = []

    def __post_init__(self) -> None:
        self.role = self.role.lower()
        if self.role not in ROLES:
            raise Wrong("role", f"expected one of {', '.join(ROLES)}")
        refuse_images(self.images)


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


def refuse_images(images: list[Any]) -> None:
    """Raise an error for the struct that has these images."""
    if images:
        raise Wrong("images", "models here read text only")


def generation_of(
    body: AnswerBody, service: Service, model: ModelInfo, settings: ServerSettings, client: str
) -> Generation:
    """Return the options of a request."""
    options = body.options or Options()
    if options.tfs_z != 1:
        raise NotSupported("options.tfs_z is not supported; leave it out")
    sampling = samplers_of(options, OLLAMA, "options")
    if options.seed is not None:
        sampling["seed"] = checked("seed", options.seed, False, "options", "seed")
    if options.repeat_last_n is not None:
        sampling["repeat_last_n"] = model.context if options.repeat_last_n == -1 else options.repeat_last_n
    return Generation(
        sampling=sampling,
        max_tokens=options.num_predict if options.num_predict > 0 else settings.max_tokens,
        stops=tuple(filter(None, listed(options.stop))),
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
        message: Json = {"role": each.role, "content": each.content}
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
