"""`ChatTemplate`: a conversation becomes the text that a model was trained on.

Rendering is a pure function of template and conversation, so the engine may render the whole history with every turn
and compare tokens with what is cached.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import product
from types import TracebackType
from typing import Any, NoReturn

from jinja2 import TemplateSyntaxError
from jinja2.environment import Template

from localllm.template.errors import TemplateError, TemplateLimit, TemplateRejected
from localllm.template.sandbox import BUDGET, Meter, MeteredEnvironment

Message = Mapping[str, Any]  # role, content, and what else a template may know: tool_calls, name, reasoning_content

_FILE = "<chat template>"  # as Python's tracebacks name it
_MAX_SOURCE = 1 << 20  # characters
_SYSTEM = ("system", "developer")

_NOTE_PARTS = "the chat template wants message contents as lists of parts; they were given so"
_NOTE_MERGED = "the chat template takes no system message; it was put before the first user message"
_NOTE_TURNS = "the chat template wants user and assistant in turn; messages of one role in a row were joined"
_NOTE_LEFT_OUT = "the chat template leaves the {} message out; the model does not see it"


@dataclass(frozen=True, slots=True)
class Rendered:
    """The text, and what had to be changed in the conversation for the template to take it (to be shown once)."""

    text: str
    notes: tuple[str, ...] = ()


class ChatTemplate:
    """A compiled template. `bos` and `eos` are token texts. `stops` are texts that end an answer besides the tokens.

    TemplateError, with the line, for a source that is no template.
    """

    def __init__(
        self,
        source: str,
        bos: str,
        eos: str,
        stops: tuple[str, ...] = (),
        clock: Callable[[], datetime] = datetime.now,
    ) -> None:
        self.source, self.bos, self.eos, self.stops = source, bos, eos, stops
        self._clock = clock
        if len(source) > _MAX_SOURCE:
            raise TemplateError(f"the chat template has {len(source)} characters; supported: up to {_MAX_SOURCE}")
        environment = MeteredEnvironment(Meter(BUDGET))
        try:
            self._code = environment.compile(environment.guarded_tree(source), _FILE, _FILE)
        except TemplateSyntaxError as error:
            raise TemplateError(f"the chat template is broken in line {error.lineno}: {error.message}") from None
        except (RecursionError, SyntaxError, MemoryError, ValueError) as error:
            raise TemplateError(f"the chat template cannot be compiled: {error}") from None

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> Rendered:
        """The text of a conversation; `extra` are further variables of the template, as `enable_thinking`.

        A conversation that the template refuses, or of which it would leave out the system or the last user message,
        is changed as little as makes it acceptable, which `notes` tell. TemplateError, with the line, if nothing helps.
        """
        first_error: TemplateError | None = None
        incomplete: Rendered | None = None
        variables: dict[str, Any] = dict(extra or {}) | {
            "tools": None if tools is None else list(tools),
            "add_generation_prompt": add_generation_prompt,
            "bos_token": self.bos,
            "eos_token": self.eos,
        }
        # What some templates insist on: tools even where there are none, and two names of older ones.
        insisted = {
            "functions": json.dumps(list(tools or ()), indent=4, ensure_ascii=False),
            "datetime": self._clock().strftime("%d %B %Y"),
        }
        insisted = insisted | variables | {"tools": list(tools or ())}
        attempts = product(_variants([dict(message) for message in messages]), (variables, insisted))
        for (changed, notes), given in attempts:
            try:
                text = self._render(given | {"messages": changed})
            except TemplateLimit:
                raise
            except TemplateError as error:
                first_error = first_error or error
                continue
            missing = _left_out(messages, text)
            if not missing:
                return Rendered(text, notes)
            incomplete = incomplete or Rendered(text, (*notes, _NOTE_LEFT_OUT.format(missing)))
        if incomplete is None:
            assert first_error is not None
            raise first_error
        return incomplete

    def _render(self, variables: dict[str, Any]) -> str:
        meter = Meter.of_conversation(len(variables["messages"]), variables)
        environment = MeteredEnvironment(meter)
        environment.globals.update(raise_exception=_reject, strftime_now=lambda form: self._clock().strftime(form))
        template = Template.from_code(environment, self._code, environment.make_globals(None))
        parts = []
        try:
            for part in template.generate(variables):
                meter.spend(len(part))
                parts.append(part)
        except TemplateError as error:
            raise type(error)(f"{_place(error)}: {error}") from None
        except RecursionError as error:
            raise TemplateLimit(f"{_place(error)}: it calls itself without end") from None
        except Exception as error:  # whatever a template manages to raise is the template's
            raise TemplateError(f"{_place(error)}: {type(error).__name__}: {error}") from None
        return "".join(parts)


def _reject(message: str) -> NoReturn:
    raise TemplateRejected(f"it refuses the conversation: {message}")


def _place(error: BaseException) -> str:
    """Where in the template; Jinja puts its lines into the traceback."""
    line = None
    trace: TracebackType | None = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == _FILE:
            line = trace.tb_lineno
        trace = trace.tb_next
    return "the chat template failed" if line is None else f"the chat template failed in line {line}"


def _variants(messages: list[dict[str, Any]]) -> Iterator[tuple[list[dict[str, Any]], tuple[str, ...]]]:
    """The conversation as it is, then changed more and more, with the notes that say how."""
    merged, turns = _merge_system(messages), _join_turns(messages)
    both = _join_turns(merged)
    variants = (
        (messages, ()),
        (_as_parts(messages), (_NOTE_PARTS,)),
        (merged, (_NOTE_MERGED,)),
        (turns, (_NOTE_TURNS,)),
        (both, (_NOTE_MERGED, _NOTE_TURNS)),
        (_as_parts(both), (_NOTE_PARTS, _NOTE_MERGED, _NOTE_TURNS)),
    )
    seen: list[list[dict[str, Any]]] = []
    for changed, notes in variants:
        if changed not in seen:
            seen.append(changed)
            yield changed, notes


def _left_out(messages: Sequence[Message], text: str) -> str:
    """Which of the system message and the last user message is not in the text; "" if both are."""
    last_of = {_SYSTEM if message.get("role") in _SYSTEM else message.get("role"): message for message in messages}
    for role, name in ((_SYSTEM, "system"), ("user", "last user")):
        content = last_of.get(role, {}).get("content")
        if isinstance(content, str) and content.strip() not in text:
            return name
    return ""


def _merge_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if not messages or messages[0].get("role") not in _SYSTEM or not isinstance(messages[0].get("content"), str):
        return messages
    system, rest = messages[0]["content"], messages[1:]
    if rest and rest[0].get("role") == "user" and isinstance(rest[0].get("content"), str):
        return [rest[0] | {"content": f"{system}\n\n{rest[0]['content']}"}, *rest[1:]]
    return [{"role": "user", "content": system}, *rest]


def _join_turns(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    joined: list[dict[str, Any]] = []
    for message in messages:
        before = joined[-1] if joined else {}
        plain = all(set(m) == {"role", "content"} and isinstance(m["content"], str) for m in (before, message))
        if plain and before["role"] == message["role"]:
            joined[-1] = before | {"content": f"{before['content']}\n\n{message['content']}"}
        else:
            joined.append(message)
    return joined


def _as_parts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        message | {"content": [{"type": "text", "text": message["content"]}]}
        if isinstance(message.get("content"), str)
        else message
        for message in messages
    ]
