"""Convert Ollama's requests to turns and completions: messages, tools, format, think and options."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

from localllm.server.errors import BadRequest, NotSupported
from localllm.server.fields import Fields
from localllm.server.interface import Service
from localllm.server.settings import ServerSettings
from localllm.server.turn import Generation, Json, ModelInfo, Structure, Thinking

MAX_MESSAGES = 10_000
MAX_CALLS = 1024
MAX_TOOLS = 1024
MAX_STOPS = 256
MAX_PROBS = 20
MOST = 2**31 - 1
ROLES = ("system", "user", "assistant", "tool")
LEVELS = ("low", "medium", "high", "max")


class Knob(NamedTuple):
    """An Ollama option with an equivalent in SamplingOptions."""

    name: str
    option: str
    whole: bool = False


KNOBS = (
    Knob("seed", "seed", whole=True),
    Knob("temperature", "temperature"),
    Knob("top_k", "top_k", whole=True),
    Knob("top_p", "top_p"),
    Knob("min_p", "min_p"),
    Knob("typical_p", "typical_p"),
    Knob("repeat_penalty", "repeat_penalty"),
    Knob("presence_penalty", "presence_penalty"),
    Knob("frequency_penalty", "frequency_penalty"),
    Knob("mirostat", "mirostat", whole=True),
    Knob("mirostat_tau", "mirostat_tau"),
    Knob("mirostat_eta", "mirostat_eta"),
)
# Obsolete options that change the output, with the value that disables each. Other unknown options only affect loading.
OFF = {"tfs_z": 1}


def model_of(fields: Fields, service: Service) -> ModelInfo:
    """Return the model of a request. "name:latest" also means "name", since models without a tag are listed with
    `latest`."""
    name = fields.text("model", fields.text("name", ""))
    known = {model.id for model in service.models()}
    short = name.removesuffix(":latest")
    return service.find(short if name not in known and short in known else name)


def model_name(fields: Fields, model: ModelInfo) -> str:
    """Return the model name from the request, which replies repeat."""
    return fields.text("model", "") or model.id


def generation_of(
    fields: Fields, service: Service, model: ModelInfo, settings: ServerSettings, client: str
) -> Generation:
    """Read `options`, `format` and `logprobs`. Unknown options are ignored, as in Ollama."""
    options = Fields(fields.object("options", {}), "options")
    for name, off in OFF.items():
        if options.number(name, off) != off:
            raise NotSupported(f"options.{name} is not supported; leave it out")
    sampling = _sampling(options, model)
    service.sampling_defaults(model.id).changed(sampling)  # raises OptionError for values out of range
    most = options.integer("num_predict", -1, -2, MOST)
    top = fields.integer("top_logprobs", 0, 0, MAX_PROBS)
    return Generation(
        sampling=sampling,
        max_tokens=most if most > 0 else settings.max_tokens,
        stops=tuple(stop for stop in options.short_texts("stop", MAX_STOPS) if stop),
        logprobs=top if fields.flag("logprobs", False) else None,
        structure=_structure(fields),
        client=client,
    )


def _sampling(options: Fields, model: ModelInfo) -> Json:
    found: Json = {}
    for knob in KNOBS:
        if options.has(knob.name):
            found[knob.option] = _value(options, knob)
    if (last := options.optional_integer("repeat_last_n", -1, MOST)) is not None:
        found["repeat_last_n"] = model.context if last == -1 else last
    return found


def _value(options: Fields, knob: Knob) -> float:
    if not knob.whole:
        return options.number(knob.name)
    return options.integer(knob.name, None, -MOST, 2**64 - 1 if knob.name == "seed" else MOST)


def _structure(fields: Fields) -> Structure | None:
    value = fields.data.get("format")
    if value is None or value == "":
        return None
    if value == "json":
        return Structure(any_object=True)
    if not isinstance(value, dict):
        raise fields.wrong("format", 'expected "json" or a JSON schema')
    return Structure(schema=value) if value else Structure(any_object=True)


def thinking_of(fields: Fields, model: ModelInfo) -> Thinking:
    """Read `think`: true, false or a level."""
    value = fields.data.get("think")
    if value is None:
        return Thinking()
    if not (isinstance(value, bool) or (isinstance(value, str) and value in LEVELS)):
        raise fields.wrong("think", f"expected true, false or one of {', '.join(LEVELS)}")
    if value and "thinking" not in model.capabilities:
        raise BadRequest(f'"{model.id}" does not support thinking', "think")
    if isinstance(value, bool):
        return Thinking(enabled=value)
    return Thinking(enabled=True, effort="high" if value == "max" else value)


def messages_of(fields: Fields) -> list[Json]:
    """Return the messages in OpenAI's format. Calls without an id get one; a tool message answers the oldest call."""
    found: list[Json] = []
    unanswered: list[tuple[str, str]] = []  # (id, name) of each unanswered call
    for each in fields.each("messages", MAX_MESSAGES):
        refuse_images(each)
        role = each.text("role").lower()
        if role not in ROLES:
            raise each.wrong("role", f"expected one of {', '.join(ROLES)}")
        message: Json = {"role": role, "content": each.text("content", "")}
        if each.text("thinking", ""):
            message["reasoning_content"] = each.text("thinking")
        if role == "assistant" and each.has("tool_calls"):
            calls = _calls(each, f"call_{len(found)}_")
            message["tool_calls"] = calls
            unanswered += [(call["id"], call["function"]["name"]) for call in calls]
        if role == "tool":
            message |= _answered(each, unanswered)
        found.append(message)
    return found


