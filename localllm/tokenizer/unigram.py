"""Unigram ("t5"): normalize as SentencePiece does, then choose the tokens with the highest total score (Viterbi)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from localllm.tokenizer.charsmap import CharsMap
from localllm.tokenizer.matching import Matcher

_PENALTY = 10.0  # subtracted from the minimum score for an unknown character


def normalizer(charsmap: CharsMap | None, space: str, prefix: bool, merge: bool) -> Callable[[str, bool], str]:
    """Return a function of (text, whether it starts a word) that normalizes the text and replaces spaces by `space`.

    `prefix` inserts a space before the first word. `merge` collapses runs of spaces, and drops trailing spaces.
    """

    def normalize(text: str, start: bool) -> str:
        if charsmap is not None:
            text = charsmap.apply(text)
        if merge:
            return "".join(space + word for word in text.split(" ") if word)
        words = text.lstrip(" ")
        leading = text[: len(text) - len(words)]
        return (leading + " " * (prefix and start and bool(words)) + words).replace(" ", space)

    return normalize


def viterbi(
    ids: Mapping[str, int], scores: Sequence[float], free: frozenset[int], worst: float, unknown: int
) -> Callable[[str], list[int]]:
    """Return a function that encodes normalized text. `scores` is by id; tokens in `free` score 0.

    `worst` is the lowest score of a normal token. A run of characters without a token is encoded as one unknown token.
    """
    at = Matcher(ids).at
    points = {token: 0.0 if token in free else scores[token] for token in ids.values()}
    penalty = float(np.float32(worst) - np.float32(_PENALTY))

    def encode(text: str) -> list[int]:
        count = len(text)
        best = [float("-inf")] * (count + 1)  # best total score up to each position
        last = [(0, unknown)] * (count + 1)  # start and id of the last token on the best path
        best[0] = 0.0
        for start in range(count):
            single = False
            for stop, token in at(text, start):
                single = single or stop == start + 1
                if (score := best[start] + points[token]) > best[stop]:
                    best[stop], last[stop] = score, (start, token)
            if not single and (score := best[start] + penalty) > best[start + 1]:
                best[start + 1], last[start + 1] = score, (start, unknown)
        out: list[int] = []
        while count:
            count, token = last[count]
            if token != unknown or out[-1:] != [unknown]:
                out.append(token)
        return out[::-1]

    return encode
