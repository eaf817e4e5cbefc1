"""Pre-tokenization: every pre-tokenizer name gives llama.cpp's token ids, and a few splits are checked by hand."""

from __future__ import annotations

import struct
import time
import zlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localllm.tokenizer import Tokenizer, TokenizerError
from localllm.tokenizer.encoders import BYTE_LETTERS
from localllm.tokenizer.pretokenize import PRE_RULES, PreTokenizer, nearest_known, pre_rule

PROBE = (
    "I'll say: DON'T HelloWorld's 3.14 1234567 x=[1,22,333]\n\n  def f(a_b):\r\n\t return '…'   \n"
    "Привет ПриветМир e\u0301te\u0301 日本語テスト漢字123 한국어ㄱ กำลัง "
    "½²Ⅷ ١٢٣٤ 😀👨\u200d👩\u200d👧\u00a0\u3000x\u2028y $+<=>^`|~ "
    "IMGIMGABZ <sentinel:12>، हिन्दी。a b c, d…e  ' s'S 'Re //\n/ "
    "dog'sZ dog'sabc 'LLama 漢字latin \n\n\n \n x          y Été été 12345a²1234567² ÀB '"
)
# crc32 of llama.cpp's int32 ids (2026-10-01) for PROBE under each `pre`, with the vocabulary of `probe_metadata`.
LLAMA_CPP: dict[int, str] = {
    0x2B8C51E6: (
        "a.x-4.0 exaone4 gigachat gpt-2 granite-docling jais jina-de jina-es jina-v1-en jina-v2-code jina-v2-de "
        "jina-v2-es mellum modern-bert mpt olmo phi-2 roberta-bpe trillion"
    ),
    0x7C6F08B4: "afmoe",
    0xC1AAB602: (
        "bailingmoe bailingmoe2 deepseek-r1-qwen f2llmv2 grok-2 hunyuan kormo llada-moe megrez qwen2 solar-open "
        "stablelm2"
    ),
    0xB24A6F97: "bloom gpt3-finnish poro-chat",
    0xDEFEE85D: "chameleon",
    0x332BDA8A: "chatglm-bpe dbrx smaug-bpe",
    0x095F97D8: "codeshell command-r exaone mellum2 minerva-7b refact smollm starcoder",
    0x56F2BD56: "cohere2moe tiny_aya",
    0x3856C038: "deepseek-coder",
    0x10B5C547: "deepseek-llm",
    0x17D257AB: "deepseek-v3 hunyuan-dense hy_v4 joyai-llm",
    0x25C5CF90: "default",
    0x30B2566C: "exaone-moe",
    0xCCC26CAD: "falcon",
    0xEE41ABC3: "falcon-h1 falcon3 glm4 glm5 jina-v5-nano lfm2 llama-bpe llama-v3 llama3 midm-2.0 minicpm5 pixtral",
    0xF911916A: "gpt-4o kanana2 llama4 minimax-m2 talkie",
    0xAB9DB725: "granite-embed-multi-97m",
    0xB046DB30: "jais-2",
    0x16CFB97F: "kimi-k2",
    0xD3924581: "laguna",
    0xCD2420B7: "qwen35",
    0x2987BBD8: "seed-coder",
    0x7EC1C904: "spark2_5",
    0xA4D69698: "superbpe",
    0xA162CC51: "tekken",
    0x1F1EA65A: "ufakzeka",
    0x1B37FB72: "viking",
    0xCC110457: "youtu",
}


def probe_metadata(pre: str) -> dict[str, Any]:
    """Return a byte-level vocabulary of all substrings of PROBE up to 12 bytes, so that the ids show every split."""
    letters = "".join(BYTE_LETTERS[byte] for byte in PROBE.encode())
    pieces = {letters[i : i + size] for size in range(2, 13) for i in range(len(letters) - size + 1)}
    longer = sorted(pieces, key=lambda piece: (len(piece), piece))
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": BYTE_LETTERS + longer,
        "tokenizer.ggml.merges": [f"{piece[:-1]} {piece[-1]}" for piece in longer],
    }


