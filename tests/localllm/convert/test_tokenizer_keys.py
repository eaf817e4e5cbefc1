"""Converted byte-level, SentencePiece and Gemma 4 tokenizers give the same token ids as the checkpoint's tokenizer.

SentencePiece vocabularies come from tokenizer.model, from tokenizer.json, and from both.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Library

from localllm.convert import ConvertError
from localllm.convert.hf_config import HfConfig
from localllm.convert.pretokenizer import pre_tokenizer_name
from localllm.convert.recipe import TokenizerModel
from localllm.convert.sentencepiece import read_pieces
from localllm.convert.tokenizer_keys import TokenizerKeys, tokenizer_keys
from localllm.gguf import open_gguf
from localllm.tokenizer import Tokenizer
from tests.conftest import SHARED_DATA
from tests.localllm.convert.hf_tokenizers import (
    REGEXES,
    SPACES,
    STEPS,
    TEXT,
    add_special,
    around,
    bpe_tokenizer,
    gemma4_tokenizer,
    spm_file,
    spm_pieces,
    spm_tokenizer,
    unigram_tokenizer,
    wordpiece_tokenizer,
)
from tests.localllm.support import REPOSITORY

SMALL_TALK = REPOSITORY / "benchmarks" / "demo" / "smalltalk.txt"
STYLES = {**{style: style for style in (*STEPS, "gpt-2", "starcoder")}, "llama3": "llama-bpe"}
TEXTS = [
    *(TEXT, "", " ", "  two  spaces "),
    "It's WE'LL 12345678 don'T\n\n\n  indented\tTab\r\n\r\n",
    "x = a[1:-2] ** 3.14e-10  # comment — “quoted” …",
    "日本語のテキスト。русский текст العربية हिन्दी ไทย 🙂👍🏽 naïve",
    "HTTPServer camelCaseWord SNAKE_case ÄÖÜ",
]


def sample() -> list[str]:
    """Return the texts above, simple sentences and, if the reference data exists, real texts: at least 1000 tokens."""
    folder = SHARED_DATA / "text"
    files = sorted(folder.glob("*")) if folder.is_dir() else []
    talk = SMALL_TALK.read_text(encoding="utf-8")
    return [*TEXTS, talk, *(path.read_text(encoding="utf-8", errors="replace")[20_000:28_000] for path in files)]


def keys_of(
    folder: Path, tokenizer: Any = None, rows: int = 1000, config: dict[str, Any] | None = None,
    kind: TokenizerModel = "", **settings: Any,
) -> TokenizerKeys:  # fmt: skip
    """Return the converted tokenizer of the checkpoint, after saving `tokenizer` and the settings there."""
    if tokenizer is not None:
        tokenizer.save(str(folder / "tokenizer.json"))
    if settings:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return tokenizer_keys(folder, HfConfig(folder / "config.json", config or {}, {}), rows, kind)


def check_ids(keys: TokenizerKeys, theirs: Any) -> None:
    ours = Tokenizer.from_metadata(keys.keys)
    for text in sample():
        assert ours.encode(text, add_special=False) == theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text) == theirs.encode(text).ids


def byte_level() -> Any:
    return bpe_tokenizer("qwen2")


@pytest.mark.parametrize("style", STYLES)
def test_byte_level_ids(style: str, tmp_path: Path) -> None:
    theirs = bpe_tokenizer(style, 1000, sample())
    keys = keys_of(tmp_path, theirs, bos_token="<s>", eos_token="</s>")
    assert keys.keys["tokenizer.ggml.pre"] == STYLES[style]
    assert keys.notes == ()
    check_ids(keys, theirs)


@pytest.mark.parametrize("style", ["tekken", "gpt-4o"])
def test_ids_that_differ_are_told(style: str, tmp_path: Path) -> None:
    """llama.cpp's split rules for these styles end a word before a combining mark (as in Hindi), the checkpoint's do
    not.

    Token ids differ only if the vocabulary has tokens that contain the mark, so the tokenizer is trained on few texts.
    """
    keys = keys_of(tmp_path, bpe_tokenizer(style, 1000, TEXTS), bos_token="<s>", eos_token="</s>")
    assert keys.notes == ("the file's tokenizer gives different ids than the folder's for a multilingual text",)


def test_pieces_ids(tmp_path: Path) -> None:
    theirs = spm_tokenizer(1000, sample())
    pieces = spm_pieces(1000, sample())
    (tmp_path / "tokenizer.model").write_bytes(spm_file(pieces))
    alone = keys_of(tmp_path, rows=1003, bos_token="<s>", eos_token="</s>", add_bos_token=True)
    assert alone.keys["tokenizer.ggml.tokens"][-4:] == [pieces[-1][0], "[PAD1000]", "[PAD1001]", "[PAD1002]"]
    assert alone.keys["tokenizer.ggml.token_type"].tolist() == [kind for _, _, kind in pieces] + [5, 5, 5]
    check_ids(alone, theirs)
    check_ids(keys_of(tmp_path, theirs, bos_token="<s>", eos_token="</s>"), theirs)
    (tmp_path / "tokenizer.model").unlink()
    from_json = keys_of(tmp_path, bos_token="<s>", eos_token="</s>")
    assert from_json.keys["tokenizer.ggml.model"] == "llama"
    assert from_json.notes == ()
    check_ids(from_json, theirs)


def test_the_space_before_a_text(tmp_path: Path) -> None:
    pieces = spm_pieces(400, [TEXT])
    (tmp_path / "tokenizer.model").write_bytes(spm_file(pieces, space_prefix=False))
    assert keys_of(tmp_path).keys["tokenizer.ggml.add_space_prefix"] is False
    assert keys_of(tmp_path, spm_tokenizer(400)).keys["tokenizer.ggml.add_space_prefix"] is True
    path = tmp_path / "tokenizer.json"
    whole = json.loads(path.read_text())
    for part, step, expected in (
        ("normalizer", {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}, False),
        ("pre_tokenizer", {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}, True),
        ("pre_tokenizer", {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never", "split": False}, False),
    ):
        path.write_text(json.dumps({**whole, "normalizer": None, part: step}))
        assert keys_of(tmp_path).keys["tokenizer.ggml.add_space_prefix"] is expected


def test_gemma4(tmp_path: Path) -> None:
    theirs = gemma4_tokenizer(1300, sample())
    keys = keys_of(tmp_path, theirs, 1302, kind="gemma4", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>")
    assert keys.keys["tokenizer.ggml.model"] == "gemma4"
    assert keys.notes == ()
    ours = Tokenizer.from_metadata(keys.keys)
    for text in [*sample(), "▁ ▁▁ a\u0300\x00 <|channel>"]:
        assert ours.encode(text, add_special=False) == theirs.encode(text).ids
    assert ours.encode("Once") == [2, *theirs.encode("Once").ids]
    # shown as text, although it is special in the checkpoint's tokenizer
    assert ours.decode(theirs.encode("<|channel>x").ids) == "<|channel>x"
    # other models with such a tokenizer.json give the model type "llama"
    assert keys_of(tmp_path, theirs, 1302).keys["tokenizer.ggml.model"] == "llama"


def test_added_tokens(tmp_path: Path) -> None:
    theirs = bpe_tokenizer("qwen2")
    size = theirs.get_vocab_size()
    theirs.add_special_tokens([AddedToken("<|im_end|>", special=True)])
    theirs.add_tokens([AddedToken("<tool>", normalized=False), AddedToken("<|looks|>", normalized=False)])
    keys = keys_of(tmp_path, theirs, rows=size + 3, eos_token={"content": "<|im_end|>"}, pad_token="<pad>")
    types = keys.keys["tokenizer.ggml.token_type"].tolist()
    assert types[size:] == [3, 4, 3]  # control, user-defined, control (by its spelling)
    assert keys.keys["tokenizer.ggml.eos_token_id"] == size
    assert keys.keys["tokenizer.ggml.padding_token_id"] == 0
    assert "tokenizer.ggml.bos_token_id" not in keys.keys
    ours = Tokenizer.from_metadata(keys.keys)
    text = "a <tool> b<|im_end|> c"
    assert ours.encode(text, parse_special=True) == theirs.encode(text).ids
    assert size in ours.eog
    fewer = keys_of(tmp_path, rows=size + 1)  # two added tokens have no embedding row
    assert len(fewer.keys["tokenizer.ggml.tokens"]) == size + 1


def test_special_ids_by_number(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7, 9, 11, 5000]}))
    config = {"bos_token_id": 1, "eos_token_id": [2, 7], "pad_token_id": None, "unk_token_id": 5000}
    keys = keys_of(tmp_path, bpe_tokenizer("qwen2"), config=config).keys
    ids = {key: value for key, value in keys.items() if key.endswith("_id")}
    assert ids == {f"tokenizer.ggml.{name}_token_id": i for name, i in
                   {"bos": 1, "eos": 2, "eot": 7, "eom": 9}.items()}  # fmt: skip


def test_suppressed_tokens_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"suppress_tokens": [7, 2, 5000, "a"]}))
    found = keys_of(tmp_path, bpe_tokenizer("qwen2")).keys["tokenizer.ggml.suppress_tokens"]
    assert (found.tolist(), found.dtype) == ([7, 2], np.int32)
    (tmp_path / "generation_config.json").write_text(json.dumps({"suppress_tokens": None}))
    assert "tokenizer.ggml.suppress_tokens" not in keys_of(tmp_path, bpe_tokenizer("qwen2")).keys


def test_ends_by_config_json_alone(tmp_path: Path) -> None:
    """Without a generation_config.json, the EOS ids come from config.json, as in transformers.

    Kimi K3 stores its end-of-turn token there.
    """
    keys = keys_of(tmp_path, bpe_tokenizer("qwen2"), config={"eos_token_id": [2, 7]}).keys
    ids = {key: value for key, value in keys.items() if key.endswith("_id")}
    assert ids == {"tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.eot_token_id": 7}


def test_what_is_put_around_a_text(tmp_path: Path) -> None:
    """tokenizer.json decides whether BOS and EOS are added, then tokenizer_config.json. If neither does, none
    is added.
    """
    cases: list[tuple[Any, dict[str, Any], tuple[bool, bool]]] = [
        (around("<s> $A </s>", {"<s>": 1, "</s>": 2}), {"bos_token": "<s>", "eos_token": "</s>"}, (True, True)),
        (around("<s> $A", {"<s>": 1}), {"eos_token": "</s>", "add_bos_token": False}, (True, False)),
        (None, {"bos_token": "<s>", "add_bos_token": True}, (True, False)),
        (None, {"bos_token": "<s>"}, (False, False)),
    ]
    for step, settings, expected in cases:
        tokenizer = spm_tokenizer()
        tokenizer.post_processor = step
        keys = keys_of(tmp_path, tokenizer, **settings)
        assert (keys.keys["tokenizer.ggml.add_bos_token"], keys.keys["tokenizer.ggml.add_eos_token"]) == expected
    tokenizer = bpe_tokenizer("qwen2")  # a ByteLevel post-processor adds no special tokens
    keys = keys_of(tmp_path, tokenizer, bos_token="<s>", add_bos_token=True)
    assert keys.keys["tokenizer.ggml.add_bos_token"] is False


def test_a_difference_is_told(tmp_path: Path) -> None:
    tokenizer = bpe_tokenizer("qwen2")
    tokenizer.post_processor = around("<s> </s> $A", {"<s>": 1, "</s>": 2})
    notes = keys_of(tmp_path, tokenizer, bos_token="<s>").notes
    assert notes == ("around a text the folder's tokenizer puts 2 special tokens, the file's 1",)
    tokenizer.normalizer = normalizers.Lowercase()
    notes = keys_of(tmp_path, tokenizer, bos_token="<s>").notes
    assert notes == ("the file's tokenizer gives different ids than the folder's for a multilingual text",)


@pytest.mark.parametrize("regex", [
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    REGEXES["llama3"],
    "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|" + REGEXES["llama3"].partition("'d)|")[2],
])  # fmt: skip
def test_spellings_of_one_pre_tokenizer(regex: str) -> None:
    for behavior, invert in (("Isolated", False), ("Removed", True)):
        split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": behavior, "invert": invert}
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
        whole = {"type": "Sequence", "pretokenizers": [split, byte_level]}
        assert pre_tokenizer_name(whole, True) == "llama-bpe"
        assert pre_tokenizer_name(whole, False) == "dbrx"


@pytest.mark.parametrize("pre", [
    None, [], 5, {"type": "Whitespace"}, {"type": "ByteLevel", "add_prefix_space": True}, {"type": "Sequence"},
    {"type": "Split", "pattern": {"Regex": "a+"}, "behavior": "Isolated"}, {"type": "Digits"},
    {"type": "Split", "pattern": {"Regex": REGEXES["qwen2"]}, "behavior": "MergedWithNext"},
])  # fmt: skip
def test_an_unknown_pre_tokenizer_is_an_error(pre: Any) -> None:
    with pytest.raises(ConvertError, match=r"the pre-tokenizer of tokenizer.json is unknown: it splits text by "):
        pre_tokenizer_name(pre, False)


def broken(change: Callable[[dict[str, Any]], Any], make: Callable[[], Any] = byte_level) -> Callable[[Path], None]:
    def save(folder: Path) -> None:
        whole = json.loads(make().to_str())
        change(whole)
        (folder / "tokenizer.json").write_text(json.dumps(whole))

    return save


def pieces(data: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / "tokenizer.model").write_bytes(data) and None


def multiplying(tokenizer: dict[str, Any]) -> None:
    """Make the normalizer expand the text by a factor of 10^12.

    The tokenizers library aborts on this, which used to end the parent process.
    """
    replace = {"type": "Replace", "pattern": {"String": "e"}, "content": "e" * 1000}
    tokenizer["normalizer"] = {"type": "Sequence", "normalizers": [replace] * 4}


GOOD = spm_file(spm_pieces(300, [TEXT]))
BAD: dict[str, tuple[Callable[[Path], None], str]] = {
    "none": (lambda folder: None, "no tokenizer.json or tokenizer.model; load its tokenizer with"),
    "words": (
        broken(lambda t: t["model"].update(type="WordLevel")),
        "is a WordLevel model; supported: BPE, WordPiece, Unigram",
    ),
    "no scores": (broken(lambda t: t["model"].update(type="Unigram")), "vocab is not a list of tokens with scores"),
    "no model": (broken(lambda t: t.pop("model")), "is a None model; supported: BPE"),
    "model": (broken(lambda t: t.update(model=[1])), "model is not an object"),
    "vocab": (broken(lambda t: t["model"].update(vocab=[])), "model.vocab is not an object"),
    "id": (broken(lambda t: t["model"]["vocab"].update(x=-1)), "token 'x' has the id -1, but the embedding has 1000"),
    "high id": (broken(lambda t: t["model"]["vocab"].update(x=1000)), "tokenizer and weights do not match"),
    "merges": (broken(lambda t: t["model"].update(merges=["abc"])), "model.merges is not a list of pairs"),
    "added": (broken(lambda t: t["added_tokens"].append({"id": "x"})), "an added token has no id"),
    "no unknown text": (
        broken(lambda t: t["model"].update(unk_token="[NONE]"), wordpiece_tokenizer), "has no token for unknown text",
    ),
    "prefix": (
        broken(lambda t: t["model"].update(continuing_subword_prefix=""), wordpiece_tokenizer),
        "subword_prefix is not a text",
    ),
    "no unknown piece": (
        broken(lambda t: t["model"].update(unk_id=None), unigram_tokenizer), "has no token for unknown text",
    ),
    "score": (
        broken(lambda t: t["model"]["vocab"].append(["x", "y"]), unigram_tokenizer),
        "not a list of tokens with scores",
    ),
    "rows": (
        broken(lambda t: t["model"]["vocab"].extend([["x", 0.0]] * 1000), unigram_tokenizer),
        "tokenizer and weights do not",
    ),
    "table": (
        broken(lambda t: t["normalizer"]["normalizers"][0].update(precompiled_charsmap="?"),
               partial(unigram_tokenizer, charsmap=SPACES)),
        "charsmap is not base64",
    ),
    "bomb": (broken(multiplying), "tokenizer.json: the folder's tokenizer fails on a text of a few lines: it crashes"),
    "pieces": (pieces(b"\xff" * 50), "is not a SentencePiece model, or damaged"),
    "cut": (pieces(GOOD[:-3]), "is not a SentencePiece model, or damaged"),
    "empty": (pieces(b""), "is not a SentencePiece model, or damaged"),
    "kind": (pieces(GOOD + b"\x12\x02\x18\x03"), "is a word model; supported: BPE, Unigram"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_tokenizer_that_cannot_be_had_is_one_line(case: str, tmp_path: Path) -> None:
    save, message = BAD[case]
    save(tmp_path)
    with pytest.raises(ConvertError, match=message) as error:
        keys_of(tmp_path)
    assert "\n" not in str(error.value)


def test_damaged_pieces_end_in_an_error_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    random = np.random.default_rng(1)
    for position in random.integers(0, len(GOOD), 200):
        data = bytearray(GOOD)
        data[position] = random.integers(256)
        for damaged in (GOOD[:position], data):
            path.write_bytes(damaged)
            with suppress(ConvertError):
                read_pieces(path)


def test_old_merges_and_names(tmp_path: Path) -> None:
    """Before 2024, tokenizer.json stored each merge as one string with a space. Both forms convert to the same
    merges.
    """
    theirs = bpe_tokenizer("gpt-2")
    pairs = keys_of(tmp_path, theirs).keys["tokenizer.ggml.merges"]
    whole = json.loads((tmp_path / "tokenizer.json").read_text())
    whole["model"]["merges"] = [" ".join(pair) for pair in whole["model"]["merges"]]
    (tmp_path / "tokenizer.json").write_text(json.dumps(whole))
    assert keys_of(tmp_path).keys["tokenizer.ggml.merges"] == pairs


GEMMA4 = SHARED_DATA / "vocab" / "ggml-vocab-gemma-4.gguf"


@pytest.mark.skipif(not GEMMA4.is_file(), reason="no reference data")
def test_the_real_vocabulary_of_gemma4(tmp_path: Path) -> None:
    """Gemma 4's vocabulary, written as tokenizer.json and converted back, gives llama.cpp's token ids."""
    metadata = open_gguf(GEMMA4).metadata
    texts, kinds = list(metadata["tokenizer.ggml.tokens"]), np.array(metadata["tokenizer.ggml.token_type"])
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    ids = {text: i for i, text in enumerate(texts)}
    theirs = Library(models.BPE(ids, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    theirs.normalizer = normalizers.Replace(" ", "▁")
    theirs.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    special = [texts[i] for i in np.flatnonzero((kinds == 3) | (kinds == 4))]
    add_special(theirs, special)
    keys = keys_of(
        tmp_path, theirs, len(texts) + 2, kind="gemma4", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )
    assert keys.notes == ()
    assert keys.keys["tokenizer.ggml.token_type"][: len(texts)][ids["<unk>"]] in (2, 3)
    same = np.arange(len(texts)) != ids["<unk>"]
    assert np.array_equal(keys.keys["tokenizer.ggml.token_type"][: len(texts)][same], kinds[same])
    ours = Tokenizer.from_metadata(keys.keys)
    cases = GEMMA4.with_suffix(".gguf.inp").read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
    expected = GEMMA4.with_suffix(".gguf.out").read_text().splitlines()
    for text, line in zip(cases, expected, strict=False):
        assert ours.encode(text, add_special=False) == [int(i) for i in line.split()]
