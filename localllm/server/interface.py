"""The service that all protocols use, as an interface."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from localllm.options import SamplingOptions
from localllm.scheduler.request import Event
from localllm.server.observer import ServiceObserver
from localllm.server.turn import Completion, EmbedResult, ModelInfo, SlotAction, Turn


class Service(Protocol):
    """What the protocols use. Errors are LocalLLMError; `refusal.py` gives their status and kind."""

    observer: ServiceObserver  # called at each event of an answer

    def models(self) -> Sequence[ModelInfo]:
        """All models that can be asked for, those that are not loaded included."""
        ...

    def find(self, name: str) -> ModelInfo:
        """The model of a request; "" and unknown names give the only model, or UnknownModel if there are several."""
        ...

    def answer(self, model: str, turn: Turn) -> AsyncIterator[Event]:
        """Stream an answer. Closing the iterator ends it at the next step."""
        ...

    def complete(self, model: str, completion: Completion) -> AsyncIterator[Event]: ...

    async def count(self, model: str, turn: Turn) -> int:
        """Return how many tokens the prompt of a turn has."""
        ...

    async def render(self, model: str, turn: Turn) -> str:
        """Return the prompt of a turn as text."""
        ...

    async def prompt_ids(self, model: str, turn: Turn) -> list[int]:
        """Return the tokens of the prompt of a turn."""
        ...

    async def tokenize(self, model: str, text: str, add_special: bool, parse_special: bool) -> list[int]:
        """Return the tokens of a text. ContextFull, before any work, if it is too long for any context of this size."""
        ...

    async def tokenize_all(
        self, model: str, texts: Sequence[str], add_special: bool, parse_special: bool
    ) -> list[list[int]]:
        """Return the tokens of each text. `add_special` is for the first one. Their sum is limited like one text."""
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
        """Save what a slot evaluated last in a file, restore it, or erase it; return tokens, and bytes of the file."""
        ...

    def sampling_defaults(self, model: str) -> SamplingOptions: ...
