"""Options of the samplers, with llama.cpp's names and defaults.

The defaults match `common_params_sampling` in llama.cpp's common/common.h (2026-10).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, ClassVar

from localllm.base.notices import Notice, Written
from localllm.options.declare import Options, option
from localllm.options.kinds import MOST_WHOLE, Kind, OptionError, number

LETTERS = {  # llama.cpp's letter for each sampler, in llama.cpp's order
    "e": "penalties", "d": "dry", "s": "top_n_sigma", "k": "top_k", "y": "typ_p", "p": "top_p", "m": "min_p",
    "x": "xtc", "t": "temperature", "i": "infill", "a": "adaptive_p",
}  # fmt: skip
NAMES = tuple(LETTERS.values())
ORDER = NAMES[:-2]  # default sampler chain: all samplers except infill and adaptive-p
SPELLINGS = {name.replace("_", ""): name for name in NAMES} | {  # llama.cpp's spellings, without - and _
    "nucleus": "top_p", "temp": "temperature", "typ": "typ_p", "typicalp": "typ_p",
}  # fmt: skip
MOST_LETTERS = 64
BREAKER_BYTES = 40  # maximum length of a DRY sequence breaker; llama.cpp truncates longer ones


def _finite(value: float) -> bool:
    return -math.inf < value < math.inf


def _not_negative(value: float) -> bool:
    return 0 <= value < math.inf


NUMBER = number(float, _finite, "a finite number")
COUNT = number(int, _not_negative, "a whole number, 0 or more")
RATE = number(float, _not_negative, "a finite number, 0 or more")
AMOUNT = RATE._replace(clamp=(0, math.inf))
SHARE = number(float, lambda value: 0 <= value <= 1, "a number from 0 to 1", (0, 1))
TOP = number(int, _finite, "a whole number (0 or less switches it off)", (0, MOST_WHOLE))
SEED = number(int, lambda value: -1 <= value < 2**64, "a whole number from 0 to 2^64 - 1, or -1 for a fresh one")
VERSION = number(int, lambda value: value in (0, 1, 2), "0, 1 or 2")
TARGET = number(
    float, lambda value: -math.inf < value <= 1, "a number up to 1 (below 0 switches it off)", (-math.inf, 1)
)
DIVISOR = number(float, lambda value: 1e-30 < value < 1e30, "a finite number above 0 (1 switches it off)")
DECAY = number(float, lambda value: 0 <= value <= 0.99, "a number from 0 to 0.99")
BASE = number(float, lambda value: 1 <= value < math.inf, "a finite number, 1 or more")


def _read_bias(text: str) -> tuple[int, float]:
    digits = text[: len(text) - len(text.lstrip("0123456789"))]
    try:
        if not digits or text[len(digits)] not in "+-":
            raise ValueError
        return int(digits), float(text[len(digits) :])
    except (ValueError, IndexError):
        raise OptionError(f"{text!r} is not TOKEN+BIAS or TOKEN-BIAS, such as 15043+1 or 2-inf") from None


def _bias_problem(biases: Any) -> str:
    if not isinstance(biases, Mapping):
        return f"is {biases!r}: it must be a dict of token ids and biases"
    for token, bias in biases.items():
        if isinstance(token, bool) or not isinstance(token, Integral) or token < 0:
            return f"names token {token!r}: it must be a token id"
        if not isinstance(bias, Real) or not (math.isfinite(bias) or bias == -math.inf):
            return f"of token {token} is {bias!r}: it must be finite, or -inf to ban it"
    return ""


def _breaker_problem(breakers: Any) -> str:
    if isinstance(breakers, str) or not isinstance(breakers, Sequence):
        return f"is {breakers!r}: it must be a sequence of texts"
    for breaker in breakers:
        if not isinstance(breaker, str) or not 0 < len(breaker.encode()) <= BREAKER_BYTES:
            return f"has {breaker!r}: each must have 1 to {BREAKER_BYTES} bytes"
    return ""


def sampler_name(spelling: str) -> str | None:
    """Return the name of a sampler from any of llama.cpp's spellings, ignoring case, or None if it is unknown."""
    return SPELLINGS.get(spelling.lower().replace("-", "").replace("_", ""))


def read_samplers(text: str) -> tuple[str, ...]:
    """Return sampler names separated by ; or ,. Unknown names are returned unchanged.

    A text that is not a name and consists of sampler letters is a sequence of samplers.
    """
    if sampler_name(text) is None and 0 < len(text) <= MOST_LETTERS and all(letter in LETTERS for letter in text):
        return tuple(LETTERS[letter] for letter in text)
    names = (name.strip() for name in text.replace(",", ";").split(";"))
    return tuple(sampler_name(name) or name for name in names if name)


def _samplers_problem(names: Any) -> str:
    if isinstance(names, str) or not isinstance(names, Sequence):
        return f"is {names!r}: it must be a sequence of names"
    return next((f"names {name!r}: known are {', '.join(NAMES)}" for name in names if name not in NAMES), "")


BIAS = Kind(_read_bias, _bias_problem)
BREAKER = Kind(lambda text: text.replace("\\n", "\n"), _breaker_problem)
SAMPLERS = Kind(read_samplers, _samplers_problem)


def _all_but_none(texts: list[str]) -> tuple[str, ...]:
    return tuple(text for text in texts if text != "none")


