"""T5, mT5 and UMT5 models, and their encoder-only variants, give transformers' logits and hidden states."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import localllm
from localllm.convert import Checkpoint, open_checkpoint
from localllm.convert.hf_config import HfConfig
from localllm.convert.tokenizer_keys import tokenizer_keys
from localllm.models import ARCHITECTURES, architecture_of, read_config, record
from localllm.tokenizer import Tokenizer
from tests.localllm.convert.hf_synthetic import DATA, numbers, write_folder
from tests.localllm.convert.hf_t5 import ANSWER, FAMILY, TEXT, read_family
from tests.localllm.convert.hf_tokenizers import SPACES, spm_file, t5_tokenizer
from tests.localllm.convert.support import check_refused, save, write_f32
from tests.localllm.convert.test_tokenizer_keys import check_ids, sample
from tests.models.support import Driver, bind_reference, nmse

SPECS, STORED = read_family(), np.load(DATA / "hf_t5.npz")
OUTPUT, TABLE = "lm_head.weight", "shared.weight"


def write(name: str, folder: Path, more: dict[str, np.ndarray | None] | None = None, **config: Any) -> None:
    """Write a checkpoint with some config.json keys and some tensors replaced, or removed if None."""
    spec, tensors = SPECS[name], {key: numbers(key, *rest) for key, *rest in SPECS[name]["tensors"]}
    write_folder({**spec, "config": {k: v for k, v in {**spec["config"], **config}.items() if v is not None}}, folder)
    changed = {**tensors, **(more or {})}
    save(folder / "model.safetensors", {key: value for key, value in changed.items() if value is not None})


def rows_of(model: Checkpoint) -> np.ndarray:
    """Return the decoder's logits, or the hidden states of an encoder-only model."""
    architecture = architecture_of(model.metadata)
    config = read_config(model.metadata, architecture.name)
    embeds = architecture.encoder
    driver = Driver(bind_reference(record(config, architecture, model.tensors, embeddings=embeds)))
    if embeds:
        return driver.step([(0, TEXT)])
    driver.borders = [len(TEXT)]
    return driver.step([(0, TEXT + ANSWER)], range(len(TEXT), len(TEXT + ANSWER)))


@pytest.mark.parametrize("name", FAMILY)
def test_results_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    write(name, tmp_path)
    with open_checkpoint(tmp_path) as model:
        assert model.metadata["general.architecture"] == name.split("-")[0] in ARCHITECTURES
        assert model.notes == ()
        assert nmse(rows_of(model), STORED[name]).max() < 1e-10


def test_keys(tmp_path: Path) -> None:
    write("t5", tmp_path)
    with open_checkpoint(tmp_path) as model:
        keys = {key.removeprefix("t5."): value for key, value in model.metadata.items()}
    expected = {
        "context_length": 512, "block_count": 2, "decoder_block_count": 3, "attention.key_length": 12,
        "attention.relative_buckets_count": 32, "attention.layer_norm_rms_epsilon": 1e-6, "decoder_start_token_id": 0,
        "tokenizer.ggml.model": "t5", "tokenizer.ggml.eos_token_id": 1, "tokenizer.ggml.unknown_token_id": 2,
        "tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_eos_token": True,
    }  # fmt: skip
    assert {key: keys[key] for key in expected} == expected
    assert not [key for key in keys if key.startswith("rope.")]


def test_an_output_matrix_says_that_logits_are_not_divided(tmp_path: Path) -> None:
    """An output matrix in the GGUF tells readers not to scale the decoder's hidden states.

    T5 1.1 and mT5 get an output matrix even if it equals the embedding.
    """
    for name, there in (("t5", False), ("t5-gated", True), ("t5-mt5", True), ("t5-umt5", False)):
        (folder := tmp_path / name).mkdir()
        write(name, folder)
        with open_checkpoint(folder) as model:
            assert ("output.weight" in model.tensors) is there, name


@pytest.mark.parametrize("name", ["t5-gated", "t5-umt5"])
def test_folders_of_before_transformers_5_have_a_matrix_of_their_own(name: str, tmp_path: Path) -> None:
    own = numbers(OUTPUT, [320, 32], 0.0)
    write(name, tmp_path, {OUTPUT: own}, tie_word_embeddings=False, scale_decoder_outputs=None)
    with open_checkpoint(tmp_path) as model:
        plain, table = rows_of(model), numbers(TABLE, [320, 32], 0.0)
    scale = 1.0 if name == "t5-gated" else 32**0.5
    hidden = np.linalg.lstsq(table.astype(np.float64), scale * STORED[name].T.astype(np.float64), rcond=None)[0]
    assert nmse(plain, (own @ hidden).T).max() < 1e-9


