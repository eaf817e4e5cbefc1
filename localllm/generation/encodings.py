"""The pictures and sounds of prompts. Their encoder runs in slices between two steps, so no request waits longer.

An encoder has memory for one input, so requests take turns. Embeddings are dropped once the cache has their tokens.
After a preemption or a fault, lost ones are computed again. A prompt that ends with a picture needs the logits after
it, so at least its last token is evaluated again: such embeddings are kept for the next time, within `KEPT`.
"""

from __future__ import annotations

import traceback
from collections import OrderedDict
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from localllm.backends.base import BackendError
from localllm.base.errors import LocalLLMError
from localllm.base.notices import said
from localllm.generation.errors import EncoderFailed
from localllm.generation.prompt_media import PromptMedia
from localllm.generation.request_state import RequestState
from localllm.generation.running import Running

F32 = NDArray[np.float32]
KEPT = 64 << 20  # bytes of the embeddings that are kept


class Encodings:
    """Computes embeddings for the running requests of a scheduler, one at a time."""

    def __init__(self, running: Running, width: int) -> None:
        """`width` is the width of the embeddings that the model takes."""
        self._running, self._width = running, width
        self._current: tuple[RequestState, PromptMedia] | None = None
        self._kept: OrderedDict[bytes, F32] = OrderedDict()  # by the span's key, the newest last

    def advance(self, seconds: Callable[[], float]) -> bool:
        """Run the encoder for about `seconds()`, if a running request waits for it. Return whether there was one.

        An error of the encoder fails the request and no other one, even if it is a bug, which is logged.
        """
        if not self._width:  # a model of text alone; called in every step
            return False
        current = self._current
        if current is not None and (current[0] not in self._running.active or current[1].encoding is None):
            current = None  # cancelled, or preempted
        self._current = current = current or self._next()
        if current is None:
            return False
        one, media = current
        try:
            if media.encoding is None and (kept := self._kept.get(media.span.key)) is not None:
                self._kept.move_to_end(media.span.key)
                media.embeddings, self._current = self._checked(media, kept), None
                return True
            if media.encoding is None:
                media.encoding = media.span.encode()
            if media.encoding.advance(seconds()):
                media.embeddings, media.encoding = self._checked(media, media.encoding.embeddings), None
                media.encoded += media.span.tokens
                self._current = None
                if media.stop == one.prompt_tokens:
                    self._keep(media.span.key, media.embeddings)
        except Exception as error:
            self._current = None
            one.fail(_shown(error))
            self._running.leave(one)
        return True

    def _keep(self, key: bytes, embeddings: F32) -> None:
        if embeddings.nbytes > KEPT:
            return
        self._kept[key] = embeddings
        while sum(each.nbytes for each in self._kept.values()) > KEPT:
            self._kept.popitem(last=False)

    def forget(self) -> None:
        """Give up the embeddings that are being computed."""
        self._current = None

    def _next(self) -> tuple[RequestState, PromptMedia] | None:
        """Return the first media without embeddings of the next request, to begin with; None if none is needed.

        The highest priority comes first, then the request with the fewest encoded tokens, so that many pictures do not
        delay a single picture of another request.
        """
        active = [one for one in self._running.active if one.media and not one.ticket.paused]
        waiting = [(one, media) for one in active if (media := one.unencoded) is not None]
        found = min(waiting, key=_turn, default=None)
        if found is not None:
            found[1].encoding = None  # of a run before a preemption
        return found

    def _checked(self, media: PromptMedia, embeddings: F32) -> F32:
        expected = media.span.tokens, self._width
        if embeddings.shape != expected:
            raise LocalLLMError(f"the encoder made embeddings of shape {embeddings.shape}, not {expected}")
        return embeddings


def _shown(error: Exception) -> LocalLLMError:
    """Return the error for the client of a request."""
    if isinstance(error, LocalLLMError):
        return error
    if isinstance(error, BackendError):
        return LocalLLMError(said(error))
    traceback.print_exception(error)
    return EncoderFailed("the encoder failed because of a bug; the log has the details")


def _turn(waiting: tuple[RequestState, PromptMedia]) -> tuple[int, int, int]:
    one, _ = waiting
    return -one.request.priority, sum(media.encoded for media in one.media), one.number
