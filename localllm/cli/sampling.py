"""The sampler options: one row per field of `SamplerOptions`, which provides type, default and range."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields
from typing import Any, NamedTuple

from localllm.cli.declare import Declared, OptionError
from localllm.sampling.options import ORDER, SamplerOptions, SamplingError


def _bias(text: str) -> tuple[int, float]:
    digits = text[: len(text) - len(text.lstrip("0123456789"))]
    try:
        if not digits or text[len(digits)] not in "+-":
            raise ValueError
        return int(digits), float(text[len(digits) :])
    except (ValueError, IndexError):
        raise OptionError(f"{text!r} is not TOKEN+BIAS or TOKEN-BIAS, such as 15043+1 or 2-inf") from None


def _breaker(text: str) -> str:
    return text.replace("\\n", "\n")


def _breakers(texts: list[str]) -> tuple[str, ...]:
    return tuple(text for text in texts if text != "none")


class _Row(NamedTuple):
    """One sampler option. The field provides its type and default."""

    flags: tuple[str, ...]
    help: str
    shown: str | None = None  # the default as shown in the help
    read: Callable[[str], Any] | None = None  # reads one value, if the field is not a number
    finish: Callable[[list[Any]], Any] | None = None  # turns repeated values into the field


# fmt: off
_SAMPLING: dict[str, _Row] = {
    "seed": _Row(("-s", "--seed"), "random seed (-1: a new one)"),
    "temperature": _Row(("--temp", "--temperature"), "temperature (0: always the top token)"),
    "top_k": _Row(("--top-k",), "keep the k most likely tokens (0: all)"),
    "top_p": _Row(("--top-p",), "keep the most likely tokens with this total probability (1: all)"),
    "min_p": _Row(("--min-p",), "minimum probability, relative to the top token (0: off)"),
    "typical_p": _Row(("--typical", "--typical-p"), "locally typical sampling (1: off)"),
    "top_n_sigma": _Row(("--top-nsigma", "--top-n-sigma"), "keep logits within n sigma of the largest (-1: off)"),
    "xtc_probability": _Row(("--xtc-probability",), "probability of removing the top tokens (0: never)"),
    "xtc_threshold": _Row(("--xtc-threshold",), "minimum probability of a token that XTC may remove"),
    "repeat_last_n": _Row(("--repeat-last-n",), "last tokens that the next three penalties consider"),
    "repeat_penalty": _Row(("--repeat-penalty",), "divide the logits of repeated tokens by this (1: off)"),
    "presence_penalty": _Row(("--presence-penalty",), "subtract this from the logits of repeated tokens"),
    "frequency_penalty": _Row(("--frequency-penalty",), "subtract this for each time a token was seen"),
    "dry_multiplier": _Row(("--dry-multiplier",), "strength of DRY, a penalty on repeated phrases (0: off)"),
    "dry_base": _Row(("--dry-base",), "base of DRY's penalty, which grows with the phrase"),
    "dry_allowed_length": _Row(("--dry-allowed-length",), "length of a phrase that may repeat freely, in tokens"),
    "dry_penalty_last_n": _Row(("--dry-penalty-last-n",), "last tokens that DRY considers"),
    "dry_sequence_breakers": _Row(
        ("--dry-sequence-breaker",), "text that ends a phrase (repeatable; none: no text)",
        r"""\n : " *""", _breaker, _breakers,
    ),
    "dynatemp_range": _Row(("--dynatemp-range",), "vary the temperature by this, with entropy (0: off)"),
    "dynatemp_exponent": _Row(("--dynatemp-exp",), "exponent of the entropy in that range"),
    "logit_bias": _Row(
        ("-l", "--logit-bias"), "change a token's logit: 15043+1 or 2-inf (repeatable)", "", _bias, dict
    ),
    "samplers": _Row(
        ("--samplers",), "samplers, in order", ";".join(ORDER),
        lambda text: tuple(name for name in text.split(";") if name),
    ),
}
# fmt: on


def sampling() -> Iterator[tuple[str, Any, Declared]]:
    usual = {f.name: f.default for f in fields(SamplerOptions)}
    for name, row in _SAMPLING.items():
        default = {} if usual[name] is MISSING else usual[name]
        read = _sampler_reader(name, row, type(default))
        shown = str(default) if row.shown is None else row.shown
        metavar = "TEXT" if row.read else "N"
        yield (
            name,
            default,
            Declared(row.flags, row.help, metavar, read, row.finish is not None, shown, row.finish or tuple),
        )


def _sampler_reader(name: str, row: _Row, number: Callable[[str], Any]) -> Callable[[str], Any]:
    """Reads one value of a sampler option; `SamplerOptions` checks it."""

    def read(text: str) -> Any:
        try:
            value = (row.read or number)(text)
        except OptionError:
            raise
        except ValueError:
            what = "whole number" if number is int else "number"
            raise OptionError(f"{text!r} is not a {what}") from None
        try:
            SamplerOptions(**{name: row.finish([value]) if row.finish else value})
        except SamplingError as error:
            raise OptionError(str(error).removeprefix(f"sampler option {name} ").removeprefix("is ")) from None
        return value

    return read
