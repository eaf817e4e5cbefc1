"""Pictures and sound among the tokens of a text: their spans, and the ids of their tokens.

A media token has a negative id in `CacheSequence.tokens`, so that cached prefixes, forks and files treat it like a
token of the text. Ids are allocated per content in this process: two pictures never share one, and the same picture has
the same ids again as long as anything refers to them.
"""

from __future__ import annotations

import hashlib
import threading
import weakref
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from localllm.backends.base import BackendError

Int32s = NDArray[np.int32]
LOWEST = -(1 << 31)  # the smallest id of a media token


class Encoding(Protocol):
    """The embeddings of a picture or a sound while an encoder computes them."""

    @property
    def embeddings(self) -> NDArray[np.float32]:
        """The embeddings (tokens, width), once `advance` has returned True."""
        ...

    def advance(self, seconds: float = 0.0) -> bool:
        """Run the next segment, or about `seconds` of it if they are given. Return whether the embeddings are
        complete.
        """
        ...


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """A picture or a sound in a prompt.

    `key` identifies its content and its layout. `positions` are for rotations, relative to the first token's; the token
    behind the last one is at `advance`. If not `causal`, the tokens see each other. `encode` begins to compute the
    embeddings; it is not called for tokens that are in the cache. `source` is the encoder's input and the position of
    the first token, from which another process can make the same span.
    """

    key: bytes
    tokens: int
    positions: Int32s = field(compare=False)  # (tokens,) or (tokens, axes)
    advance: int
    causal: bool
    encode: Callable[[], Encoding] = field(compare=False, repr=False)
    source: tuple[Any, int] | None = field(default=None, compare=False, repr=False)


class Media:
    """What remains of a span in the cache, and the ids of its tokens: `first`, `first` + 1, ..., all negative."""

    __slots__ = ("__weakref__", "advance", "causal", "first", "key", "plain", "positions", "tokens")

    def __init__(self, key: bytes, tokens: int, positions: Int32s, advance: int, causal: bool, first: int) -> None:
        self.key, self.tokens, self.advance, self.causal, self.first = key, tokens, advance, causal, first
        self.positions = positions.reshape(tokens, -1)  # (tokens, axes), or (tokens, 1) for all axes
        # whether its tokens have the positions of a text
        self.plain = advance == tokens and bool((self.positions == np.arange(tokens)[:, None]).all())

    @property
    def ids(self) -> range:
        return range(self.first, self.first + self.tokens)


class Placed(NamedTuple):
    """A picture or a sound in a sequence, from position `start` on."""

    start: int
    media: Media

    @property
    def stop(self) -> int:
        return self.start + self.media.tokens


class MediaIds:
    """Allocates the ids of media tokens. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_key: weakref.WeakValueDictionary[bytes, Media] = weakref.WeakValueDictionary()
        self._firsts: list[int] = []  # ascending, of the next list, which may hold dead references
        self._known: list[weakref.ref[Media]] = []
        self._next = 0  # ids are allocated downwards from here

    def of(self, key: bytes, tokens: int, positions: Int32s, advance: int, causal: bool) -> Media:
        """Return the media with this key and layout, described as in `MediaSpan`; allocate ids if none is known.

        A key of a damaged or forged file may come with another layout; it then has other ids.
        """
        layout = f"{tokens} {advance} {causal} {len(key)} {positions.size}".encode()
        named = hashlib.sha256(layout + key + np.ascontiguousarray(positions, np.int32).tobytes()).digest()
        with self._lock:
            found = self._by_key.get(named)
            if found is not None:
                return found
            if len(self._known) > 64 + 2 * len(self._by_key):
                self._forget_dead()
            media = Media(key, tokens, positions, advance, causal, self._free(tokens))
            self._next = media.first
            at = bisect_right(self._firsts, media.first)
            self._firsts.insert(at, media.first)
            self._known.insert(at, weakref.ref(media))
            self._by_key[named] = media
            return media

    def find(self, token: int) -> Media:
        """Return the media that a token belongs to, which something must still refer to. Raises BackendError."""
        with self._lock:
            at = bisect_right(self._firsts, token) - 1
            found = self._known[at]() if at >= 0 else None
        if found is None or token not in found.ids:
            raise BackendError(f"token {token} is outside the vocabulary, and no picture or sound has it")
        return found

    def _free(self, count: int) -> int:
        """Return the first of `count` unused ids, below the last ones allocated; after the lowest, from -1 on again."""
        stop = self._next
        if stop - count < LOWEST:
            self._forget_dead()
            stop = 0
        for first, known in zip(reversed(self._firsts), reversed(self._known), strict=True):
            media = known()
            if media is not None and media.first < stop and media.ids.stop > stop - count:
                stop = first
        assert stop - count >= LOWEST, "no ids of media tokens are left"
        return stop - count

    def _forget_dead(self) -> None:
        alive = [(media.first, known) for known in self._known if (media := known()) is not None]
        self._firsts, self._known = [first for first, _ in alive], [known for _, known in alive]


def place(tokens: Sequence[int], start: int, ids: MediaIds) -> list[Placed]:
    """Return the media among `tokens`, which begin at position `start`; a first one may have begun before."""
    found, at = [], 0
    while at < len(tokens):
        if tokens[at] < 0:
            media = ids.find(tokens[at])
            row = tokens[at] - media.first
            found.append(Placed(start + at - row, media))
            at += media.tokens - row
        else:
            at += 1
    return found


def whole(placed: Sequence[Placed], length: int) -> int:
    """Return `length`, or the start of a picture whose tokens see each other if it would be cut."""
    cut = (each.start for each in placed if not each.media.causal and each.start < length < each.stop)
    return next(cut, length)


def positions_on_axes(placed: Sequence[Placed], start: int, stop: int, axes: int) -> Int32s:
    """Return the positions of tokens `start` to `stop` on each axis of rotations (stop - start, axes)."""
    found = np.empty((stop - start, axes), np.int32)
    behind, shift = 0, 0  # the position after the media so far, and the shift of later positions
    for each in (*placed, None):
        until = stop if each is None else each.start
        a, b = max(behind, start), min(until, stop)
        if a < b:
            found[a - start : b - start] = np.arange(a + shift, b + shift)[:, None]
        if each is None:
            break
        a, b = max(each.start, start), min(each.stop, stop)
        if a < b:
            found[a - start : b - start] = (
                each.start + shift + each.media.positions[a - each.start : b - each.start, :axes]
            )
        behind, shift = each.stop, shift + each.media.advance - each.media.tokens
    return found


def span_ends(placed: Sequence[Placed], start: int, stop: int) -> Int32s:
    """Return the last position that each of the tokens `start` to `stop` attends to."""
    found = np.arange(start, stop, dtype=np.int32)
    for each in placed:
        if not each.media.causal:
            found[max(each.start - start, 0) : max(each.stop - start, 0)] = each.stop - 1
    return found
