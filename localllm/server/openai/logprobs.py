"""Log probabilities in OpenAI's two formats: a list of objects for chat, four parallel lists for completions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from localllm.generation.request import Logprob
from localllm.server.turn import Json

NEVER = -9999.0  # OpenAI's value for a very unlikely token; JSON has no -inf
LOWEST = -3.4028234663852886e38  # the lowest float32, which llama.cpp and Ollama use instead


def finite(logprob: float, lowest: float = NEVER) -> float:
    """Return a log probability that JSON can represent."""
    return max(logprob, lowest) if math.isfinite(logprob) else lowest


# -- chat ------------------------------------------------------------------------------------------------------------


def chat_entry(logprob: Logprob, lowest: float = NEVER) -> Json:
    """Return an entry of `logprobs.content`, with llama.cpp's `id`."""
    return token_entry(logprob, lowest) | {"top_logprobs": [token_entry(each, lowest) for each in logprob.alternatives]}


def token_entry(logprob: Logprob, lowest: float = NEVER) -> Json:
    """Return one token of an entry."""
    return named_token(logprob) | {"logprob": finite(logprob.logprob, lowest)}


def named_token(logprob: Logprob) -> Json:
    """Return a token without its probability."""
    return {"id": logprob.token, "token": logprob.text, "bytes": list(logprob.data)}


def chat_logprobs(entries: Sequence[Json]) -> Json:
    """Return the `logprobs` of a choice."""
    return {"content": list(entries), "refusal": None}


# -- completions -----------------------------------------------------------------------------------------------------


class Lists:
    """The four lists of a completion's `logprobs`. Offsets are characters from the start of the choice's text."""

    def __init__(self) -> None:
        self._offset = 0
        self._clear()

    def _clear(self) -> None:
        self._tokens: list[str] = []
        self._logprobs: list[float | None] = []
        self._top: list[Mapping[str, float] | None] = []
        self._offsets: list[int] = []

    def __len__(self) -> int:
        return len(self._tokens)

    def add_first(self, token: str) -> None:
        """Add the first token of a prompt, for which no prediction exists."""
        self._add(token, None, None)

    def add(self, logprob: Logprob) -> None:
        """Add a token. The top tokens include it, as in OpenAI's API."""
        token = logprob.text
        top = {each.text: finite(each.logprob) for each in logprob.alternatives}
        self._add(token, finite(logprob.logprob), top | {token: finite(logprob.logprob)})

    def _add(self, token: str, logprob: float | None, top: Mapping[str, float] | None) -> None:
        self._tokens.append(token)
        self._logprobs.append(logprob)
        self._top.append(top)
        self._offsets.append(self._offset)
        self._offset += len(token)

    def take(self) -> dict[str, Any] | None:
        """Return the lists and start new ones. Return None if they are empty."""
        if not self._tokens:
            return None
        found = {
            "tokens": self._tokens,
            "token_logprobs": self._logprobs,
            "top_logprobs": self._top,
            "text_offset": self._offsets,
        }
        self._clear()
        return found
