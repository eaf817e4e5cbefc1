"""The samplers' options: a row for each field of `SamplerOptions`, which knows its type, its default and its range."""

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
    """An option of the samplers. Its type and default are the field's."""

    flags: tuple[str, ...]
    help: str
    shown: str | None = None  # the default in words
    read: Callable[[str], Any] | None = None  # one written value, where the field is no number
    finish: Callable[[list[Any]], Any] | None = None  # repeated values to the field


# fmt: off
_SAMPLING: dict[str, _Row] = {
    "seed": _Row(("-s", "--seed"), "seed of the random numbers; -1: a fresh one"),
    "temperature": _Row(("--temp", "--temperature"), "0: always the likeliest token"),
    "top_k": _Row(("--top-k",), "keep the k likeliest tokens; 0: all"),
    "top_p": _Row(("--top-p",), "keep the likeliest tokens that together have this probability; 1: all"),
    "min_p": _Row(("--min-p",), "keep tokens at least this likely, relative to the likeliest; 0: all"),
    "typical_p": _Row(("--typical", "--typical-p"), "locally typical sampling; 1: off"),
    "top_n_sigma": _Row(("--top-nsigma", "--top-n-sigma"), "keep logits within n sigma of the largest; -1: off"),
    "xtc_probability": _Row(("--xtc-probability",), "how often the likeliest tokens are left out; 0: never"),
    "xtc_threshold": _Row(("--xtc-threshold",), "how likely a token must be for XTC to leave it out"),
    "repeat_last_n": _Row(("--repeat-last-n",), "tokens that the next three look back on"),
    "repeat_penalty": _Row(("--repeat-penalty",), "divides the logits of tokens seen before; 1: off"),
    "presence_penalty": _Row(("--presence-penalty",), "taken off the logits of tokens seen before"),
    "frequency_penalty": _Row(("--frequency-penalty",), "taken off once for every time a token was seen"),
    "dry_multiplier": _Row(("--dry-multiplier",), "strength of DRY, which is against repeated phrases; 0: off"),
    "dry_base": _Row(("--dry-base",), "growth of DRY's penalty with the length of the phrase"),
    "dry_allowed_length": _Row(("--dry-allowed-length",), "tokens of a phrase that may repeat freely"),
    "dry_penalty_last_n": _Row(("--dry-penalty-last-n",), "tokens that DRY looks back on"),
    "dry_sequence_breakers": _Row(
        ("--dry-sequence-breaker",), "text that ends a phrase; repeatable; none: no text does",
        r"""\n : " *""", _breaker, _breakers,
    ),
    "dynatemp_range": _Row(("--dynatemp-range",), "the temperature varies by this, with entropy; 0: off"),
    "dynatemp_exponent": _Row(("--dynatemp-exp",), "how entropy bends that range"),
    "logit_bias": _Row(
        ("-l", "--logit-bias"), "change a token's logit, as 15043+1 or 2-inf; repeatable", "", _bias, dict
    ),
    "samplers": _Row(
        ("--samplers",), "samplers in the order they run", ";".join(ORDER),
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
    """Reads one value of a sampler option and lets `SamplerOptions` judge it."""

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
