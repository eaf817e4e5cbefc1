r"""Find GGUF's name for the pre-tokenizer of a tokenizer.json, by its content, not by a vocabulary.

Its `pre_tokenizer` is a list of steps that ends in the letters for bytes. Spellings that split text alike are equal
here. `localllm.tokenizer.pretokenize` defines each name.
"""

from __future__ import annotations

from typing import Any

from localllm.convert.errors import ConvertError
from localllm.convert.jsonfile import steps as parts
from localllm.printable import printable

_ENDS = r"\s*[\r\n]|\s+(?!\S)|\s+"
_SHORT = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CAMEL = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{{0}}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{{0}}"
_DIGIT, _GPT2 = "one digit", "gpt-2's"  # steps without a regular expression in the file

# Steps, and two names: for vocabularies where a word that is a token skips merging, and for others.
_NAMES: dict[tuple[str, ...], tuple[str, str]] = {
    (rf"{_SHORT}|{_WORD}|\p{{N}}{{1,3}}|{_SIGNS}|{_ENDS}",): ("llama-bpe", "dbrx"),
    (rf"{_SHORT}|{_WORD}|\p{{N}}|{_SIGNS}|{_ENDS}",): ("qwen2", "qwen2"),
    (rf"{_SHORT}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_ENDS}",): ("seed-coder", "seed-coder"),
    (rf"{_CAMEL.replace('{0}', _SHORT + '?')}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_ENDS}",): (
        "gpt-4o",
        "gpt-4o",
    ),
    (rf"{_CAMEL.replace('{0}', '')}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_ENDS}",): ("tekken", "tekken"),
    (_GPT2,): ("gpt-2", "gpt-2"),
    (_DIGIT, _GPT2): ("starcoder", "starcoder"),
    (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", _DIGIT): ("deepseek-coder", "deepseek-coder"),
}
# Equivalent spellings: possessive repetition that never backtracks; the order of exclusive alternatives; one or several
# # line ends after white space that consumes the others.
_SPELLINGS = (
    ("?+", "?"), ("++", "+"), ("{1}", ""), (r"\s*[\r\n]+", r"\s*[\r\n]"), ("'(?i:[sdmt]|ll|ve|re)", _SHORT),
    ("(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])", _SHORT),
)  # fmt: skip
_GPT2_REGEX = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def pre_tokenizer_name(pre_tokenizer: Any, ignore_merges: bool) -> str:
    """Return the name for `tokenizer.ggml.pre`; ConvertError if none splits like this: another would give wrong ids."""
    steps = tuple(step for part in parts(pre_tokenizer, "pretokenizers") for step in _steps(part))
    if steps not in _NAMES:
        shown = printable(" then ".join(steps) or "nothing", 200)
        raise ConvertError(f"the pre-tokenizer of tokenizer.json is unknown: it cuts text by {shown}")
    return _NAMES[steps][0 if ignore_merges else 1]


def _steps(part: dict[str, Any]) -> tuple[str, ...]:
    match part:
        case {"type": "ByteLevel"} if not part.get("add_prefix_space"):
            return (_GPT2,) if part.get("use_regex", True) else ()
        case {"type": "Digits", "individual_digits": True}:
            return (_DIGIT,)
        case {"type": "Split", "pattern": {"Regex": str(regex)}, "behavior": behavior}:
            inverted = bool(part.get("invert"))
            if (behavior, inverted) in (("Isolated", False), ("Removed", True)):
                for spelling, common in _SPELLINGS:
                    regex = regex.replace(spelling, common)
                return (_DIGIT if regex == r"\p{N}" else _GPT2 if regex == _GPT2_REGEX else regex,)
    return (f"{part.get('type')} {part.get('behavior', '')}".strip(),)
