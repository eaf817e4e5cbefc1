"""The interface of constrained decoding: which tokens may come next in an answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Constraint(Protocol):
    """The grammar state of one answer. The core queries and advances it; answers never share a state."""

    def allowed(self) -> NDArray[np.bool_] | None:
        """Return a mask (V,) of the tokens that may come next; None if all may. The caller must not change it."""
        ...

    def accept(self, token: int) -> None:
        """Advance by a token that `allowed` permits."""
        ...

    def validate(self, tokens: Sequence[int]) -> int:
        """Return how many of the leading `tokens` may follow. The state does not change."""
        ...

    @property
    def finished(self) -> bool:
        """Whether the answer is complete, so that only an end-of-text token may follow."""
        ...