def _calls(message: Fields, prefix: str) -> list[Json]:
    found = []
    for number, call in enumerate(message.each("tool_calls", MAX_CALLS)):
        function = call.inner("function")
        arguments = json.dumps(function.object("arguments", {}), ensure_ascii=False)
        found.append(
            {
                "id": call.text("id", "") or f"{prefix}{number}",
                "type": "function",
                "function": {"name": function.text("name"), "arguments": arguments},
            }
        )
    return found


def _answered(message: Fields, unanswered: list[tuple[str, str]]) -> Json:
    """Return the call that a tool message answers: by id, else by name, else the oldest call."""
    id, name = message.text("tool_call_id", ""), message.text("tool_name", message.text("name", ""))
    same = next((call for call in unanswered if call[0] == id or (not id and call[1] == name)), None)
    call = same or (unanswered[0] if unanswered and not id and not name else None)
    if call is not None:
        unanswered.remove(call)
    found = {"tool_call_id": call[0] if call else id, "name": name or (call[1] if call else "")}
    return {key: value for key, value in found.items() if value}


def tools_of(fields: Fields, model: ModelInfo) -> Sequence[Json]:
    """Return the tools, which have OpenAI's format."""
    found = []
    for tool in fields.each("tools", MAX_TOOLS):
        tool.choice("type", ("function",), "function")
        function = tool.inner("function")
        function.text("name")
        function.object("parameters", {})
        found.append(tool.data | {"type": "function"})
    if found and "tools" not in model.capabilities:
        raise BadRequest(f'"{model.id}" does not support tools', "tools")
    return found


def refuse_images(fields: Fields) -> None:
    if fields.list("images", ()):
        raise BadRequest(f"{fields.path('images')}: models here read text only", fields.path("images"))


def check_keep_alive(fields: Fields) -> bool:
    """Check `keep_alive`, a number of seconds or a string such as "5m". Return whether it is 0, which means unload."""
    value = fields.data.get("keep_alive")
    if value is None:
        return False
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise fields.wrong("keep_alive", 'expected a number of seconds, or a text such as "5m"')
    if isinstance(value, str):
        number = value.rstrip("nusmhµ")
        try:
            return float(number or "x") == 0
        except ValueError:
            if any(letter.isdigit() for letter in value):
                return False  # more than one unit, such as 1h30m
            raise fields.wrong("keep_alive", 'expected a number of seconds, or a text such as "5m"') from None
    return value == 0
