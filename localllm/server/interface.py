"""The interface of the service that all protocols use."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from localllm.generation.request import Event
from localllm.options import SamplingOptions
from localllm.server.observer import ServiceObserver
from localllm.server.turn import Completion, EmbedResult, ModelInfo, SlotAction, Turn


class Service(Protocol):
    """The service behind the protocols. Errors are LocalLLMError; `refusal.py` defines their status and kind."""

    observer: ServiceObserver  # called for each event of an answer

    def models(self) -> Sequence[ModelInfo]:
        """All available models, loaded or not."""
        ...

    def find(self, name: str) -> ModelInfo:
        """Return the model for a name; a single model matches every name. Raise UnknownModel if there are several."""
        ...

    def answer(self, model: str, turn: Turn) -> AsyncIterator[Event]:
        """Stream an answer. Closing the iterator ends it at the next step."""
        ...

    def complete(self, model: str, completion: Completion) -> AsyncIterator[Event]: ...

    async def count(self, model: str, turn: Turn) -> int:
        """Return the number of tokens in a turn's prompt."""
        ...

    async def render(self, model: str, turn: Turn) -> str:
        """Return the prompt of a turn as text."""
        ...

    async def prompt_ids(self, model: str, turn: Turn) -> list[int]:
        """Return the token ids of a turn's prompt."""
        ...

    async def tokenize(self, model: str, text: str, add_special: bool, parse_special: bool) -> list[int]:
        """Return the tokens of a text; raise ContextFull early if it exceeds the largest context."""
        ...

    async def tokenize_all(
        self, model: str, texts: Sequence[str], add_special: bool, parse_special: bool
    ) -> list[list[int]]:
        """Return the tokens of each text, limited in total like one text. `add_special` applies to the first one."""
        ...

    async def pieces(self, model: str, ids: Sequence[int]) -> list[bytes]:
        """Return the bytes of each token."""
        ...

    async def embed(
        self, model: str, texts: Sequence[str | Sequence[int]], pooling: str = "auto", normalize: bool = True
    ) -> EmbedResult:
        """Return a vector for each text, of length 1 if `normalize`; with pooling "none" one for each token."""
        ...

    async def rank(self, model: str, query: str, documents: Sequence[str]) -> EmbedResult: ...

    async def slot(self, model: str, number: int, action: SlotAction, name: str) -> tuple[int, int]:
        """Save a slot's last sequence to a file, restore it, or erase it; return the tokens and the file's bytes."""
        ...

    def sampling_defaults(self, model: str) -> SamplingOptions: ...
