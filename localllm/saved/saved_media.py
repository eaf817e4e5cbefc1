"""Pictures and sounds in saved sequences: the key and the layout of each, instead of the ids of this process."""

from __future__ import annotations

import base64
import binascii
import hashlib
import zlib
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from localllm.engine import Placed
from localllm.engine.media import MediaIds

MOST_MEDIA = 1 << 16  # maximum number of pictures and sounds in a file
_MOST_KEY = 256  # maximum length of a key in bytes
_MOST_TOKENS = 1 << 20  # maximum number of tokens of one picture or sound
_MOST_AXES = 8
_MOST_COUNT = 1 << 30


def header_of(placed: Placed) -> dict[str, Any]:
    """Return a picture or a sound as JSON."""
    media = placed.media
    packed = zlib.compress(np.ascontiguousarray(media.positions, "<i4").tobytes(), 1)
    return {
        "start": placed.start,
        "tokens": media.tokens,
        "key": media.key.hex(),
        "advance": media.advance,
        "causal": media.causal,
        "axes": media.positions.shape[1],
        "positions": base64.b64encode(packed).decode("ascii"),
    }


def with_ids(
    tokens: list[int], headers: Sequence[Mapping[str, Any]], ids: MediaIds, context: int
) -> tuple[list[int], list[Placed]]:
    """Return the tokens of a file with ids of this process for its media tokens, and the media.

    The last one may be cut. Raises ValueError for headers that do not describe the tokens, and for positions outside
    the context.
    """
    placed: list[Placed] = []
    at = 0
    shift = 0  # what the media so far add to later positions
    for header in headers:
        start, count, advance, axes = (_count(header, name) for name in ("start", "tokens", "advance", "axes"))
        key, causal, packed = header.get("key"), header.get("causal"), header.get("positions")
        if not isinstance(key, str) or len(key) > 2 * _MOST_KEY or not isinstance(causal, bool) or start < at:
            raise ValueError("its header has no usable 'media'")
        if not 0 < count <= _MOST_TOKENS or not 0 < axes <= _MOST_AXES or start >= len(tokens):
            raise ValueError("its header has no usable 'media'")
        at = min(start + count, len(tokens))
        if any(token != -1 for token in tokens[start:at]) or (at < start + count and header is not headers[-1]):
            raise ValueError("its media are not where its header says")
        positions = _positions(packed, count, axes)
        first, there = start + shift, positions[: at - start]
        if not 0 <= first + int(there.min()) <= first + int(there.max()) < context:
            raise ValueError("its media have no usable 'positions'")
        shift += advance - count
        if at == start + count and len(tokens) + shift > context:
            raise ValueError("its media have no usable 'advance'")
        placed.append(Placed(start, ids.of(_bytes(key), count, positions, advance, causal)))
    found = tokens.copy()
    for each in placed:
        stop = min(each.stop, len(found))
        found[each.start : stop] = media_ids(each, stop)
    if sum(token == -1 for token in tokens) != sum(min(each.stop, len(tokens)) - each.start for each in placed):
        raise ValueError("its header lacks a picture or a sound")
    return found, placed


def media_ids(placed: Placed, stop: int) -> range:
    """Return the ids of a picture's tokens before position `stop`."""
    return placed.media.ids[: stop - placed.start]


def content_name(tokens: Sequence[int], media: Sequence[Placed]) -> str:
    """Return a hash of tokens and of the media among them, equal in every process."""
    digest = hashlib.blake2b(array("i", [max(token, -1) for token in tokens]).tobytes(), digest_size=16)
    for each in media:
        digest.update(each.start.to_bytes(8, "little") + hashlib.blake2b(each.media.key).digest())
    return digest.hexdigest()


def _count(header: Mapping[str, Any], name: str) -> int:
    value = header.get(name)
    if type(value) is not int or not 0 <= value <= _MOST_COUNT:
        raise ValueError(f"its media have no usable {name!r}")
    return value


def _bytes(key: str) -> bytes:
    try:
        return bytes.fromhex(key)
    except ValueError:
        raise ValueError("its header has no usable 'media'") from None


def _positions(packed: Any, count: int, axes: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Return positions relative to the first token's; hunyuanvl has negative ones."""
    size = 4 * count * axes
    try:
        data = zlib.decompressobj().decompress(base64.b64decode(packed, validate=True), size + 1)
    except (TypeError, ValueError, binascii.Error, zlib.error):
        raise ValueError("its media have no usable 'positions'") from None
    if len(data) != size:
        raise ValueError("its media have no usable 'positions'")
    return np.frombuffer(data, "<i4").astype(np.int32).reshape(count, axes)
