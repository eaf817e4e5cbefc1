"""The interface of constraints: what may come next in an answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Constraint(Protocol):
    """The state of a grammar over the tokens of one answer. The core asks and advances it; it is never shared."""

    def allowed(self) -> NDArray[np.bool_] | None:
        """Return which tokens (V,) may come next; None if any may. The caller does not change the array."""
        ...

    def accept(self, token: int) -> None:
        """Advance by a token that `allowed`."""
        ...

    def validate(self, tokens: Sequence[int]) -> int:
        """Return how many of these tokens, from the first, may follow; the state does not change."""
        ...

    @property
    def finished(self) -> bool:
        """Whether the answer is complete, so that only an end-of-text token may follow."""
        ...
