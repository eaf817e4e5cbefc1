"""T5 models: where an output matrix is written, other names of the embedding, and the tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import localllm
from localllm.convert import open_checkpoint
from localllm.convert.hf_config import HfConfig
from localllm.convert.tokenizer_keys import tokenizer_keys
from localllm.tokenizer import Tokenizer
from tests.localllm.convert.checkpoints import STORED, with_tensors, write
from tests.localllm.convert.hf_tokenizers import SPACES, spm_file, t5_tokenizer
from tests.localllm.convert.support import edit_json, write_f32
from tests.localllm.convert.test_stored import t5_rows
from tests.localllm.convert.test_tokenizer_keys import check_ids, sample
from tests.localllm.convert.weights import ANSWER, PROMPT, numbers
from tests.models.support import nmse

OUTPUT, TABLE = "lm_head.weight", "shared.weight"


@pytest.mark.parametrize(("name", "there"), [("t5", 0), ("t5-gated", 1), ("t5-mt5", 1), ("t5-umt5", 0)])
def test_an_output_matrix_says_that_logits_are_not_divided(name: str, there: bool, tmp_path: Path) -> None:
    """An output matrix in the GGUF tells readers not to scale the decoder's hidden states.

    T5 1.1 and mT5 get an output matrix even if it equals the embedding.
    """
    with open_checkpoint(write(name, tmp_path)) as model:
        assert ("output.weight" in model.tensors) == there


@pytest.mark.parametrize("name", ["t5-gated", "t5-umt5"])
def test_folders_of_before_transformers_5_have_a_matrix_of_their_own(name: str, tmp_path: Path) -> None:
    own = numbers(OUTPUT, [320, 32], 0.0)
    tensors = with_tensors(name, {OUTPUT: own})
    write(name, tmp_path, tensors, tie_word_embeddings=False, scale_decoder_outputs=None)
    with open_checkpoint(tmp_path) as model:
        plain, table = t5_rows(model), numbers(TABLE, [320, 32], 0.0)
    scale = 1.0 if name == "t5-gated" else 32**0.5
    hidden = np.linalg.lstsq(table.astype(np.float64), scale * STORED[name].T.astype(np.float64), rcond=None)[0]
    assert nmse(plain, (own @ hidden).T).max() < 1e-9


def test_the_converted_file_answers(tmp_path: Path) -> None:
    """The converted model generates the argmax tokens of transformers' logits. Prompts end with </s>."""
    with open_checkpoint(write("t5-gated", tmp_path)) as model:
        write_f32(model, tmp_path / "t5.gguf")
    with localllm.load(tmp_path / "t5.gguf", cache_type_k="f32", cache_type_v="f32") as loaded:
        given = [*PROMPT, *ANSWER[:1]]
        for row, said in enumerate(ANSWER[1:]):
            [first] = [piece.token for piece in loaded.generate(given, temperature=0, max_tokens=1) if piece.token]
            assert first == STORED["t5-gated"][row].argmax()
            given.append(said)
        assert loaded.tokenize("a house")[-1] == 1
        assert loaded.tokenizer.piece(319) == b"<extra_id_0>"


def test_the_tokenizer(tmp_path: Path) -> None:
    """Token ids equal the checkpoint tokenizer's, from tokenizer.json or from a SentencePiece file (mT5, T5 1.1)."""
    theirs = t5_tokenizer(1000, sample())
    theirs.save(str(tmp_path / "tokenizer.json"))
    edit_json(tmp_path / "tokenizer_config.json", eos_token="</s>", pad_token="<pad>")
    config = HfConfig(tmp_path / "config.json", {}, {})
    keys = tokenizer_keys(tmp_path, config, 1010)
    assert keys.notes == ()
    check_ids(keys, theirs)
    model = json.loads(theirs.to_str())["model"]["vocab"]
    kinds = [3, 3, 2, *[1] * (len(model) - 3)]
    pieces = [(text, score, kind) for (text, score), kind in zip(model, kinds, strict=True)]
    (tmp_path / "spiece.model").write_bytes(spm_file(pieces, model=1, charsmap=SPACES))
    (tmp_path / "tokenizer.json").unlink()
    edit_json(tmp_path / "tokenizer_config.json", extra_ids=1000 - len(model))
    again = tokenizer_keys(tmp_path, config, 1010)
    for key in ("tokens", "token_type", "precompiled_charsmap", "remove_extra_whitespaces", "unknown_token_id"):
        ours, from_json = (found.keys[f"tokenizer.ggml.{key}"] for found in (again, keys))
        np.testing.assert_array_equal(ours, from_json, key)
    tokenizer = Tokenizer.from_metadata(again.keys)
    for text in ["Fill in <extra_id_0> and <extra_id_3>.", *sample()]:
        assert tokenizer.encode(text) == theirs.encode(text).ids
