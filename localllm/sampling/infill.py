"""The infill sampler: end the gap, or write the continuation that most candidates share.

As in llama.cpp's src/llama-sampler.cpp (2026-10), for fill-in-the-middle completions. A token whose text is a prefix of
another token's text is merged with it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import numpy as np

from localllm.engine.top_k import Doubles, Ids, Indices

COMBINED = 1024  # most likely candidates whose texts are compared; llama.cpp, without a limit, takes minutes per token
_LEAST = 0.2  # minimum probability of a continuation


class Spellings(NamedTuple):
    """The vocabulary data that the sampler needs."""

    piece: Callable[[int], bytes]  # returns a token's text; empty for control tokens
    ends: Collection[int]  # end-of-generation tokens
    end: int | None  # the token that ends a gap


def continuations_of(ids: Ids, p: Doubles, spellings: Spellings) -> Indices | None:
    """Return the indices of the tokens to choose from; None if only the end token is left.

    `ids` and their probabilities `p` (n,) are in descending order of `p`.
    """
    ending = np.isin(ids, list(spellings.ends))
    if 3 * p[ending].sum() * len(ids) > p[~ending].sum():
        return np.flatnonzero(ending)
    merged = _merged([spellings.piece(token) for token in ids[:COMBINED].tolist()], p)
    kept = np.flatnonzero((ending & (merged > 0)) | (merged >= _LEAST))
    text = ~ending[kept]
    if not text.any():
        return None
    share = merged[kept] / merged[kept].sum()
    return np.compress(~text | (share >= 1 / (text.sum() + 1)), kept)


def _merged(pieces: Sequence[bytes], p: Doubles) -> Doubles:
    """Return the probabilities (n,) after merging tokens whose texts are prefixes of each other into the likelier one.

    Only the first `len(pieces)` tokens are merged. They are processed in order, each compared with the others in order.
    """
    merged = p.copy()
    alive = p > 0
    for one, others in enumerate(_longer(pieces)):
        for other in others:
            if not alive[one]:
                break
            if not alive[other]:
                continue
            to, of = (other, one) if merged[other] > merged[one] else (one, other)
            merged[to] += merged[of]
            merged[of] = 0
            alive[of] = False
    return merged


def _longer(pieces: Sequence[bytes]) -> list[list[int]]:
    """Return, for each piece, the ascending indices of the other pieces that start with it."""
    places: dict[bytes, list[int]] = {}
    for place, piece in enumerate(pieces):
        if piece:
            places.setdefault(piece, []).append(place)
    found: list[list[int]] = [[] for _ in pieces]
    for place, piece in enumerate(pieces):
        for end in range(1, len(piece) + 1):
            for shorter in places.get(piece[:end], ()):
                if shorter != place:
                    found[shorter].append(place)
    return found
