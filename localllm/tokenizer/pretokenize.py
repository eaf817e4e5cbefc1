r"""Splits text into words before merging: one entry for every pre-tokenizer name in llama.cpp.

A rule is a list of patterns; each splits the pieces of the previous pattern at both ends of its matches. Character
classes follow llama.cpp, so that token ids are the same. A pattern with a class `\p{..}` is matched against text in
which every non-ASCII character is replaced by one letter for its class; other patterns are matched against the text
itself. In both, non-ASCII white space is replaced by a vertical tab. `\s`, `\d` and letter case are ASCII only.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import pairwise

from localllm.base.notices import Notice, Setting
from localllm.base.printable import printable
from localllm.tokenizer.errors import TokenizerError

_LONGEST_NAME = 40  # maximum characters of a name to compare
_SPACE = "\v"
_WHITE = (
    "\x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u2028\u2029\u202f\u205f\u3000"
)
WHITE_SPACE = frozenset(" \t\n\v\f\r" + _WHITE)
_WHITE_FOLDED = dict.fromkeys(map(ord, _WHITE), _SPACE)
_STANDS_FOR = {"L": "λ", "N": "ν", "M": "μ", "P": "π", "S": "σ"}  # by first letter of the Unicode category; else OTHER
_HAN, _OTHER = "漢", "ω"
_HAN_RANGES = (
    *((0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x2A6DF), (0x2A700, 0x2EBEF)),
    (0x2F800, 0x2FA1F),
)
_CLASSES: Mapping[str, str] = {  # expansion of `\p{..}` inside brackets
    "L": "A-Za-zλ漢",
    "Word": "A-Za-zλ",  # letters except Han
    "Han": "漢",
    "Upper": "A-Zλ漢",  # all but lower case: llama.cpp only knows the case of ASCII letters
    "Lower": "a-zλ漢",
    "N": "0-9ν",
    "M": "μ",
    "P": r"!-#%-*,\-./:;?@\[\\\]_{}π",
    "S": r"$+<=>\^`|~σ",
}

# Building blocks of patterns. The first matches the contractions 's 't 're 've 'm 'll 'd.
_SHORT = "'s|'t|'re|'ve|'m|'ll|'d"
_ANY_CASE = f"(?i:{_SHORT})"
_ENDS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?[\p{L}]+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_KANA_HAN = r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_ASIAN = r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_CAMEL = (  # splits words before a capital that follows a lower-case letter
    r"[^\r\n\p{L}\p{N}]?[\p{Upper}]*[\p{Lower}]+{end}|[^\r\n\p{L}\p{N}]?[\p{Upper}]+[\p{Lower}]*{end}"
)
CASED_LETTERS = (  # in the Unicode version used by deepseek-llm
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)

_GPT2 = rf"{_SHORT}| ?[\p{{L}}]+| ?[\p{{N}}]+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)"
_LLAMA3 = rf"{_ANY_CASE}|{_WORD}|[\p{{N}}]{{1,3}}|{_SIGNS}|{_ENDS}"
_QWEN2 = rf"{_ANY_CASE}|{_WORD}|[\p{{N}}]|{_SIGNS}|{_ENDS}"
_QWEN35 = rf"{_ANY_CASE}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|[\p{{N}}]| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_ENDS}"
_JAIS2 = (
    rf"{_ANY_CASE}|{_WORD}|[\p{{N}}]{{1,3}}|{_SIGNS}|\s*[\r\n]+|"
    + "".join(rf"\s{{{n}}}(?!\S)|" for n in (512, 256, 128, 64, 32, 16, 8, 4))
    + r"\s{1,2}(?!\S)|\s"
)
_DEEPSEEK3 = r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + _ENDS
_SPARK = r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+|[\r\n]|\s+(?!\S)|\s+"
_MAYBE_SHORT = _CAMEL.replace("{end}", f"{_ANY_CASE}?")
_GPT4O = rf"{_MAYBE_SHORT}|[\p{{N}}]{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_ENDS}"
_TEKKEN = rf"{_CAMEL.replace('{end}', '')}|[\p{{N}}]| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_ENDS}"
_GRANITE_MULTI = _GPT4O.replace(r"\p{Upper}", r"\p{Upper}\p{M}").replace(r"\p{Lower}", r"\p{Lower}\p{M}")
# In these patterns all letters count as both upper and lower case, and marks inside a word count as letters.
_ONE_CASE = rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+{_ANY_CASE}?"
_YOUTU = rf"{_ONE_CASE}|[\p{{N}}]| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_ENDS}"
_TINY_AYA = rf"{_ONE_CASE}|[\p{{N}}]{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_ENDS}"
_YOUTU_SCRIPTS = (
    r"[\uac00-\ud7a3\u3131-\u318e]+"
    r"|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
    r"|[\u3105-\u312f]+|" + _KANA_HAN
)
_KIMI = rf"[\p{{Han}}]+|[^\r\n\p{{L}}\p{{N}}]?[\p{{Word}}]+{_ANY_CASE}?|[\p{{N}}]{{1,3}}|{_SIGNS}|{_ENDS}"
_BAILING = rf"'(?i:[sdmt]|ll|ve|re)|{_WORD}|[\p{{N}}]|{_SIGNS}|\s*[\r\n]|\s+(?!\S)|\s+"
_SEED = rf"{_ANY_CASE}|{_WORD}|[\p{{N}}]| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_ENDS}"
_UFAKZEKA = rf"{_WORD}|[\p{{N}}]|{_SIGNS}|{_ENDS}"
_EXAONE_MOE = (
    rf"{_ANY_CASE}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}][\p{{L}}\p{{M}}]*(?: [\p{{L}}][\p{{L}}\p{{M}}]*)*"
    r"|[\p{N}]| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_MINICPM5 = rf"{_ANY_CASE}|{_WORD}|[\p{{N}}]+|{_SIGNS}|{_ENDS}"
_AFMOE_SCRIPTS = (
    r"[\u4e00-\u9fff\u3400-\u4dbf\u8c48-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f"
    r"\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
_BLOOM = r" ?[^(\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_LINES = r"[^\n]+|\n+"
# Special names for functions that replace regular expressions, which would rescan a whole run at each character.
_TRAILING_SPACE = "white space at the end"
_DIGITS_TO_END = "groups of three digits from the right, split after each"
_DIGITS_FROM_START = "groups of three digits from the right, split before each"


@dataclass(frozen=True, slots=True)
class PreRule:
    """A pre-tokenizer. In llama.cpp the name determines all flags."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False  # whether a word that is a token is used whole, without merging
    add_bos: bool = False  # whether to add BOS if the GGUF has no flag
    force_bos: bool = False  # whether to add BOS even if the GGUF's flag is false
    no_default_bos: bool = False
    escape_spaces: bool = False  # whether tokens are UTF-8 with U+2581 for a space and `<0x..>` for bytes
    byte_level: bool = True  # whether tokens use one letter per UTF-8 byte
    newline_words: bool = False  # whether a word of newlines that is a token is kept whole
    merges_optional: bool = False


