r"""Find the GGUF name of the pre-tokenizer in a tokenizer.json from its definition, not from the vocabulary.

The steps of `pre_tokenizer` end with the byte-level step. Definitions that split text in the same way compare equal
here. `localllm.tokenizer.pretokenize` defines each name.
"""

from __future__ import annotations

from typing import Any

from localllm.base.printable import printable
from localllm.convert.errors import ConvertError
from localllm.convert.jsonfile import steps as parts
from localllm.tokenizer.pretokenize import CASED_LETTERS

_ENDS = r"\s*[\r\n]|\s+(?!\S)|\s+"
_SHORT = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_MARKED = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_PATHS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CAMEL = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{{0}}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{{0}}"
_MAYBE_SHORT = _CAMEL.replace("{0}", _SHORT + "?")
_NOT_HAN = _MAYBE_SHORT.replace(r"\p{M}]", r"\p{M}&&[^\p{Han}]]")  # Kimi K2's pattern in converted tokenizer.json files
_THREE = r"\p{N}{1,3}"
_ASIAN = "[一-龥ࠀ-一가-퟿]+"
_KANA_HAN = "[一-龥぀-ゟ゠-ヿ]+"
_PUNCTUATION = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
_CODE = rf"{_PUNCTUATION}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+"
_BLOOM = r" ?[^(\s|[.,!?…。，、।۔،])]+"
_YOUTU_SCRIPTS = "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|" + _KANA_HAN
_DIGIT, _GPT2 = "one digit", "gpt-2's"  # steps without a regular expression in tokenizer.json

# Steps, and two names: with ignore_merges (a word that is itself a token skips the merges), and without.
_NAMES: dict[tuple[str, ...], tuple[str, str]] = {
    (rf"{_SHORT}|{_WORD}|{_THREE}|{_SIGNS}|{_ENDS}",): ("llama-bpe", "dbrx"),
    **{
        steps: (name, name)
        for name, steps in (
            ("qwen2", (rf"{_SHORT}|{_WORD}|\p{{N}}|{_SIGNS}|{_ENDS}",)),
            ("qwen35", (rf"{_SHORT}|{_MARKED}|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_ENDS}",)),
            ("ufakzeka", (rf"{_WORD}|\p{{N}}|{_SIGNS}|{_ENDS}",)),
            ("seed-coder", (rf"{_SHORT}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_ENDS}",)),
            ("minicpm5", (_THREE, rf"{_SHORT}|{_WORD}|\p{{N}}+|{_SIGNS}|{_ENDS}")),
            ("gpt-4o", (rf"{_MAYBE_SHORT}|{_THREE}|{_PATHS}|{_ENDS}",)),
            ("tiny_aya", (r"\d{1,3}(?=(?:\d{3})*\b)", rf"{_MAYBE_SHORT}|{_THREE}|{_PATHS}|{_ENDS}")),
            ("kimi-k2", (rf"[\p{{Han}}]+|{_NOT_HAN}|{_THREE}|{_SIGNS}|{_ENDS}",)),
            ("tekken", (rf"{_CAMEL.replace('{0}', '')}|\p{{N}}|{_PATHS}|{_ENDS}",)),
            ("youtu", (_YOUTU_SCRIPTS, rf"{_MAYBE_SHORT}|\p{{N}}|{_PATHS}|{_ENDS}")),
            (
                "exaone-moe",
                (
                    rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
                    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|{_ENDS}",
                ),
            ),
            (
                "jais-2",
                (
                    rf"{_SHORT}|{_WORD}|{_THREE}|{_SIGNS}|\s*[\r\n]"
                    + "".join(rf"|\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4, "1,2"))
                    + r"|\s",
                ),
            ),
            ("gpt-2", (_GPT2,)),
            ("starcoder", (_DIGIT, _GPT2)),
            ("falcon", ("Punctuation Contiguous", _GPT2, "Digits", "[0-9][0-9][0-9]")),
            ("bloom", (_BLOOM,)),
            ("viking", (_BLOOM, _DIGIT)),
            ("deepseek-coder", (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _ASIAN, _DIGIT)),
            (
                "deepseek-llm",
                (r"[\r\n]", rf"\s?[{CASED_LETTERS}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", _ASIAN, _DIGIT),
            ),
            ("deepseek-v3", (_THREE, _KANA_HAN, rf"{_CODE}[\r\n]*|{_ENDS}")),
            ("spark2_5", (_THREE, _KANA_HAN, rf"{_CODE}|[\r\n]|\s+(?!\S)|\s+", _DIGIT)),
        )
    },
}
# Equivalent spellings: possessive quantifiers that never backtrack; the order of exclusive alternatives; one or several
# line ends after white space that consumes the others; literal line ends.
_SPELLINGS = (
    ("\r", r"\r"), ("\n", r"\n"), ("?+", "?"), ("++", "+"), ("{1}", ""), (r"\s*[\r\n]+", r"\s*[\r\n]"),
    ("'(?i:[sdmt]|ll|ve|re)", _SHORT), ("(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])", _SHORT),
)  # fmt: skip
_GPT2_REGEX = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def pre_tokenizer_name(pre_tokenizer: Any, ignore_merges: bool) -> str:
    """Return the value of `tokenizer.ggml.pre`; raise ConvertError if no known pre-tokenizer splits text in the same
    way, since the token ids would be wrong."""
    steps = tuple(step for part in parts(pre_tokenizer, "pretokenizers") for step in _steps(part))
    if steps not in _NAMES:
        shown = printable(" then ".join(steps) or "nothing", 200)
        raise ConvertError(f"the pre-tokenizer of tokenizer.json is unknown: it splits text by {shown}")
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
