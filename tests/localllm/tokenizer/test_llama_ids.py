"""Every tokenizer model and pre-tokenizer name of llama.cpp gives llama.cpp's token ids, except for listed differences
in WordPiece.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

from localllm.tokenizer import Tokenizer, TokenizerError
from localllm.tokenizer.charsmap import CharsMap
from localllm.tokenizer.kinds import VOCAB_KINDS
from localllm.tokenizer.pretokenize import PRE_RULES
from tests.localllm.tokenizer.make_llama_ids import DATA, checksum
from tests.localllm.tokenizer.vocabularies import (
    KEY,
    REPLACED,
    TEXTS,
    byte_level,
    charsmap,
    plamo,
    rwkv,
    unigram,
    vocabularies,
    wordpiece,
)

VOCABULARIES = vocabularies()
SUMS = {name: row["crc32"].split() for row in json.loads(DATA.read_text()) for name in row["names"]}


@pytest.mark.parametrize("name", VOCABULARIES)
def test_ids_are_llama_cpps(name: str) -> None:
    tokenizer = Tokenizer.from_metadata(VOCABULARIES[name])
    for text, expected in zip(TEXTS, SUMS[name], strict=True):
        assert checksum(tokenizer.encode(text, add_special=False)) == expected, repr(text)


def test_every_name_and_every_model_is_among_them() -> None:
    assert set(SUMS) == set(VOCABULARIES)
    pres = {VOCABULARIES[name].get(KEY + "pre") for name in SUMS}
    assert pres >= set(PRE_RULES) - {"gemma4"}  # gemma4 is implied by the tokenizer model
    assert {metadata[KEY + "model"] for metadata in VOCABULARIES.values()} == set(VOCAB_KINDS)


@pytest.mark.parametrize("name", ["hybriddna", "rwkv", "plamo2"])
def test_ids_give_the_text_again(name: str) -> None:
    tokenizer = Tokenizer.from_metadata(VOCABULARIES[name])
    for text in TEXTS:
        if name != "hybriddna" or "<dna>" not in text:
            assert tokenizer.decode(tokenizer.encode(text)) == text


def test_what_is_put_around_a_text() -> None:
    def around(metadata: dict[str, object], **flags: object) -> list[str]:
        tokenizer = Tokenizer.from_metadata(metadata | {KEY + name: value for name, value in flags.items()})
        return [tokenizer.text(token) for token in tokenizer.encode("zz") if not tokenizer.text(token).endswith("z")]

    assert around(wordpiece(True)) == around(wordpiece(True), add_bos_token=False) == ["[CLS]", "[SEP]"]
    assert around(unigram(False, False), add_eos_token=False) == []
    assert around(unigram(False, False)) == ["</s>"]
    assert around(rwkv(), bos_token_id=0, add_bos_token=True) == []
    assert around(plamo()) == []
    assert around(plamo(), add_bos_token=True) == ["<|plamo:bos|>"]


def test_wordpiece_decomposes_korean_and_keeps_spacing_marks_as_transformers_does() -> None:
    """WordPiece decomposes Korean syllables into all their letters and keeps spacing marks, as in transformers.
    llama.cpp keeps only the first letter, and drops the marks.
    """
    tokens = ["[UNK]", "[CLS]", "[SEP]", "▁ᄒ", "ᅡ", "ᆫ", "▁न", "ि", "▁e"]
    ids = {"unknown_token_id": 0, "bos_token_id": 1, "seperator_token_id": 2}
    made = {"model": "bert", "tokens": tokens, "token_type": [3, 3, 3, *[1] * 6], **ids}
    tokenizer = Tokenizer.from_metadata({KEY + name: value for name, value in made.items()})
    assert tokenizer.encode("한 नि É") == [1, 3, 4, 5, 6, 7, 8, 2]


def test_a_mask_takes_the_space_before_it() -> None:
    metadata = wordpiece(True)
    tokens = Tokenizer.from_metadata(metadata | {"general.name": "modern-bert"})
    assert tokens.encode("  [MASK]", False, True) == [4]
    pairs = byte_level("jina-v2-code")
    pairs[KEY + "tokens"] = [*pairs[KEY + "tokens"][:-1], "<mask>"]
    made = Tokenizer.from_metadata(pairs)
    assert [made.text(i) for i in made.encode("a <mask> b", False, True)] == ["a", "<mask>", "Ġb"]


def test_no_text_becomes_a_control_token() -> None:
    """Text never becomes a control token.

    In llama.cpp, the lookup tables of RWKV and PLaMo-2 include control tokens.
    """
    for name in ("bert", "t5", "rwkv", "plamo2"):
        tokenizer = Tokenizer.from_metadata(VOCABULARIES[name])
        ids = tokenizer.encode("".join(tokenizer.special), add_special=False)
        assert not {tokenizer.text(i) for i in ids if tokenizer.is_control(i)} - {"[UNK]", "<unk>"}


def test_a_table_of_replacements() -> None:
    table = CharsMap(charsmap(REPLACED))
    assert table.apply("Ａ\r\nﬁe\u0301e…\u200d") == "A  fiée..."
    assert table.apply("") == ""


def _charsmap(nodes: list[int], texts: bytes) -> bytes:
    return (4 * len(nodes)).to_bytes(4, "little") + np.array(nodes, "<u4").tobytes() + texts


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (b"", "0 bytes cannot hold"),
        (b"\xff" * 8, "cannot hold a trie of 4294967295 bytes"),
        (_charsmap([1 << 30], b"\0"), "its trie points outside itself"),
        (_charsmap([1 << 10] * 256, b"x"), ""),
        (_charsmap([0] * 97 + [97 | 0x100] + [0] * 200, b"x" * 1000), "no replacement of up to 256 bytes"),
    ],
)
def test_a_hostile_table_is_one_error_and_ends_soon(table: bytes, message: str) -> None:
    def apply() -> str:
        return CharsMap(table).apply("a" * 100_000)

    if not message:
        assert apply() == "a" * 100_000
        return
    with pytest.raises(TokenizerError, match="precompiled_charsmap: .*" + message):
        apply()


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (wordpiece(True) | {KEY + "tokens": ["a"], KEY + "token_type": [1]}, "bos_token_id is 2"),
        (unigram(True, True) | {KEY + "precompiled_charsmap": ["x"]}, "precompiled_charsmap must be an array"),
        ({KEY + "model": "bert", KEY + "tokens": ["a"]}, "bos_token_id is missing"),
        ({KEY + "model": "rwkv", KEY + "tokens": ["a"]}, "tokens: no token for the byte 0x01"),
        ({KEY + "model": "rwkv", KEY + "tokens": ["\\xzz"]}, "needs two hexadecimal digits"),
        ({KEY + "model": "plamo2", KEY + "tokens": ["a"], KEY + "scores": [0.0]}, "tokens: no token <0x00>"),
        (
            unigram(True, True) | {KEY + "tokens": ["a", "b", "c" * 300], KEY + "token_type": [1] * 3},
            "token 2 has 300 characters; the limit is 256",
        ),
    ],
)
def test_a_broken_vocabulary_is_one_error(metadata: dict[str, object], message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.from_metadata(metadata).encode("a")


@pytest.mark.parametrize("name", ["bert", "t5", "rwkv", "plamo2", "hybriddna", "whitespace"])
def test_long_hostile_text_ends_soon(name: str) -> None:
    tokenizer = Tokenizer.from_metadata(VOCABULARIES[name])
    for text in ("a" * 40_000, " " * 40_000, "é" * 20_000, "<dna>" * 8000, "\u0301" * 20_000):
        assert len(tokenizer.encode(text)) <= 3 * 40_000