_ROWS: tuple[tuple[str, PreRule], ...] = (
    ("default", PreRule((r"[\p{P}$+<=>\^~|]+", _GPT2, r"[\p{N}]+", "[0-9][0-9][0-9]"))),
    (
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
        PreRule((_LLAMA3,), ignore_merges=True, add_bos=True),
    ),
    ("dbrx smaug-bpe", PreRule((_LLAMA3,))),
    ("chatglm-bpe", PreRule((_LLAMA3,), no_default_bos=True)),
    ("glm4 glm5", PreRule((_LLAMA3,), no_default_bos=True, ignore_merges=True)),
    ("jais-2", PreRule((_JAIS2,))),
    ("minicpm5", PreRule((r"[\p{N}]{1,3}", _MINICPM5), ignore_merges=True)),
    (
        "deepseek-llm",
        PreRule(
            (
                r"[\r\n]",
                rf"\s?[{CASED_LETTERS}]+",
                r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
                _TRAILING_SPACE,
                _ASIAN,
                r"[\p{N}]+",
            )
        ),
    ),
    ("deepseek-coder", PreRule((r"[\r\n]", r"\s?[\p{L}]+", r"\s?[\p{P}]+", _ASIAN, r"[\p{N}]"))),
    ("deepseek-v3 hunyuan-dense joyai-llm hy_v4", PreRule((r"[\p{N}]{1,3}", _KANA_HAN, _DEEPSEEK3))),
    ("spark2_5", PreRule((r"[\p{N}]{1,3}", _KANA_HAN, _SPARK, r"[\p{N}]"))),
    ("youtu", PreRule((_YOUTU_SCRIPTS, _YOUTU), ignore_merges=True)),
    ("falcon", PreRule((r"[\p{P}$+<=>\^~|`]+", _GPT2, "[0-9][0-9][0-9]"))),
    (
        "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2",
        PreRule((r"[\p{N}]", _GPT2)),
    ),
    (
        "gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert jina-v1-en jina-v2-code "
        "roberta-bpe mpt olmo jais trillion granite-docling exaone4",
        PreRule((_GPT2,)),
    ),
    ("qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2", PreRule((_QWEN2,))),
    ("qwen35", PreRule((_QWEN35,))),
    ("poro-chat bloom gpt3-finnish", PreRule((_BLOOM,))),
    ("viking", PreRule((_BLOOM, r"[\p{N}]"))),
    ("tekken", PreRule((_TEKKEN,), ignore_merges=True, add_bos=True)),
    (
        "chameleon",
        PreRule(
            (
                "<sentinel:[0-9]+>",
                "IMGIMG[A-I]{1,4}Z",
                r"[\t\n]|    |  ",
                r"[\p{N}]",
                r"[\p{P}!-/:-@\[-`{-~]",
                _GPT2,
            ),
            add_bos=True,
        ),
    ),
    ("gpt-4o llama4 kanana2 talkie minimax-m2", PreRule((_GPT4O,))),
    ("granite-embed-multi-97m", PreRule((_GRANITE_MULTI,), ignore_merges=True)),
    ("tiny_aya cohere2moe", PreRule((_DIGITS_TO_END, _TINY_AYA))),
    ("superbpe", PreRule((r"[\p{N}]+", _DIGITS_FROM_START))),
    ("bailingmoe bailingmoe2 llada-moe", PreRule((_BAILING,))),
    ("seed-coder", PreRule((_SEED,))),
    ("kimi-k2", PreRule((_KIMI,), merges_optional=True)),
    ("ufakzeka", PreRule((_UFAKZEKA,))),
    ("afmoe", PreRule((_DIGITS_TO_END, _AFMOE_SCRIPTS, _DEEPSEEK3))),
    ("laguna", PreRule((_LINES, _QWEN2))),
    ("exaone-moe", PreRule((_EXAONE_MOE,))),
    (
        "gemma4 granite-embed-multi-311m",
        PreRule((_LINES,), force_bos=True, escape_spaces=True, byte_level=False, newline_words=True),
    ),
    ("sarvam-moe", PreRule((_LINES,), escape_spaces=True, byte_level=False)),
    ("whitespace", PreRule((r"\S+",), byte_level=False)),
)
PRE_RULES: Mapping[str, PreRule] = {name: rule for names, rule in _ROWS for name in names.split()}


