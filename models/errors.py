"""The one error of this package: a model file that does not hold what its architecture needs."""

from __future__ import annotations


class ModelError(Exception):
    """A missing, absurd or unsupported key or tensor; the message names it, what was found and what is expected."""
