"""Prepares the pictures and sounds of requests for the encoders, before their prompts are made.

A file of 34 bytes can have 50 million pixels, which take two seconds. So each file is one job of a lane: jobs of other
accounts come in between, and a prompt of text never waits for a picture. Prepared pictures take memory until their
requests end, so their size is limited.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakSet

from localllm.base.notices import said
from localllm.loading.media_parts import Medium, placed_media
from localllm.media import EncoderInput, MediaError
from localllm.model import Model
from localllm.server.accounts import ACCOUNT
from localllm.server.errors import BadRequest, TooManyRequests
from localllm.server.lanes import Lane
from localllm.server.turn import REQUEST, Completion, Json, Turn
from localllm.server.uploads import replaced

MOST_HELD = 2 << 30  # maximum bytes of prepared pictures and sounds of all requests; an account may have half


class Preparing:
    """Prepares the media of one model's requests, in `lane`."""

    def __init__(self, model: Model) -> None:
        self.lane = Lane("pictures", heavy=True)
        self._model = model
        self._held: dict[str, WeakSet[EncoderInput]] = {}  # by account

    async def turn(self, turn: Turn) -> Turn:
        """Return a turn with its media prepared. Raises ContextFull at once if they exceed the context."""

        async def prepared(parts: Sequence[Json]) -> list[Medium]:
            kinds = [part["type"] for part in parts]
            media = placed_media([part[part["type"]] for part in parts], REQUEST, kinds)
            return await self._all(media, "messages")

        return await replaced(turn, bytes, prepared) if self._useful else turn

    async def completion(self, completion: Completion) -> Completion:
        """Return a completion with its media prepared."""
        if not (completion.media and self._useful):
            return completion
        media = await self._all(placed_media(completion.media, REQUEST), "prompt")
        return replace(completion, media=media)

    @property
    def _useful(self) -> bool:
        return bool(self._model.reads) and not self._model.encoders.projector.placed

    async def _all(self, media: Sequence[Medium], param: str) -> list[Medium]:
        found, own = list[Medium](), list[EncoderInput]()
        for each in media:
            made = await self.lane.run(partial(self._prepared, each, ACCOUNT.get(), own, param))
            own += _pieces(made)
            self._model.encoders.check_count(sum(piece.tokens for piece in own))
            found.append(made)
        return found

    def _prepared(self, medium: Medium, account: str, own: Sequence[EncoderInput], param: str) -> Medium:
        self._check(account, own)
        try:
            made = self._model.encoders.prepared(medium)
        except MediaError as error:
            raise BadRequest(said(error), param) from None
        self._held.setdefault(account, WeakSet()).update(_pieces(made))
        return made

    def _check(self, account: str, own: Sequence[EncoderInput]) -> None:
        """Raise TooManyRequests if other requests of this account, or of all, hold too much. `own` are this one's."""
        self._held = {name: pieces for name, pieces in self._held.items() if pieces}
        mine = set(own)
        sizes = {
            name: sum(piece.nbytes for piece in pieces if piece not in mine) for name, pieces in self._held.items()
        }
        if sizes.get(account, 0) > MOST_HELD // 2 or sum(sizes.values()) > MOST_HELD:
            raise TooManyRequests("pictures and sounds of waiting requests fill their memory; try again later")


def _pieces(medium: Medium) -> list[Any]:
    return [part for part in medium.parts or () if isinstance(part, EncoderInput)]