def pre_rule(name: str) -> PreRule:
    """Return the rule named by `tokenizer.ggml.pre`; raise TokenizerError for an unknown name, because a guess may give
    wrong ids.
    """
    if name not in PRE_RULES:
        advice = (f"; the nearest known is {nearest_known(name)}, and ", Setting("force", True), " takes it")
        raise TokenizerError(Notice(unknown_rule(name), *advice))
    return PRE_RULES[name]


def unknown_rule(name: str) -> str:
    return f"tokenizer.ggml.pre '{printable(name)}' is not supported"


def nearest_known(name: str) -> str:
    """Return the most similar known name. If no name is similar, return "default", as for GGUFs without a name."""
    if name in PRE_RULES:
        return name
    return next(iter(get_close_matches(name[:_LONGEST_NAME].lower(), PRE_RULES, 1, cutoff=0.5)), "default")


class _ClassOf(dict[int, str]):
    """Maps a code point to the letter of its class, computed on first use; ASCII maps to itself."""

    def __missing__(self, code: int) -> str:
        char = chr(code)
        if code < 128:
            stand_in = char
        elif char in _WHITE:
            stand_in = _SPACE
        elif any(first <= code <= last for first, last in _HAN_RANGES):
            stand_in = _HAN
        else:
            stand_in = _STANDS_FOR.get(unicodedata.category(char)[0], _OTHER)
        self[code] = stand_in
        return stand_in


_Cut = Callable[
    [str, int, int], list[int]
]  # (view, start, stop) -> ascending positions at which to split; duplicates and positions outside are allowed


class PreTokenizer:
    """Splits text into words with one rule."""

    def __init__(self, rule: PreRule) -> None:
        self._steps: list[tuple[bool, _Cut]] = [_step(pattern) for pattern in rule.patterns]
        self._class_of = _ClassOf()

    def split(self, text: str) -> list[str]:
        """Return the words of `text` in order; their concatenation is the text."""
        classes = folded = text
        if not text.isascii():
            classes = text.translate(self._class_of)
            folded = text.translate(_WHITE_FOLDED)
        bounds = [0, len(text)]
        for by_class, cut in self._steps:
            view = classes if by_class else folded
            finer = [0]
            for start, stop in pairwise(bounds):
                if stop - start > 1:
                    for position in cut(view, start, stop):
                        if finer[-1] < position < stop:
                            finer.append(position)
                finer.append(stop)
            bounds = finer
        return [text[start:stop] for start, stop in pairwise(bounds)]


def _step(pattern: str) -> tuple[bool, _Cut]:
    """Return whether the pattern uses character classes, and a function that splits by the pattern."""
    if pattern == _TRAILING_SPACE:
        return False, lambda view, start, stop: [start + len(view[start:stop].rstrip(" \t\n\r\f\v"))]
    if pattern == _DIGITS_TO_END:
        digits = re.compile("[0-9ν]+")
        return True, lambda view, start, stop: [
            position
            for run in digits.finditer(view, start, stop)
            for position in range(run.start() + ((len(run[0]) % 3) or 3), run.end() + 1, 3)
        ]
    if pattern == _DIGITS_FROM_START:
        ascii_digits = re.compile("[0-9]+")
        return False, lambda view, start, stop: [
            position
            for run in ascii_digits.finditer(view, start, stop)
            for position in range(run.start() + len(run[0]) % 3, run.end(), 3)
        ]
    by_class = r"\p{" in pattern
    source = re.sub(r"\\p\{(\w+)\}", lambda name: _CLASSES[name[1]], pattern)
    matches = re.compile(source, re.ASCII).finditer
    return by_class, lambda view, start, stop: [
        position for match in matches(view, start, stop) for position in match.span()
    ]
