"""Chooses the tokenization of a text that reuses the most of the KV cache.

A text has many tokenizations, and generated tokens need not match the tokenizer's. The cache contains the generated
tokens. When a conversation is rendered again, cached tokens are kept as long as their bytes match the text.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence


def align_tokens(
    cached: Sequence[int], fresh: Sequence[int], piece: Callable[[int], bytes], special: Collection[int]
) -> list[int]:
    """Return `cached[:i]` + `fresh[j:]` with the same bytes as `fresh` and the largest possible i.

    `fresh` is the tokenizer's encoding of the text. The switch is at a byte offset where a token ends in both. A token
    in `special`, or of a picture (below 0), matches only itself, never a text.
    """
    length = min(len(cached), len(fresh))
    equal = next((i for i in range(length) if cached[i] != fresh[i]), length)
    i = j = best_i = best_j = equal
    ours = theirs = b""  # unmatched bytes of `cached`, and of `fresh`; at least one of the two is empty
    while True:
        if not ours and not theirs and i < len(cached) and j < len(fresh) and cached[i] == fresh[j]:
            i, j = i + 1, j + 1
        else:
            mine = len(ours) <= len(theirs)
            if (i == len(cached)) if mine else (j == len(fresh)):
                break
            token = cached[i] if mine else fresh[j]
            more = b"" if token < 0 or token in special else piece(token)
            if not more:
                break
            if mine:
                ours, i = ours + more, i + 1
            else:
                theirs, j = theirs + more, j + 1
            shared = min(len(ours), len(theirs))
            if ours[:shared] != theirs[:shared]:
                break
            ours, theirs = ours[shared:], theirs[shared:]
        if not ours and not theirs:
            best_i, best_j = i, j
    return [*cached[:best_i], *fresh[best_j:]]