@dataclass(frozen=True, slots=True)
class SamplingOptions(Options):
    """How to choose the next token. A sampler that is not in `samplers` does not run, and its options have no effect.

    Raises OptionError with the option, its value and its range.
    """

    TITLE: ClassVar[str] = "Sampling"
    seed: int = option(-1, "-s", "--seed", kind=SEED, help="random seed (-1: a new one)")
    temperature: float = option(
        0.8, "--temp", "--temperature", kind=AMOUNT, key="temp", ollama=True,
        help="temperature (0: always the top token)",
    )  # fmt: skip
    top_k: int = option(
        40, "--top-k", kind=TOP, key="top_k", ollama=True, help="keep the k most likely tokens (0: all)"
    )
    top_p: float = option(
        0.95, "--top-p", kind=SHARE, key="top_p", ollama=True,
        help="keep the most likely tokens with this total probability (1: all)",
    )  # fmt: skip
    min_p: float = option(
        0.05, "--min-p", kind=SHARE, key="min_p", ollama=True,
        help="minimum probability, relative to the top token (0: off)",
    )  # fmt: skip
    typical_p: float = option(
        1.0, "--typical", "--typical-p", kind=SHARE, ollama=True, help="locally typical sampling (1: off)"
    )
    top_n_sigma: float = option(
        -1.0, "--top-nsigma", "--top-n-sigma", kind=NUMBER, help="keep logits within n sigma of the largest (-1: off)"
    )
    xtc_probability: float = option(
        0.0, "--xtc-probability", kind=SHARE, key="xtc_probability",
        help="probability of removing the top tokens (0: never)",
    )  # fmt: skip
    xtc_threshold: float = option(
        0.1, "--xtc-threshold", kind=SHARE, key="xtc_threshold",
        help="minimum probability of a token that XTC may remove",
    )  # fmt: skip
    repeat_last_n: int = option(
        64, "--repeat-last-n", kind=COUNT, unit="tokens", key="penalty_last_n",
        help="number of recent tokens considered by the next three penalties",
    )  # fmt: skip
    repeat_penalty: float = option(
        1.0, "--repeat-penalty", kind=DIVISOR, key="penalty_repeat", ollama=True, vllm="repetition_penalty",
        help="divide the logits of repeated tokens by this (1: off)",
    )  # fmt: skip
    presence_penalty: float = option(
        0.0, "--presence-penalty", kind=NUMBER, ollama=True, help="subtract this from the logits of repeated tokens"
    )
    frequency_penalty: float = option(
        0.0, "--frequency-penalty", kind=NUMBER, ollama=True, help="subtract this for every occurrence of a token"
    )
    dry_multiplier: float = option(
        0.0, "--dry-multiplier", kind=AMOUNT, help="strength of DRY, a penalty on repeated phrases (0: off)"
    )
    dry_base: float = option(1.75, "--dry-base", kind=BASE, help="base of DRY's penalty, which grows with the phrase")
    dry_allowed_length: int = option(
        2, "--dry-allowed-length", kind=COUNT, unit="tokens",
        help="maximum length of a phrase that may repeat freely",
    )  # fmt: skip
    dry_penalty_last_n: int = option(
        64, "--dry-penalty-last-n", kind=COUNT, unit="tokens", help="number of recent tokens considered by DRY"
    )
    dry_sequence_breaker: Sequence[str] = option(
        ("\n", ":", '"', "*"), "--dry-sequence-breaker", kind=BREAKER, repeat=True, finish=_all_but_none,
        shown=r"""\n : " *""",
        help=Notice("text that ends a phrase (", Written("several; (): no text", "repeatable; none: no text"), ")"),
    )  # fmt: skip
    dynatemp_range: float = option(
        0.0, "--dynatemp-range", kind=AMOUNT, help="vary the temperature by this, depending on entropy (0: off)"
    )
    dynatemp_exp: float = option(
        1.0, "--dynatemp-exp", kind=AMOUNT, field="dynatemp_exponent", help="exponent of the entropy in that range"
    )
    adaptive_target: float = option(
        -1.0, "--adaptive-target", kind=TARGET,
        help="prefer tokens near this probability; needs adaptive_p among the samplers (-1: off)",
    )  # fmt: skip
    adaptive_decay: float = option(
        0.9, "--adaptive-decay", kind=DECAY,
        help="how slowly adaptive_p forgets earlier tokens",
    )  # fmt: skip
    mirostat: int = option(
        0, "--mirostat", kind=VERSION, key="mirostat", ollama=True,
        help="Mirostat version, 1 or 2: keep the surprise at a target, instead of other samplers (0: off)",
    )  # fmt: skip
    mirostat_tau: float = option(
        5.0, "--mirostat-ent", kind=RATE, unit="bits", key="mirostat_tau", ollama=True,
        help="Mirostat's target: the average surprise per token",
    )  # fmt: skip
    mirostat_eta: float = option(
        0.1, "--mirostat-lr", kind=RATE, key="mirostat_eta", ollama=True, help="Mirostat's learning rate"
    )
    logit_bias: Mapping[int, float] = option(
        {}, "-l", "--logit-bias", kind=BIAS, repeat=True, finish=dict,
        help=Notice(
            "change a token's logit: ", Written("{15043: 1.0} or {2: -math.inf}", "15043+1 or 2-inf (repeatable)")
        ),
    )  # fmt: skip
    samplers: Sequence[str] = option(
        ORDER, "--samplers", "--sampling-seq", "--sampler-seq", kind=SAMPLERS, shown=";".join(ORDER),
        help=Notice(
            "samplers, in order", Written("", ", separated by ; or , or given as letters (edskypmxt)"),
            "; infill and adaptive_p are also available",
        ),
    )  # fmt: skip
    min_keep: int = option(
        0, kind=COUNT, unit="tokens", help="minimum number of candidates kept by typical_p, top_p, min_p and XTC"
    )

    @property
    def greedy(self) -> bool:
        """Whether the most likely candidate is always chosen."""
        if self.mirostat:
            return self.temperature <= 0
        return "temperature" in self.samplers and self.temperature <= 0 and self.dynatemp_range <= 0
