"""Converted WordPiece and unigram tokenizers give the same token ids as the checkpoint's tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Regex, normalizers, processors

from tests.localllm.convert.hf_tokenizers import SPACES, unigram_tokenizer, wordpiece_tokenizer
from tests.localllm.convert.test_tokenizer_keys import check_ids, keys_of, sample


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
    theirs = wordpiece_tokenizer(1000, sample())
    theirs.normalizer = normalizers.BertNormalizer(lowercase=True, strip_accents=False)
    theirs.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    keys = keys_of(tmp_path, theirs)
    assert keys.keys["tokenizer.ggml.normalizer.strip_accents"] is False
    assert keys.notes == ()
    check_ids(keys, theirs)


def test_unigram(tmp_path: Path) -> None:
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
