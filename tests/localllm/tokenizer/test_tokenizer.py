"""The tokenizer on two small vocabularies: token ids derived by hand, round trips, streaming, and invalid metadata."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from localllm.base.errors import LocalLLMError
from localllm.tokenizer import Tokenizer, TokenizerError, has_tokenizer
from localllm.tokenizer.encoders import BYTE_LETTERS

KEY = "tokenizer.ggml."
NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

BPE_WORDS = ["he", "ll", "hell", "hello", "Ġw", "or", "Ġwor", "ld", "Ġworld", "hé"]
BPE_MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "l d", "Ġwor ld"]
BPE_SPECIAL = {"<|bos|>": CONTROL, "<|im_start|>": CONTROL, "<|im_end|>": NORMAL, "<tool>": USER, "<tool>>": USER}
W = 256  # id of the first token of BPE_WORDS


def bpe_metadata(**changes: Any) -> dict[str, Any]:
    words = [*BPE_WORDS, *BPE_SPECIAL]
    metadata = {
        KEY + "model": "gpt2",
        KEY + "pre": "gpt-2",
        KEY + "tokens": BYTE_LETTERS + words,
        KEY + "token_type": np.array([NORMAL] * (W + len(BPE_WORDS)) + list(BPE_SPECIAL.values()), np.int32),
        KEY + "merges": BPE_MERGES,
        KEY + "bos_token_id": W + len(BPE_WORDS),
        KEY + "eos_token_id": W + len(BPE_WORDS) + 2,
        KEY + "add_bos_token": True,
    }
    return metadata | {KEY + name: value for name, value in changes.items()}


SPM_WORDS = {"▁": -1.0, "h": -2.0, "e": -2.5, "l": -3.0, "o": -3.5, "▁h": -4.0, "el": -5.0, "lo": -6.0, "▁hel": -7.0}
SPM_WORDS |= {"▁hello": -8.0, "▁▁": -9.0}


def spm_metadata(**changes: Any) -> dict[str, Any]:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *SPM_WORDS]
    types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(SPM_WORDS)
    metadata = {
        KEY + "model": "llama",
        KEY + "tokens": tokens,
        KEY + "scores": np.array([0.0] * 259 + list(SPM_WORDS.values()), np.float32),
        KEY + "token_type": np.array(types, np.int32),
        KEY + "bos_token_id": 1,
        KEY + "eos_token_id": 2,
    }
    return metadata | {KEY + name: value for name, value in changes.items()}


BPE = Tokenizer.from_metadata(bpe_metadata())
SPM = Tokenizer.from_metadata(spm_metadata())


def spm_ids(*texts: str) -> list[int]:
    return [259 + list(SPM_WORDS).index(text) for text in texts]


def bpe_ids(*texts: str) -> list[int | None]:
    return [BPE.id(text) for text in texts]


def test_byte_level_bpe_by_hand() -> None:
    assert BPE.encode("hello world", add_special=False) == [W + 3, W + 8]
    assert BPE.encode("helo", add_special=False) == bpe_ids("he", "l", "o")
    # UTF-8 bytes 68 C3 A9; the token "hé" means bytes 68 E9
    assert BPE.encode("hé", add_special=False) == bpe_ids("h", "Ã", "©")


def test_sentencepiece_by_hand() -> None:
    # merges in order: ▁h (-4), el (-5), lo (-6), ▁h+el (-7), ▁hel+lo (-8)
    assert SPM.encode("hello", add_special=False) == spm_ids("▁hello")
    assert SPM.encode("hell", add_special=False) == spm_ids("▁hel", "l")
    assert SPM.encode("h é", add_special=False) == [*spm_ids("▁h", "▁"), 3 + 0xC3, 3 + 0xA9]
    assert SPM.encode("h   h", add_special=False) == spm_ids("▁h", "▁▁", "▁h")


def test_the_worst_score_is_still_better_than_none() -> None:
    scores = [0.0] * 259 + [float("-inf")] * len(SPM_WORDS)
    assert Tokenizer.from_metadata(spm_metadata(scores=scores)).encode("h", add_special=False) == spm_ids("▁h")


def test_a_word_that_is_a_token_is_not_merged_where_the_rule_says_so() -> None:
    """Llama 3's rule keeps a word that is a token, even without merges. GPT-2's rule still applies the merges."""
    tokens = [*BYTE_LETTERS, "hÃ©"]
    for pre, ids in (("llama-bpe", [256]), ("gpt-2", [tokens.index("h"), tokens.index("Ã"), tokens.index("©")])):
        metadata = {KEY + "model": "gpt2", KEY + "pre": pre, KEY + "tokens": tokens, KEY + "merges": []}
        assert Tokenizer.from_metadata(metadata).encode("hé", add_special=False) == ids


def test_words_are_cut_before_a_space_only_where_no_token_crosses_it() -> None:
    """Text is split before spaces only if no token has a space inside.

    With the token "l▁h", the text "el h" is not split.
    """
    words = dict(SPM_WORDS) | {"l▁": -0.5, "l▁h": -0.6}
    metadata = spm_metadata(
        tokens=[*spm_metadata()[KEY + "tokens"][:259], *words],
        scores=[0.0] * 259 + list(words.values()),
        token_type=[UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(words),
    )
    tokenizer = Tokenizer.from_metadata(metadata)
    assert [tokenizer.text(i) for i in tokenizer.encode("el h", add_special=False)] == ["▁", "e", "l▁h"]


def test_bos_and_eos_as_the_file_says_and_never_twice() -> None:
    bos, eos = BPE.bos, BPE.eos
    assert BPE.encode("he") == [bos, W]
    assert BPE.encode("") == [bos]
    assert BPE.encode("<|bos|>he", parse_special=True) == [bos, W]
    both = Tokenizer.from_metadata(bpe_metadata(add_eos_token=True))
    assert both.encode("he") == [bos, W, eos]
    assert both.encode("he<|im_end|>", parse_special=True) == [bos, W, eos]
    assert both.encode("he", add_special=False) == [W]
    neither = Tokenizer.from_metadata(bpe_metadata(add_bos_token=False))
    assert neither.encode("he") == [W]


def test_defaults_of_a_file_that_says_nothing() -> None:
    assert SPM.adds == ("bos",)
    metadata = {key: value for key, value in bpe_metadata().items() if "_token" not in key}
    tokenizer = Tokenizer.from_metadata(metadata)
    assert (tokenizer.bos, tokenizer.eos, tokenizer.add_bos) == (11, 11, False)
    assert Tokenizer.from_metadata(metadata | {KEY + "pre": "llama-bpe"}).add_bos


def test_control_tokens_are_text_unless_parsed_and_user_defined_ones_never_are() -> None:
    start, tool, longer = (BPE.special[text] for text in ("<|im_start|>", "<tool>", "<tool>>"))
    text = "<|im_start|>he<tool>he<tool>>"
    assert BPE.encode(text, add_special=False, parse_special=True) == [start, W, tool, W, longer]
    plain = BPE.encode(text, add_special=False)
    assert start not in plain
    assert plain[-4:] == [W, tool, W, longer]
    assert BPE.decode(plain) == text


def test_the_space_of_a_first_word_comes_and_goes() -> None:
    assert SPM.decode(spm_ids("▁hello", "▁h")) == "hello h"
    assert SPM.decode(spm_ids("▁hello", "▁h"), drop_space=False) == " hello h"
    assert SPM.decode([1, *spm_ids("▁hello"), 2]) == "hello"
    assert SPM.decode([1, *spm_ids("▁hello"), 2], special=True) == "<s> hello</s>"
    assert SPM.encode("<s>hello", parse_special=True) == [1, *spm_ids("▁hello")]
    assert SPM.encode("h</s>h", parse_special=True) == [1, *spm_ids("▁h"), 2, *spm_ids("▁h")]
    stream = SPM.stream()
    assert [stream.push(token) for token in (1, *spm_ids("▁hello", "▁h"))] == ["", "hello", " h"]
    bare = Tokenizer.from_metadata(spm_metadata(add_space_prefix=False))
    assert bare.encode("hel", add_special=False) == spm_ids("h", "el")
    assert bare.decode(spm_ids("▁hello")) == " hello"


def test_white_space_after_phi_3s_special_tokens_is_swallowed() -> None:
    phi = Tokenizer.from_metadata(spm_metadata() | {"general.name": "Phi-3-mini"})
    assert phi.encode("</s> \n hello", add_special=False, parse_special=True) == [2, *spm_ids("▁hello")]
    assert phi.encode("<s> hello", add_special=False, parse_special=True) == [1, *spm_ids("▁", "▁hello")]


@pytest.mark.parametrize(
    ("texts", "ends"),
    [
        (("<|im_end|>", "<|endoftext|>"), {"<|im_end|>", "<|endoftext|>"}),
        # in gpt-oss, <|end|> ends a message but not the answer
        (("<|return|>", "<|call|>", "<|end|>"), {"<|return|>", "<|call|>"}),
        (("<turn|>", "<|tool_response>", "</s>"), {"<turn|>", "<|tool_response>"}),  # in Gemma 4, </s> is an HTML tag
        (("<|fim_pad|>", "<|file_sep|>", "<fim_prefix>"), {"<|fim_pad|>", "<|file_sep|>"}),
        (("<eos>", "word"), {"<eos>"}),
    ],
)
def test_tokens_that_end_a_generation_are_found_by_text(texts: tuple[str, ...], ends: set[str]) -> None:
    metadata = {KEY + "model": "gpt2", KEY + "tokens": ["x", *texts], KEY + "merges": [], KEY + "eos_token_id": 1}
    tokenizer = Tokenizer.from_metadata(metadata)
    assert {tokenizer.text(i) for i in tokenizer.eog} == ends | {texts[0]}
    shown = {text for text in texts if tokenizer.decode([texts.index(text) + 1])}
    # these texts are control tokens, although the GGUF declares another type
    assert not shown & (ends | {"<fim_prefix>"})


def test_ends_named_by_the_file() -> None:
    metadata = bpe_metadata(eot_token_id=W, eom_token_id=W + 1)
    assert {W, W + 1, BPE.eos} <= Tokenizer.from_metadata(metadata).eog


def test_half_a_character_waits_for_its_other_half() -> None:
    stream = BPE.stream()
    euro = [BPE.id(BYTE_LETTERS[byte]) for byte in "€".encode()]
    assert [stream.push(token) for token in euro if token is not None] == ["", "", "€"]
    assert stream.push(W) == "he"
    assert stream.push(euro[0] or 0) == ""
    assert stream.finish() == "\ufffd"


@given(st.text())
def test_byte_level_round_trip(text: str) -> None:
    assert BPE.decode(BPE.encode(text, add_special=False)) == text


@given(st.text())
def test_sentencepiece_round_trip(text: str) -> None:
    assert SPM.decode(SPM.encode(text)) == text.replace("▁", " ")


@given(st.lists(st.integers(0, BPE.vocab_size - 1)), st.booleans(), st.booleans())
def test_stream_equals_decode(ids: list[int], special: bool, drop_space: bool) -> None:
    for tokenizer in (BPE, SPM):
        ids = [token for token in ids if token < tokenizer.vocab_size]
        stream = tokenizer.stream(special, drop_space)
        text = "".join([stream.push(token) for token in ids]) + stream.finish()
        assert text == tokenizer.decode(ids, special, drop_space)


@given(st.lists(st.integers(0, BPE.vocab_size - 1)))
def test_pieces_joined_are_the_text(ids: list[int]) -> None:
    assert b"".join(map(BPE.piece, ids)).decode("utf-8", "replace") == BPE.decode(ids, special=True)


def test_lone_surrogates_have_no_bytes_and_become_replacement_characters() -> None:
    assert BPE.decode(BPE.encode("a\ud800b", add_special=False)) == "a\ufffdb"


def test_tokens_that_are_not_utf8_keep_their_bytes() -> None:
    tokens = [*BYTE_LETTERS, b"\xff\xfe".decode("utf-8", "surrogateescape")]
    metadata = {KEY + "model": "gpt2", KEY + "tokens": tokens, KEY + "merges": []}
    assert Tokenizer.from_metadata(metadata).piece(256) == b"\xff\xfe"


@pytest.mark.parametrize("token", [-1, 10**9])
def test_an_id_outside_the_vocabulary_is_an_error(token: int) -> None:
    for call in (BPE.piece, BPE.stream().push, lambda t: BPE.decode([t]), BPE.text):
        with pytest.raises(TokenizerError, match=f"token {token} is outside the vocabulary: ids are 0 to"):
            call(token)


BROKEN: list[tuple[dict[str, Any], str]] = [
    (bpe_metadata(model=None), "model is missing"),
    (bpe_metadata(model="klingon"), "model 'klingon' is not supported; supported: llama, gpt2, gemma4, bert, t5, rwkv"),
    (bpe_metadata(model="none"), "model is 'none'"),
    (bpe_metadata(model=7), "model is of type int"),
    (bpe_metadata(pre="klingon"), "pre 'klingon' is not supported"),
    (bpe_metadata(tokens=None), "tokens is missing"),
    (bpe_metadata(tokens=[]), "tokens is empty"),
    (bpe_metadata(tokens="abc"), "tokens is one string"),
    (bpe_metadata(tokens=np.zeros(3)), "tokens is of type ndarray"),
    (bpe_metadata(tokens=[1, 2]), "tokens holds something that is not a string"),
    (bpe_metadata(token_type=[1]), "token_type has 1 entries, but tokenizer.ggml.tokens has 271"),
    (bpe_metadata(suppress_tokens=[0.5]), "suppress_tokens must be an array of whole numbers"),
    (bpe_metadata(suppress_tokens=7), "suppress_tokens"),
    (bpe_metadata(token_type=["a"] * 271), "token_type must be an array of whole numbers"),
    (bpe_metadata(token_type=[[1, 2]]), "token_type must be"),
    (bpe_metadata(token_type=[[1], [1, 2]]), "token_type must be"),
    (bpe_metadata(merges=None), "merges is missing"),
    (bpe_metadata(bos_token_id=271), "bos_token_id is 271, but the vocabulary has 271 tokens"),
    (bpe_metadata(eos_token_id=-1), "eos_token_id is -1"),
    (bpe_metadata(eos_token_id="2"), "eos_token_id must be a whole number"),
    (bpe_metadata(add_bos_token="yes"), "add_bos_token is of type str"),
    (spm_metadata(scores=None), "scores is missing"),
    (spm_metadata(scores=[0.0] * 10), "scores has 10 entries"),
    (spm_metadata(scores=[float("nan")] * 270), "scores holds a NaN at entry 0"),
]


def test_suppressed_tokens_are_those_of_the_vocabulary() -> None:
    """Suppressed ids outside the vocabulary are ignored, as in llama.cpp."""
    listed = np.array([270, 271, -1, 3, 3], np.int32)
    assert Tokenizer.from_metadata(bpe_metadata(suppress_tokens=listed)).suppressed == (3, 270)
    assert Tokenizer.from_metadata(bpe_metadata()).suppressed == ()


@pytest.mark.parametrize(("metadata", "message"), BROKEN)
def test_broken_metadata_is_one_error_that_names_the_key(metadata: dict[str, Any], message: str) -> None:
    metadata = {key: value for key, value in metadata.items() if value is not None}
    with pytest.raises(TokenizerError) as error:
        Tokenizer.from_metadata(metadata)
    assert isinstance(error.value, LocalLLMError)
    assert KEY + message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("merges", [["hello"] * 3, ["h e", "nospace", "l l"], [1, 2, 3]])
def test_merges_that_are_no_pairs_are_an_error_that_says_which(merges: list[Any]) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.ggml\.merges: entry \d, .* is not two tokens"):
        Tokenizer.from_metadata(bpe_metadata(merges=merges)).encode("x")


def test_of_equal_merges_the_first_counts() -> None:
    tokens = [*BYTE_LETTERS, "he", "el"]
    metadata = {KEY + "model": "gpt2", KEY + "tokens": tokens, KEY + "merges": ["h e", "e l", "h e"]}
    assert Tokenizer.from_metadata(metadata).encode("hel", add_special=False) == [256, tokens.index("l")]


def test_gemma_4_writes_spaces_and_bytes_as_sentencepiece_does_and_takes_newlines_whole() -> None:
    tokens = ["<bos>", "▁", "a", "▁a", "\n", "\n\n", *(f"<0x{byte:02X}>" for byte in range(256))]
    metadata = {
        KEY + "model": "gemma4",
        KEY + "tokens": tokens,
        KEY + "token_type": [CONTROL] + [NORMAL] * 5 + [BYTE] * 256,
        KEY + "merges": ["▁ a"],
        KEY + "bos_token_id": 0,
        KEY + "add_bos_token": False,  # a wrong value in some published GGUFs
    }
    tokenizer = Tokenizer.from_metadata(metadata)
    ids = [0, 2, 3, 5, 2, 1, 6 + 0xC3, 6 + 0xA9]
    assert tokenizer.encode("a a\n\na é") == ids
    assert tokenizer.decode(ids) == "a a\n\na é"


def test_text_without_a_token_is_the_unknown_token() -> None:
    metadata = {KEY + "model": "llama", KEY + "tokens": ["<unk>", "▁", "a"], KEY + "scores": [0.0] * 3}
    assert Tokenizer.from_metadata(metadata).encode("aé", add_special=False) == [1, 2, 0, 0]


def test_gpt_oss_shows_the_marks_of_its_channels() -> None:
    tokens = ["<|channel|>", "<|return|>", "<|call|>", "<|end|>", "a"]
    metadata = {
        KEY + "model": "gpt2",
        KEY + "tokens": tokens,
        KEY + "token_type": [CONTROL] * 4 + [NORMAL],
        KEY + "merges": [],
        KEY + "eos_token_id": 1,
    }
    tokenizer = Tokenizer.from_metadata(metadata)
    assert tokenizer.decode([0, 1, 2, 3, 4]) == "<|channel|><|end|>a"


def test_odd_vocabularies_do_no_harm() -> None:
    """A vocabulary with an empty token, duplicates, out-of-range special ids and unknown token types still works."""
    metadata = bpe_metadata(padding_token_id=10**6, unknown_token_id=4_294_967_295)
    metadata[KEY + "tokens"] = [*metadata[KEY + "tokens"][:-3], "", "he", "he"]
    metadata[KEY + "token_type"] = np.array([1] * 270 + [99], np.int32)
    tokenizer = Tokenizer.from_metadata(metadata)
    assert tokenizer.text(268) == "[EMPTY_268]"
    assert tokenizer.piece(270) == b""
    assert tokenizer.encode("hello", add_special=False)


def test_a_file_for_ids_only_says_so() -> None:
    assert has_tokenizer(bpe_metadata())
    assert not has_tokenizer({})
    assert not has_tokenizer({KEY + "model": "no_vocab"})


def test_long_hostile_text_ends_soon() -> None:
    for text in ("he" * 20_000, "l" * 40_000, " " * 40_000, "<tool>" * 20_000):
        assert BPE.decode(BPE.encode(text, add_special=False)) == text
        assert SPM.decode(SPM.encode(text)) == text


def test_many_special_tokens_with_one_beginning_are_found_in_one_pass() -> None:
    """Finding special tokens takes linear time: 2000 tokens with a common prefix in 20,000 characters.

    The longest matching token is used.
    """
    special = [f"eee{i}" for i in range(2000)]
    tokenizer = Tokenizer.from_metadata(
        bpe_metadata(tokens=[*BYTE_LETTERS, *special], token_type=[NORMAL] * W + [CONTROL] * 2000, merges=[])
    )
    looked = 0

    class Counting(str):
        def __getitem__(self, key: Any) -> str:
            nonlocal looked
            looked += 1
            return str.__getitem__(self, key)

    text = "eee1999" + "e" * 20_000 + "eee19"
    found = tokenizer._found(Counting(text))
    assert looked <= 4 * len(text)
    assert [tokenizer.text(token) for _, _, token in found] == ["eee1999", "eee199", "eee19", "eee19", "eee1", "eee1"]
    assert [tokenizer.text(i) for i in tokenizer.encode(text, False, True) if i >= W] == ["eee1999", "eee19"]
