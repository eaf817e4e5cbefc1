"""Options of the samplers: llama.cpp's parameters, names and defaults, checked when they are set.

The defaults are those of `common_params_sampling` in llama.cpp's common/common.h (2026-10).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

from localllm.errors import LocalLLMError

ORDER = ("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature")
BREAKER_BYTES = 40  # llama.cpp cuts longer sequence breakers; we refuse them


class SamplingError(LocalLLMError):
    """A sampler option is out of range, or the logits cannot be sampled from."""


@dataclass(frozen=True, slots=True)
class SamplerOptions:
    """How to choose the next token. A sampler that is not in `samplers` does not run, and its options have no effect.

    Raises SamplingError with the option, its value and its range.
    """

    seed: int = -1  # -1: a new one for every Sampler
    temperature: float = 0.8  # 0 or less: the top token
    dynatemp_range: float = 0.0  # 0: off; else the temperature varies by this, with the entropy of the candidates
    dynatemp_exponent: float = 1.0
    top_k: int = 40  # 0 or less: off
    top_p: float = 0.95  # 1: off
    min_p: float = 0.05  # 0: off
    typical_p: float = 1.0  # 1: off
    top_n_sigma: float = -1.0  # 0 or less: off
    xtc_probability: float = 0.0  # 0: off
    xtc_threshold: float = 0.1  # above 0.5: off
    repeat_penalty: float = 1.0  # 1: off
    repeat_last_n: int = 64  # last tokens that repeat, frequency and presence penalties consider
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    dry_multiplier: float = 0.0  # 0: off
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = 64  # last tokens that DRY considers
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    min_keep: int = 0  # minimum candidates that typ_p, top_p, min_p and xtc keep
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # -inf bans a token
    samplers: tuple[str, ...] = ORDER  # in running order

    @property
    def greedy(self) -> bool:
        """Whether the top candidate is always chosen."""
        return "temperature" in self.samplers and self.temperature <= 0 and self.dynatemp_range <= 0

    def __post_init__(self) -> None:
        for name, (kind, allowed, text) in _RULES.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, kind) or not allowed(value):
                raise SamplingError(f"sampler option {name} is {value!r}: it must be {text}")
        for token, bias in self.logit_bias.items():
            if isinstance(token, bool) or not isinstance(token, Integral) or token < 0:
                raise SamplingError(f"sampler option logit_bias names token {token!r}: it must be a token id")
            if not isinstance(bias, Real) or not (math.isfinite(bias) or bias == -math.inf):
                raise SamplingError(
                    f"sampler option logit_bias of token {token} is {bias!r}: it must be finite, or -inf to ban it"
                )
        for breaker in self.dry_sequence_breakers:
            if not 0 < len(breaker.encode()) <= BREAKER_BYTES:
                raise SamplingError(
                    f"sampler option dry_sequence_breakers has {breaker!r}: each must have 1 to {BREAKER_BYTES} bytes"
                )
        for name in self.samplers:
            if name not in ORDER:
                raise SamplingError(f"sampler option samplers names {name!r}: known are {', '.join(ORDER)}")


_Rule = tuple[type, Callable[[Any], bool], str]


def _finite(value: float) -> bool:
    return -math.inf < value < math.inf


def _not_negative(value: float) -> bool:
    return 0 <= value < math.inf


def _share(value: float) -> bool:
    return 0 <= value <= 1


_ANY_NUMBER: _Rule = (Real, _finite, "a finite number")
_COUNT: _Rule = (Integral, _not_negative, "a whole number, 0 or more")
_AMOUNT: _Rule = (Real, _not_negative, "a finite number, 0 or more")
_SHARE: _Rule = (Real, _share, "a number from 0 to 1")

_RULES: dict[str, _Rule] = {
    "seed": (Integral, lambda v: -1 <= v < 2**64, "a whole number from 0 to 2^64 - 1, or -1 for a fresh one"),
    "temperature": _ANY_NUMBER,
    "dynatemp_range": _AMOUNT,
    "dynatemp_exponent": _AMOUNT,
    "top_k": (Integral, _finite, "a whole number (0 or less switches it off)"),
    "top_p": _SHARE,
    "min_p": _SHARE,
    "typical_p": _SHARE,
    "top_n_sigma": _ANY_NUMBER,
    "xtc_probability": _SHARE,
    "xtc_threshold": _SHARE,
    "repeat_penalty": (Real, lambda v: 1e-30 < v < 1e30, "a finite number above 0 (1 switches it off)"),
    "repeat_last_n": _COUNT,
    "frequency_penalty": _ANY_NUMBER,
    "presence_penalty": _ANY_NUMBER,
    "dry_multiplier": _AMOUNT,
    "dry_base": (Real, lambda v: 1 <= v < math.inf, "a finite number, 1 or more"),
    "dry_allowed_length": _COUNT,
    "dry_penalty_last_n": _COUNT,
    "min_keep": _COUNT,
}
