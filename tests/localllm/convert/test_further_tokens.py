"""Converted Gemma 4, WordPiece and unigram tokenizers give the same token ids as the checkpoint's tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localllm.convert import ConvertError
from localllm.convert.hf_config import HfConfig
from localllm.convert.recipe import TokenizerModel
from localllm.convert.tokenizer_keys import TokenizerKeys, tokenizer_keys
from localllm.gguf import open_gguf
from localllm.tokenizer import Tokenizer
from tests.conftest import SHARED_DATA
from tests.localllm.convert.hf_tokenizers import SPACES, gemma4_tokenizer, unigram_tokenizer, wordpiece_tokenizer
from tests.localllm.convert.test_tokenizer_keys import check_ids, sample


def keys_of(folder: Path, tokenizer: Any, kind: TokenizerModel = "", **settings: Any) -> TokenizerKeys:
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return tokenizer_keys(folder, HfConfig(folder / "config.json", {}, {}), tokenizer.get_vocab_size() + 2, kind)


def test_gemma4(tmp_path: Path) -> None:
    theirs = gemma4_tokenizer(1300, sample())
    keys = keys_of(tmp_path, theirs, "gemma4", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>")
    assert keys.keys["tokenizer.ggml.model"] == "gemma4"
    assert keys.notes == ()
    ours = Tokenizer.from_metadata(keys.keys)
    for text in [*sample(), "▁ ▁▁ a\u0300\x00 <|channel>"]:
        assert ours.encode(text, add_special=False) == theirs.encode(text).ids
    assert ours.encode("Once") == [2, *theirs.encode("Once").ids]
    # shown as text, although it is special in the checkpoint's tokenizer
    assert ours.decode(theirs.encode("<|channel>x").ids) == "<|channel>x"
    # other models with such a tokenizer.json give the model type "llama"
    assert keys_of(tmp_path, theirs).keys["tokenizer.ggml.model"] == "llama"


@pytest.mark.parametrize("lowercase", [True, False])
def test_wordpiece(lowercase: bool, tmp_path: Path) -> None:
    theirs = wordpiece_tokenizer(1000, sample(), lowercase)
    keys = keys_of(tmp_path, theirs, cls_token="[CLS]", sep_token="[SEP]", mask_token="[MASK]")
    assert keys.keys["tokenizer.ggml.model"] == "bert"
    assert keys.keys["tokenizer.ggml.normalizer.lowercase"] is lowercase
    assert keys.notes == ()
    check_ids(keys, theirs)
    ids = {key: value for key, value in keys.keys.items() if key.endswith("_id")}
    names = {"unknown": 1, "bos": 2, "seperator": 3, "mask": 4}
    assert ids == {f"tokenizer.ggml.{name}_token_id": i for name, i in names.items()}


def test_wordpiece_that_lowers_but_keeps_accents(tmp_path: Path) -> None:
    from tokenizers import normalizers, processors

    theirs = wordpiece_tokenizer(1000, sample())
    theirs.normalizer = normalizers.BertNormalizer(lowercase=True, strip_accents=False)
    theirs.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    keys = keys_of(tmp_path, theirs)
    assert keys.keys["tokenizer.ggml.normalizer.strip_accents"] is False
    assert keys.notes == ()
    check_ids(keys, theirs)


def test_unigram(tmp_path: Path) -> None:
    from tokenizers import Regex, normalizers

    theirs = unigram_tokenizer(1000, sample(), SPACES)
    keys = keys_of(tmp_path, theirs, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    assert keys.keys["tokenizer.ggml.model"] == "t5"
    assert keys.notes == ()
    check_ids(keys, theirs)
    without_words = unigram_tokenizer(1000, sample(), SPACES, words=False)
    assert not keys_of(tmp_path, without_words).keys["tokenizer.ggml.remove_extra_whitespaces"]
    single = normalizers.Replace(Regex(" {2,}"), " ")
    without_words.normalizer = normalizers.Sequence([normalizers.Precompiled(SPACES), single])
    assert keys_of(tmp_path, without_words).keys["tokenizer.ggml.remove_extra_whitespaces"]


def changed(tokenizer: Any, change: Callable[[dict[str, Any]], Any], folder: Path) -> None:
    whole = json.loads(tokenizer.to_str())
    change(whole)
    (folder / "tokenizer.json").write_text(json.dumps(whole))


BAD: dict[str, tuple[Callable[[], Any], Callable[[dict[str, Any]], Any], str]] = {
    "unknown": (wordpiece_tokenizer, lambda t: t["model"].update(unk_token="[NONE]"), "has no token for unknown text"),
    "prefix": (
        wordpiece_tokenizer, lambda t: t["model"].update(continuing_subword_prefix=""), "subword_prefix is not a text"
    ),
    "no unknown": (unigram_tokenizer, lambda t: t["model"].update(unk_id=None), "has no token for unknown text"),
    "score": (unigram_tokenizer, lambda t: t["model"]["vocab"].append(["x", "y"]), "not a list of tokens with scores"),
    "rows": (
        unigram_tokenizer, lambda t: t["model"]["vocab"].extend([["x", 0.0]] * 1000), "tokenizer and weights do not"
    ),
    "table": (
        lambda: unigram_tokenizer(charsmap=SPACES),
        lambda t: t["normalizer"]["normalizers"][0].update(precompiled_charsmap="?"), "charsmap is not base64",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_damaged_files_are_one_line(case: str, tmp_path: Path) -> None:
    make, change, message = BAD[case]
    changed(make(), change, tmp_path)
    with pytest.raises(ConvertError, match=message) as error:
        tokenizer_keys(tmp_path, HfConfig(tmp_path / "config.json", {}, {}), 1000)
    assert "\n" not in str(error.value)


GEMMA4 = SHARED_DATA / "vocab" / "ggml-vocab-gemma-4.gguf"


@pytest.mark.skipif(not GEMMA4.is_file(), reason="no reference data")
def test_the_real_vocabulary_of_gemma4(tmp_path: Path) -> None:
    """Gemma 4's vocabulary, written as tokenizer.json and converted back, gives llama.cpp's token ids."""
    from tokenizers import AddedToken, models, normalizers, pre_tokenizers
    from tokenizers import Tokenizer as Library

    metadata = open_gguf(GEMMA4).metadata
    texts, kinds = list(metadata["tokenizer.ggml.tokens"]), np.array(metadata["tokenizer.ggml.token_type"])
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    ids = {text: i for i, text in enumerate(texts)}
    theirs = Library(models.BPE(ids, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    theirs.normalizer = normalizers.Replace(" ", "▁")
    theirs.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    special = [texts[i] for i in np.flatnonzero((kinds == 3) | (kinds == 4))]
    theirs.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in special])
    keys = keys_of(tmp_path, theirs, "gemma4", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>")
    assert keys.notes == ()
    assert keys.keys["tokenizer.ggml.token_type"][: len(texts)][ids["<unk>"]] in (2, 3)
    same = np.arange(len(texts)) != ids["<unk>"]
    assert np.array_equal(keys.keys["tokenizer.ggml.token_type"][: len(texts)][same], kinds[same])
    ours = Tokenizer.from_metadata(keys.keys)
    cases = GEMMA4.with_suffix(".gguf.inp").read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
    expected = GEMMA4.with_suffix(".gguf.out").read_text().splitlines()
    for text, line in zip(cases, expected, strict=False):
        assert ours.encode(text, add_special=False) == [int(i) for i in line.split()]
