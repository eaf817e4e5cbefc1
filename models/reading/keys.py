"""Reads and validates GGUF metadata: every value has bounds, and every error names the key and the value found."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from operator import index
from typing import Any, TypeVar

import numpy as np

from localllm.models.errors import ModelError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Keys:
    """Reads and validates the metadata keys with one prefix; a default makes a key optional."""

    metadata: Mapping[str, Any]
    prefix: str

    def having(self, **values: Any) -> Keys:
        """Return these keys and others, which override the GGUF; `__` in a name means a dot."""
        more = {self.prefix + name.replace("__", "."): value for name, value in values.items()}
        return replace(self, metadata={**self.metadata, **more})

    def holds(self, key: str) -> bool:
        return self.metadata.get(self.prefix + key) is not None

    def _value(self, key: str, default: Any) -> Any:
        value = self.metadata.get(self.prefix + key, default)
        if value is None:
            raise ModelError(f"{self.prefix}{key}: this key is missing, and the model needs it")
        return value

    def _integer(self, key: str, value: Any, low: int, high: int, reason: str = "") -> int:
        try:
            number = None if isinstance(value, bool) else index(value)
        except TypeError:
            number = None
        if number is None or not low <= number <= high:
            raise ModelError(f"{self.prefix}{key}: expected an integer from {low} to {high}{reason}, {found(value)}")
        return number

    def integer(self, key: str, low: int, high: int, default: int | None = None, reason: str = "") -> int:
        """Return an integer within bounds; the error states `reason` for the upper bound."""
        return self._integer(key, self._value(key, default), low, high, reason)

    def per_layer(
        self, key: str, layers: int, low: int, high: int, default: tuple[int, ...] | None = None, reason: str = "",
        longer: bool = False,
    ) -> tuple[int, ...]:  # fmt: skip
        """Return one integer per layer, from an array or from one value for all layers.

        An array may be `longer` than `layers` if the GGUF counts layers that are not in it.
        """
        value = self._value(key, default)
        if longer and not isinstance(value, str) and hasattr(value, "__len__"):
            value = value[: max(layers, 1)] if len(value) > layers else value
        return self._per_layer(key, value, layers, partial(self._integer, low=low, high=high, reason=reason))

    def _per_layer(self, key: str, value: Any, layers: int, read: Callable[[str, Any], T]) -> tuple[T, ...]:
        if isinstance(value, str) or not hasattr(value, "__len__"):
            return (read(key, value),) * layers
        if len(value) != layers:
            raise ModelError(f"{self.prefix}{key}: expected {layers} numbers, one per layer, found {len(value)}")
        return tuple([read(key, item) for item in value])

    def integers(self, key: str, count: int, low: int, high: int) -> tuple[int, ...]:
        """Return the integers of an array of length `count`."""
        value = self._value(key, None)
        if isinstance(value, str) or not hasattr(value, "__len__") or len(value) != count:
            raise ModelError(f"{self.prefix}{key}: expected a list of {count} integers, {found(value)}")
        return tuple(self._integer(key, item, low, high) for item in value)

    def reals(
        self, key: str, layers: int, low: float, high: float, default: float | tuple[float, ...] | None = None
    ) -> tuple[float, ...]:
        """Return one number per layer, from an array or from one value for all layers."""
        return self._per_layer(key, self._value(key, default), layers, partial(self._real, low=low, high=high))

    def flag(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool | np.bool_):
            raise ModelError(f"{self.prefix}{key}: expected true or false, {found(value)}")
        return bool(value)

    def periodic(self, key: str, layers: int, period: int, first: bool = False) -> tuple[bool, ...]:
        """Return one flag per layer, from an array, or from a period n that makes every n-th flag false (0: all true).

        With `first`, layers 0, n, 2n, ... are false; otherwise layers n - 1, 2n - 1, ...
        """
        value = self._value(key, period)
        if isinstance(value, str) or not hasattr(value, "__len__"):
            period = self._integer(key, value, 0, layers + period)
            return tuple(not period or (layer + (not first)) % period != 0 for layer in range(layers))
        return self._flags(key, value, layers)

    def flags(self, key: str, layers: int, default: bool) -> tuple[bool, ...]:
        """Return one flag per layer, from an array or from one value for all layers; the integers 0
        and 1 are accepted."""
        value = self._value(key, default)
        many = hasattr(value, "__len__") and not isinstance(value, str)
        return self._flags(key, value if many else (value,) * layers, layers)

    def _flags(self, key: str, value: Any, layers: int) -> tuple[bool, ...]:
        numbers = tuple(int(item) if isinstance(item, bool | np.bool_) else item for item in value)
        return tuple(n != 0 for n in self._per_layer(key, numbers, layers, partial(self._integer, low=0, high=1)))

    def real(self, key: str, low: float, high: float, default: float | None = None) -> float:
        return self._real(key, self._value(key, default), low, high)

    def _real(self, key: str, value: Any, low: float, high: float) -> float:
        try:
            number = math.nan if isinstance(value, bool | str) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not low <= number <= high:
            raise ModelError(f"{self.prefix}{key}: expected a number from {low:g} to {high:g}, {found(value)}")
        return number


def found(value: Any) -> str:
    value = value.item() if isinstance(value, np.generic) else value
    text = repr(value) if isinstance(value, str | int | float | bool) else f"a {type(value).__name__}"
    return f"found {text if len(text) <= 60 else text[:60] + '...'}"
