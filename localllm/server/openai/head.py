"""The common fields of all objects in a response: id, time, model, fingerprint and usage."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from localllm import __version__
from localllm.server.collected import Collected
from localllm.server.turn import Json

FINGERPRINT = f"b{__version__}-localllm"  # clients of llama.cpp expect a leading "b"
DONE = b"data: [DONE]\n\n"  # the last event of a stream
FINISHED = {"end": "stop", "stop": "stop", "length": "length", "tool_calls": "tool_calls", "cancelled": "length"}


def new_id(prefix: str) -> str:
    """Return a new id, such as chatcmpl-0f3a..."""
    return f"{prefix}{uuid.uuid4().hex}"


@dataclass(frozen=True, slots=True)
class ReplyHead:
    """The common fields of a response and of its chunks."""

    id: str
    created: int  # seconds since 1970
    model: str

    def body(self, kind: str, choices: Sequence[Json]) -> Json:
        """Return a response or chunk of type `kind` with these choices."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": FINGERPRINT,
            "choices": list(choices),
        }


def new_head(prefix: str, model: str) -> ReplyHead:
    """Return the head of a new response."""
    return ReplyHead(new_id(prefix), int(time.time()), model)


def usage_of(answers: Sequence[Collected], prompts: int = 1) -> Json:
    """Return `usage`: the tokens of all choices and of the prompts, where each prompt counts once regardless of `n`.

    The choices of one prompt are adjacent.
    """
    per_prompt = len(answers) // prompts
    firsts = [answers[number * per_prompt] for number in range(prompts)]
    prompt = sum(each.usage.prompt_tokens for each in firsts)
    completion = sum(each.usage.answer_tokens for each in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(each.usage.reused_tokens for each in firsts)},
        "completion_tokens_details": {"reasoning_tokens": sum(each.thinking_tokens for each in answers)},
    }
