"""The service interface that the handlers of all APIs use."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from localllm.generation.request import Event
from localllm.options import SamplingOptions
from localllm.server.observer import ServiceObserver
from localllm.server.turn import Completion, EmbedResult, ModelInfo, SlotAction, Turn


class Service(Protocol):
    """The service behind the APIs. It raises LocalLLMError; `refusal.py` assigns HTTP status and kind to the errors."""

    observer: ServiceObserver  # called for each event of a request

    def models(self) -> Sequence[ModelInfo]:
        """All available models, loaded or not."""
        ...

    def find(self, name: str) -> ModelInfo:
        """Return the model with this name. If the server has only one model, it matches every name.

        With several models, raise UnknownModel for an unknown name.
        """
        ...

    def answer(self, model: str, turn: Turn) -> AsyncIterator[Event]:
        """Stream the events of a turn. Closing the iterator ends generation at the next step."""
        ...

    def complete(self, model: str, completion: Completion) -> AsyncIterator[Event]: ...

    async def count(self, model: str, turn: Turn) -> int:
        """Return the number of prompt tokens of a turn."""
        ...

    async def render(self, model: str, turn: Turn) -> str:
        """Return the prompt of a turn as text."""
        ...

    async def prompt_ids(self, model: str, turn: Turn) -> list[int]:
        """Return the token ids of a turn's prompt."""
        ...

    async def tokenize(self, model: str, text: str, add_special: bool, parse_special: bool) -> list[int]:
        """Return the tokens of a text. Raise ContextFull early if the text cannot fit in the largest context."""
        ...

    async def tokenize_all(
        self, model: str, texts: Sequence[str], add_special: bool, parse_special: bool
    ) -> list[list[int]]:
        """Return the tokens of each text. The texts together may be as long as one text. `add_special` applies to the
        first text."""
        ...

    async def pieces(self, model: str, ids: Sequence[int]) -> list[bytes]:
        """Return the bytes of each token."""
        ...

    async def embed(
        self, model: str, texts: Sequence[str | Sequence[int]], pooling: str = "auto", normalize: bool = True
    ) -> EmbedResult:
        """Return a vector for each text, of length 1 if `normalize`. Pooling "none" gives one vector per token."""
        ...

    async def rank(self, model: str, query: str, documents: Sequence[str]) -> EmbedResult: ...

    async def slot(self, model: str, number: int, action: SlotAction, name: str) -> tuple[int, int]:
        """Save the last sequence of a slot to a file, restore it, or erase it. Return the number of tokens and the file
        size in bytes."""
        ...

    def sampling_defaults(self, model: str) -> SamplingOptions: ...
