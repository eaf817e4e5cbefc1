"""The texts of tokens, for log-probabilities: each is asked for once."""

from __future__ import annotations

from collections.abc import Iterable

from localllm.scheduler.request import Logprob
from localllm.server.turn import Service


class Pieces:
    """The bytes of the tokens of one answer's model."""

    def __init__(self, service: Service, model: str) -> None:
        self._service = service
        self._model = model
        self._known: dict[int, bytes] = {}

    async def load(self, ids: Iterable[int]) -> None:
        """Ask for the bytes of these tokens, before `bytes` and `text` give them."""
        new = [token for token in dict.fromkeys(ids) if token not in self._known]
        if new:
            self._known.update(zip(new, await self._service.pieces(self._model, new), strict=True))

    async def load_all(self, logprob: Logprob) -> None:
        """`load` the token of a log-probability and its alternatives."""
        await self.load((logprob.token, *(token for token, _ in logprob.top)))

    def bytes(self, token: int) -> bytes:
        return self._known[token]

    def text(self, token: int) -> str:
        return self._known[token].decode("utf-8", "replace")

    async def count(self, text: str) -> int:
        """Return how many tokens a text has by itself."""
        return len(await self._service.tokenize(self._model, text, False, False))