def test_the_embedding_by_its_other_names(tmp_path: Path) -> None:
    """Checkpoints store the embedding under one of three names, or as several equal tensors."""
    table = numbers(TABLE, [320, 32], 0.0)
    for number, names in enumerate((("encoder.",), ("encoder.", "decoder."), ("decoder.",))):
        (folder := tmp_path / str(number)).mkdir()
        write("t5", folder, {TABLE: None, **{f"{name}embed_tokens.weight": table for name in names}})
        with open_checkpoint(folder) as model:
            assert nmse(rows_of(model), STORED["t5"]).max() < 1e-10


def test_what_an_encoder_does_not_read_is_left(tmp_path: Path) -> None:
    more = {"decoder.final_layer_norm.weight": np.ones(32, np.float32), OUTPUT: np.ones((320, 32), np.float32)}
    write("t5encoder", tmp_path, more)
    with open_checkpoint(tmp_path) as model:
        assert nmse(rows_of(model), STORED["t5encoder"]).max() < 1e-10


def test_the_converted_file_answers(tmp_path: Path) -> None:
    """The converted model generates the argmax tokens of transformers' logits. Prompts end with </s>."""
    write("t5-gated", tmp_path)
    with open_checkpoint(tmp_path) as model:
        write_f32(model, tmp_path / "t5.gguf")
    with localllm.load(tmp_path / "t5.gguf", cache_type_k="f32", cache_type_v="f32") as loaded:
        given = [*TEXT, *ANSWER[:1]]
        for row, said in enumerate(ANSWER[1:]):
            [first] = [piece.token for piece in loaded.generate(given, temperature=0, max_tokens=1) if piece.token]
            assert first == STORED["t5-gated"][row].argmax()
            given.append(said)
        assert loaded.tokenize("a house")[-1] == 1
        assert loaded.tokenizer.piece(319) == b"<extra_id_0>"


REFUSED: dict[str, tuple[dict[str, Any], dict[str, np.ndarray | None], str]] = {
    "activation": ({"feed_forward_proj": "gated-silu"}, {}, "feed_forward_proj is gated-silu; the GGUF architecture"),
    "distances": ({"relative_attention_max_distance": 256}, {}, "relative_attention_max_distance is 256; the GGUF"),
    "two tables": ({}, {"encoder.embed_tokens.weight": np.ones((320, 32), np.float32)}, "are both token_embd.weight"),
    "divided, with a matrix": ({}, {OUTPUT: np.ones((320, 32), np.float32)}, "lm_head.weight is not the embedding"),
    "no table": ({}, {TABLE: None}, "the tensor of token embeddings is missing"),
    "a third stack": ({}, {"extra.block.0.weight": np.ones(32, np.float32)}, "has no place in GGUF files of t5"),
    "no width": ({"d_model": None}, {}, "hidden_size is missing; expected a whole number"),
    "layers": ({"num_decoder_layers": 4}, {}, r"dec\.blk\.3\..*does not hold this tensor"),
    "a start beyond": ({"decoder_start_token_id": 320}, {}, "decoder_start_token_id: expected an integer"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_gguf_cannot_say_is_one_line(case: str, tmp_path: Path) -> None:
    config, tensors, message = REFUSED[case]
    write("t5", tmp_path, tensors, **config)
    check_refused(tmp_path, message)


def test_the_tokenizer(tmp_path: Path) -> None:
    """Token ids equal the checkpoint tokenizer's, from tokenizer.json or from a SentencePiece file (mT5, T5 1.1)."""
    theirs = t5_tokenizer(1000, sample())
    theirs.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "pad_token": "<pad>"}))
    config = HfConfig(tmp_path / "config.json", {}, {})
    keys = tokenizer_keys(tmp_path, config, 1010)
    assert keys.notes == ()
    check_ids(keys, theirs)
    model = json.loads(theirs.to_str())["model"]["vocab"]
    kinds = [3, 3, 2, *[1] * (len(model) - 3)]
    pieces = [(text, score, kind) for (text, score), kind in zip(model, kinds, strict=True)]
    (tmp_path / "spiece.model").write_bytes(spm_file(pieces, model=1, charsmap=SPACES))
    (tmp_path / "tokenizer.json").unlink()
    told = {"eos_token": "</s>", "pad_token": "<pad>", "extra_ids": 1000 - len(model)}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(told))
    again = tokenizer_keys(tmp_path, config, 1010)
    for key in ("tokens", "token_type", "precompiled_charsmap", "remove_extra_whitespaces", "unknown_token_id"):
        ours, from_json = (found.keys[f"tokenizer.ggml.{key}"] for found in (again, keys))
        np.testing.assert_array_equal(ours, from_json, key)
    tokenizer = Tokenizer.from_metadata(again.keys)
    for text in ["Fill in <extra_id_0> and <extra_id_3>.", *sample()]:
        assert tokenizer.encode(text) == theirs.encode(text).ids
