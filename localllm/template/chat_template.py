"""`ChatTemplate`: renders a conversation in the format that the model was trained on.

Rendering is a pure function of template and conversation, so the engine can render the whole history every turn and
compare its tokens with the KV cache. Templates are untrusted programs; they run in a confined child process
(`localllm.template.render`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from localllm.sandbox import Confined, ConfinedError, ConfinedSlow, ResourceLimits
from localllm.template.errors import TemplateError, TemplateLimit, TemplateRejected
from localllm.template.origin import Text

Message = Mapping[str, Any]  # role, content, and keys of some templates: tool_calls, name, reasoning_content

ROLES = (
    *("system", "developer", "user", "assistant", "model", "tool", "function", "ipython", "tool_response"),
    *("tool_results", "observation", "context", "document", "documents", "citations", "root", "latest_reminder"),
)
MAX_SOURCE = 1 << 20  # maximum length in characters


@dataclass(frozen=True, slots=True)
class Rendered:
    """A rendered conversation: text with the origin of each character, and notes.

    The notes describe changes that the template required; show each note once.
    """

    text: Text
    notes: tuple[str, ...] = ()


def renderer(limits: ResourceLimits | None = None) -> Confined:
    """Return a child process that renders templates. Start it early: starting takes 0.1 s in the background."""
    return Confined("localllm.template.render", limits)


class ChatTemplate:
    """A chat template. `bos` and `eos` are the texts of the BOS and EOS tokens. `stops` are additional stop strings.

    `confined` is the child process that renders the template (default: a new one). Raises TemplateError, with the line,
    if the source is not a valid template.
    """

    def __init__(
        self,
        source: str,
        bos: str,
        eos: str,
        stops: tuple[str, ...] = (),
        clock: Callable[[], datetime] = datetime.now,
        confined: Confined | None = None,
    ) -> None:
        self.source, self.bos, self.eos, self.stops = source, bos, eos, stops
        self._clock = clock
        if len(source) > MAX_SOURCE:
            raise TemplateError(f"the chat template has {len(source)} characters; supported: up to {MAX_SOURCE}")
        self._confined = confined or renderer()
        self._ask({"source": source}, "cannot be compiled")

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> Rendered:
        """Return the text of a conversation; `extra` contains additional template variables, such as `enable_thinking`.

        If the template refuses the conversation, or would drop the system message or the last user message, the
        conversation is changed as little as possible until the template accepts it. `notes` describe the changes.
        Raises TemplateError, with the line, if no change helps, or for a role that is not in ROLES.
        """
        for message in messages:
            if message.get("role") not in ROLES:
                raise TemplateError(f"role {message.get('role')!r} is unknown; supported: {', '.join(ROLES)}")
        request = {
            "source": self.source,
            "bos": self.bos,
            "eos": self.eos,
            "messages": [dict(message) for message in messages],
            "tools": None if tools is None else list(tools),
            "extra": dict(extra or {}),
            "add_generation_prompt": add_generation_prompt,
            "now": self._clock().isoformat(),
        }
        answer = self._ask(request, "failed")
        marks = b"".join(bytes((mark,)) * count for mark, count in answer["marks"])
        return Rendered(Text.of(answer["text"], marks), tuple(answer["notes"]))

    def beside(self) -> ChatTemplate:
        """Return the same template with a separate child process, which the caller must close."""
        return ChatTemplate(self.source, self.bos, self.eos, self.stops, self._clock)

    def close(self) -> None:
        """End the child process."""
        self._confined.close()

    def _ask(self, request: dict[str, Any], failed: str) -> dict[str, Any]:
        try:
            answer = self._confined.call(request)
        except ConfinedError as error:
            cause = ", probably in an endless loop" if isinstance(error, ConfinedSlow) else ""
            raise TemplateLimit(f"the chat template {failed}: {error}{cause}") from None
        if "error" in answer:
            raise (TemplateRejected if answer["rejected"] else TemplateError)(answer["error"])
        return answer
