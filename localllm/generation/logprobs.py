"""Log-probabilities of tokens, either under the model or under the distribution after the sampling options."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from localllm.engine.top_k import Doubles, Ids, top_k_indices
from localllm.generation.request import Logprob

Bytes = Callable[[int], bytes]  # returns the bytes of a token


def logprob_of(logits: NDArray[np.float32], token: int, top: int, bytes_: Bytes) -> Logprob:
    """Return the log-probabilities of `token` and of the `top` most likely tokens under the logits (V,)."""
    numbers = logits.astype(np.float64)
    total = float(np.log(np.exp(numbers - numbers.max()).sum()) + numbers.max())
    best = top_k_indices(logits, min(top, len(logits))).tolist() if top else []
    return _made(token, float(numbers[token]) - total, [(one, float(numbers[one]) - total) for one in best], bytes_)


def sampled_logprob(ids: Ids, probabilities: Doubles, token: int, top: int, bytes_: Bytes) -> Logprob:
    """Return the log-probabilities of a token sampled from `ids` (n,) and of the `top` most likely ids."""
    numbers = np.log(probabilities)
    best = np.lexsort((ids, -probabilities))[:top].tolist()
    found = float(numbers[np.flatnonzero(ids == token)[0]])
    return _made(token, found, [(int(ids[one]), float(numbers[one])) for one in best], bytes_)


def _made(token: int, logprob: float, top: Sequence[tuple[int, float]], bytes_: Bytes) -> Logprob:
    return Logprob(token, logprob, tuple(top), bytes_(token), tuple(bytes_(one) for one, _ in top))