@pytest.mark.parametrize(("crc", "pre"), [(crc, pre) for crc, names in LLAMA_CPP.items() for pre in names.split()])
def test_ids_are_llama_cpps_under_every_pre_tokenizer(crc: int, pre: str) -> None:
    ids = Tokenizer.from_metadata(probe_metadata(pre)).encode(PROBE, add_special=False)
    assert zlib.crc32(struct.pack(f"<{len(ids)}i", *ids)) == crc


def test_no_name_of_the_table_is_untested() -> None:
    tested = {pre for names in LLAMA_CPP.values() for pre in names.split()}
    # test_llama_ids covers the other names
    assert tested == {pre for pre, rule in PRE_RULES.items() if rule.byte_level}


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("gpt-2", "I'll be 1234 !?", ["I", "'ll", " be", " 1234", " !?"]),
        ("gpt-2", "a  b\t\tc ", ["a", " ", " b", "\t", "\t", "c", " "]),
        ("gpt-2", "a\x1c\x1cb", ["a", "\x1c\x1c", "b"]),  # white space in Python, but not in the split rules
        ("llama-bpe", "I'LL 1234567", ["I", "'LL", " ", "123", "456", "7"]),
        ("llama-bpe", "x  \n\n y", ["x", "  \n\n", " y"]),
        ("qwen2", "in 2024", ["in", " ", "2", "0", "2", "4"]),
        ("qwen35", "e\u0301t", ["e\u0301t"]),
        ("qwen2", "e\u0301t", ["e", "\u0301t"]),
        ("deepseek-v3", "日本語12345", ["日本語", "123", "45"]),
        ("tekken", "HelloWorld", ["Hello", "World"]),
        ("afmoe", "1234567", ["1", "234", "567"]),
        ("tiny_aya", "12345", ["12", "345"]),
        ("superbpe", "a1234", ["a", "1", "234"]),
        ("bloom", " one, two", [" one", ",", " two"]),
        ("gemma4", "a b\n\nc", ["a b", "\n\n", "c"]),
    ],
)
def test_words_by_hand(pre: str, text: str, words: list[str]) -> None:
    assert PreTokenizer(pre_rule(pre)).split(text) == words


@settings(max_examples=30, deadline=None)
@given(st.text(max_size=60))
def test_words_joined_are_the_text(text: str) -> None:
    for rule in set(PRE_RULES.values()):
        words = PreTokenizer(rule).split(text)
        assert "".join(words) == text
        assert all(words) or not text


@pytest.mark.parametrize("run", [" ", "\n", "a", "A", "1", "é", "ж", "'", "\u0301", " a", "  \n", "a ", "1a"])
def test_time_grows_with_the_text_and_not_its_square(run: str) -> None:
    """Splitting takes linear time. A rule that rescans the rest of the text at every character would take hours."""
    text = run * (30_000 // len(run)) + "5"
    for rule in {rule.patterns: rule for rule in PRE_RULES.values()}.values():
        split = PreTokenizer(rule).split
        start = time.process_time()
        assert sum(map(len, split(text))) == len(text)
        assert time.process_time() - start < 2


def test_an_unknown_name_is_refused_with_the_nearest_which_force_takes() -> None:
    with pytest.raises(TokenizerError) as error:
        Tokenizer.from_metadata(probe_metadata("Qwen2.1"))
    expected = "tokenizer.ggml.pre 'Qwen2.1' is not supported; the nearest known is qwen2, and force=True takes it"
    assert str(error.value) == expected
    forced = Tokenizer.from_metadata(probe_metadata("Qwen2.1"), nearest_rule=True)
    assert forced.encode(PROBE) == Tokenizer.from_metadata(probe_metadata("qwen2")).encode(PROBE)
    assert (
        forced.note == "tokenizer.ggml.pre 'Qwen2.1' is not supported; qwen2 is used instead, so some ids may be wrong"
    )
    assert Tokenizer.from_metadata(probe_metadata("qwen2"), nearest_rule=True).note == ""


def test_a_name_like_no_other_is_read_as_no_name() -> None:
    start = time.process_time()
    assert nearest_known("\n" * 1_000_000) == "default"
    assert time.process_time() - start < 1
    assert nearest_known("deepseek-v9") == "deepseek-v3"
