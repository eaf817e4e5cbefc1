"""Small vocabularies of every kind, made by rule, and difficult texts. `make_llama_ids` takes llama.cpp's ids of them.

In the vocabularies with merges (nearly) every pair of characters is a token, so that ids show where words end.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from functools import cache
from typing import Any

import numpy as np

from localllm.tokenizer.encoders import BYTE_LETTERS
from localllm.tokenizer.pretokenize import PRE_RULES

KEY = "tokenizer.ggml."
SEPARATOR = "<|between|>"  # a control token; one run of llama-tokenize takes all texts with it between them
NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

_ATOMS = (
    *"aAzZsStTdDlLmMrReEvV019 '\n\r\t.,!-_/\\()[]{}<>$+=^`|~\"#%&*:;?@\v\f\x1c\x7f",
    *(
        "'s",
        "'LL",
        "'Re",
        "  ",
        "    ",
        "\n\n",
        "\r\n",
        " \n",
        "1234567",
        "12",
        "hello",
        "World",
        "HTTPServer",
        "don't",
    ),
    *(
        "é",
        "É",
        "ß",
        "µ",
        "ж",
        "Ж",
        "Я",
        "œ",
        "Ω",
        "ª",
        "ǅ",
        "ʰ",
        "ﬁ",
        "Ａ",
        "ａ",
        "１",
        "e\u0301",
        "\u0301",
        "½",
        "²",
        "Ⅷ",
    ),
    *("漢", "字", "日", "\U00020000", "ひ", "カ", "ｱ", "ㄱ", "ㄅ", "ᄀ", "กำ", "က", "ក", "ꩠ", "न", "\u093c", "ا", "٣"),
    *(
        "…",
        "。",
        "，",
        "！",
        "“",
        "—",
        "、",
        "۔",
        "।",
        "،",
        "▁",
        "😀",
        "👩\u200d👧",
        "\u00a0",
        "\u3000",
        "\u2028",
        "\u1680",
    ),
    *("\u200d", "\ufeff", "\ue000"),
)
_BY_HAND = (
    "I'll say: DON'T HelloWorld's 3.14 1234567 x=[1,22,333]\n\n  def f(a_b):\r\n\t return '…'   \n",
    "Привет ПриветМир e\u0301te\u0301 日本語テスト漢字123 ㄱ กำลัง 10000 100,000.5",
    "IMGIMGABZ <sentinel:12>، हन\u094dद।a b c, d…e  ' s'S 'Re //\n/ \n\n\n \n x          y",
    " leading, trailing ",
    "\n",
    "        if x:\n            y += 1\t# nine\n",
    "<dna>ACGTACgattacaN</dna> and ACGT <dna>ACG",
)
TEXTS = [*_BY_HAND, *("".join(random.Random(seed).choices(_ATOMS, k=4 + 2 * seed)) for seed in range(24))]
_CHARS = sorted({char for text in TEXTS for char in text})
_SHOWN = [char for char in _CHARS if not char.isspace()]
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def _some(seed: int, count: int, start: str = "", chars: list[str] = _SHOWN) -> list[str]:
    """Pieces of one to four characters, most of them parts of a text."""
    choose = random.Random(seed)
    found = []
    for _ in range(count):
        text = choose.choice(TEXTS).replace(" ", "▁")
        place, size = choose.randrange(len(text)), choose.randint(1, 4)
        piece = text[place : place + size] if choose.random() < 0.8 else "".join(choose.choices(chars, k=size))
        found.append(start + piece.lstrip("▁") if start else piece)
    return found


def _vocabulary(model: str, special: dict[str, int], words: Iterable[str], byte: bool = False, **more: Any) -> Any:
    """Metadata of a vocabulary: special tokens by type, then bytes, words and SEPARATOR; scores by rule."""
    taken = [*special, *(_BYTES if byte else ()), SEPARATOR]
    new = [word for word in dict.fromkeys(words) if word and word not in taken]
    tokens = [*taken[:-1], *new, SEPARATOR]
    types = [*special.values(), *([BYTE] * 256 if byte else []), *([NORMAL] * len(new)), CONTROL]
    scores = [-float(7919 * i % 1200) / 100 if kind == NORMAL else 0.0 for i, kind in enumerate(types)]
    keys = {
        "model": model,
        "tokens": tokens,
        "token_type": np.array(types, np.int32),
        "scores": np.array(scores, np.float32),
        **more,
    }
    return {KEY + name: value for name, value in keys.items()}


@cache
def _letter_pairs() -> tuple[list[str], list[str]]:
    letters = sorted({BYTE_LETTERS[byte] for text in TEXTS for byte in text.encode()})
    pairs = [left + right for left in letters for right in letters]
    return BYTE_LETTERS + pairs, [f"{pair[0]} {pair[1]}" for pair in pairs]


def byte_level(pre: str, model: str = "gpt2") -> dict[str, Any]:
    tokens, merges = _letter_pairs()
    six = sorted({text[i : i + 6] + "\ue000" for text in ("ACGTACGATTACAACG",) for i in range(10)})
    dna = ["<dna>", "</dna>", "<oov>", *six] if model == "hybriddna" else []
    types = np.array([NORMAL] * (len(tokens) + len(dna)) + [CONTROL], np.int32)
    keys = {"model": model, "pre": pre, "tokens": [*tokens, *dna, SEPARATOR], "token_type": types, "merges": merges}
    return {KEY + name: value for name, value in keys.items()}


def by_characters(pre: str, model: str = "gpt2") -> dict[str, Any]:
    """A vocabulary whose tokens are characters as they are, and bytes."""
    chars = [char for char in {*_CHARS, "▁"} if char != " "]
    pairs = [a + b for text in TEXTS for a, b in zip(text.replace(" ", "▁"), text[1:].replace(" ", "▁"), strict=False)]
    pairs = list(dict.fromkeys([*pairs, *_some(1, 2000)]))
    pairs = [pair for pair in pairs if len(pair) == 2 and ("\n" not in pair or pair == "\n\n")]
    made = _vocabulary(model, {"<s>": CONTROL}, [*sorted(chars), *pairs, "\n\n\n"], byte=True, pre=pre)
    return {**made, KEY + "merges": [f"{pair[0]} {pair[1]}" for pair in pairs]}


def wordpiece(lowercase: bool) -> dict[str, Any]:
    special = {"[PAD]": CONTROL, "[UNK]": CONTROL, "[CLS]": CONTROL, "[SEP]": CONTROL, "[MASK]": CONTROL}
    chars = [char for char in _SHOWN if char not in "#Z漢"]
    words = [
        *chars,
        *(f"▁{char}" for char in chars),
        *_some(2, 400),
        *_some(3, 400, "▁"),
        "▁hello",
        "world",
        "ser▁ver",
    ]
    if lowercase:
        words = [word.lower() for word in words]
    ids = {"bos_token_id": 2, "unknown_token_id": 1, "seperator_token_id": 3}
    return _vocabulary("bert", special, words, **ids, **{"normalizer.lowercase": lowercase})


def unigram(prefix: bool, merge: bool, replaced: dict[str, str] | None = None) -> dict[str, Any]:
    special = {"<pad>": CONTROL, "</s>": CONTROL, "<unk>": UNKNOWN, "World": USER}
    chars = [char for char in _SHOWN if char not in "#Z漢"]
    words = [*chars, *_some(4, 400), *_some(5, 400, "▁"), *(["▁"] if merge else [])]
    keys: dict[str, Any] = {"add_space_prefix": prefix, "remove_extra_whitespaces": merge}
    if replaced:
        keys["precompiled_charsmap"] = np.frombuffer(charsmap(replaced), np.uint8)
    return _vocabulary("t5", special, [word for word in words if "World" not in word], **keys)


REPLACED = {"\n": " ", "\t": " ", "\r\n": "  ", "ﬁ": "fi", "e\u0301": "é", "…": "...", "\u00a0": " ", "\u3000": " "}
REPLACED |= {
    "Ａ": "A",
    "ａ": "a",
    "½": "1\u20442",
    "²": "2",
    "\u200d": "",
    "\ufeff": "",
    "ｱ": "ア",
    "\v": " ",
    "Ⅷ": "VIII",
}


def charsmap(replaced: dict[str, str]) -> bytes:
    """Pack a table of replacements as SentencePiece does: a trie in a double array, then the texts."""
    texts, offsets = bytearray(), {}
    for old, new in replaced.items():
        offsets[old.encode()] = len(texts)
        texts += new.encode() + b"\0"
    nodes: dict[int, int] = {0: 0}  # index: value

    def place(prefix: bytes, index: int) -> None:
        """Find room for the children of a node: an offset such that all their places are free."""
        labels = sorted({old[len(prefix)] for old in offsets if old.startswith(prefix) and old != prefix})
        labels += [0] if prefix in offsets else []
        offset = next(o for o in range(1, 1 << 20) if not any((index ^ o ^ label) in nodes for label in labels))
        nodes[index] |= offset << 10 | (0x100 if prefix in offsets else 0)
        for label in labels:
            nodes[index ^ offset ^ label] = label if label else 1 << 31 | offsets[prefix]
        for label in labels:
            if label:
                place(prefix + bytes([label]), index ^ offset ^ label)

    place(b"", 0)
    array = np.zeros(max(nodes) // 256 * 256 + 512, "<u4")
    array[list(nodes)] = list(nodes.values())
    return array.nbytes.to_bytes(4, "little") + array.tobytes() + bytes(texts)


def sentencepiece(prefix: bool) -> dict[str, Any]:
    special = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL, "World": USER}
    words = [*_SHOWN[::2], *_some(8, 1200), "▁", "▁▁"]
    return _vocabulary("llama", special, words, byte=True, add_space_prefix=prefix)


def rwkv() -> dict[str, Any]:
    names = {"\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}
    single = [names.get(chr(b), chr(b) if 32 <= b < 127 else f"\\x{b:02x}") for b in range(256)]
    longer = ["".join(names.get(char, char) for char in piece.replace("▁", " ")) for piece in _some(6, 600)]
    return _vocabulary("rwkv", {"<s>": CONTROL}, [*single, *longer])


def plamo() -> dict[str, Any]:
    special = {"<|plamo:unk|>": UNKNOWN, "<|plamo:bos|>": CONTROL, "<|plamo:eos|>": CONTROL, "<|plamo:pad|>": CONTROL}
    return _vocabulary("plamo2", special, [piece.replace("▁", " ") for piece in _some(7, 800)], byte=True)


def vocabularies() -> dict[str, dict[str, Any]]:
    """Every vocabulary by name: one for each rule of `tokenizer.ggml.pre`, and some for each other model."""
    found = {f"pre {pre}": byte_level(pre) for pre, rule in PRE_RULES.items() if rule.byte_level}
    for pre in ("sarvam-moe", "granite-embed-multi-311m"):
        found[f"pre {pre}"] = by_characters(pre)
    return found | {
        "gemma4": by_characters("", "gemma4"),
        "whitespace": by_characters("whitespace", "whitespace"),
        "whitespace, lower case": {
            **by_characters("whitespace", "whitespace"),
            KEY + "normalizer.lowercase": True,
        },
        "hybriddna": byte_level("qwen2", "hybriddna"),
        "bert": wordpiece(lowercase=True),
        "bert, cased": wordpiece(lowercase=False),
        "t5": unigram(True, True, REPLACED),
        "t5, all spaces": unigram(True, False, REPLACED),
        "t5, no prefix": unigram(False, False),
        "llama": sentencepiece(prefix=True),
        "llama, no prefix": sentencepiece(prefix=False),
        "rwkv": rwkv(),
        "plamo2": plamo(),
    }
