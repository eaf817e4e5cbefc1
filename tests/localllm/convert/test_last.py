"""Grok, PLaMo 1, Talkie and NeoBERT: logits of reference implementations, Grok 2's shards, and refused settings.

`test_own` compares their GGUF with llama.cpp's converter.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localllm.convert import open_checkpoint
from localllm.convert.sentencepiece import UNIGRAM
from localllm.models import ARCHITECTURES, Pooler, PoolingHead, read_config, record
from localllm.tokenizer import Tokenizer
from tests.localllm.convert import float64
from tests.localllm.convert.hf_models import ids
from tests.localllm.convert.hf_own import digest, read_expected, write_own
from tests.localllm.convert.hf_synthetic import numbers
from tests.localllm.convert.hf_tokenizers import TEXT, VOCABULARY, spm_file, spm_pieces
from tests.localllm.convert.support import check_refused, logits_of, save, values
from tests.localllm.convert.test_programs import written
from tests.models.support import Driver, bind_reference, nmse

# `test_own` covers the accepted settings
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "grok embeddings": ("grok", {"embedding_multiplier_scale": None}, "embedding_multiplier_scale is missing"),
    "grok output": ("grok", {"output_multiplier_scale": 0}, "output_multiplier_scale is 0.0; expected a number other"),
    "grok experts": ("grok", {"num_experts_per_tok": None}, "num_experts_per_tok is missing; expected"),
    "grok activation": ("grok", {"hidden_act": "silu"}, "hidden_act is silu; expected gelu"),
    "grok windows": ("grok-2", {"sliding_window_size": 64}, "sliding_window_size is 64; the GGUF architecture"),
    "grok global": ("grok-2", {"global_attn_every_n": 2}, "global_attn_every_n is 2; the GGUF architecture"),
    "grok half": ("grok-2", {"rope_rotate_half_dims": True}, "rope_rotate_half_dims is True; the GGUF architecture"),
    "grok caps": ("grok-2", {"attn_logit_softcapping_method": "x"}, "softcapping_method is x; the GGUF architecture"),
    "grok rotations": ("grok-2", {"rope_type": "yarn_log"}, "rope_type is yarn_log; expected original or yarn"),
    "grok no factor": ("grok-2", {"scaling_factor": None}, "scaling_factor is missing; expected a number from 1 up"),
    "grok no context": ("grok-2", {"original_max_position_embeddings": None}, "_position_embeddings is missing; exp"),
    "grok growth": ("grok-2", {"attn_temperature_len": "long"}, "temperature_len is long; expected a whole number"),
    "plamo keys": ("plamo", {"n_shared_head": 7}, "n_shared_head is 7; expected a number that divides the 40 heads"),
    "plamo base": ("plamo", {"rope_theta": 1e6}, "rope_theta is 1000000.0; the GGUF architecture"),
    "plamo scaled": ("plamo", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling is .*; the GGUF"),
    "plamo width": ("plamo", {"hidden_size": 80}, "160 rows or columns are not 40 groups of 2; config.json does not"),
    "talkie keys": ("talkie", {"num_key_value_heads": 2}, "num_key_value_heads is 2 of 4 heads"),
    "talkie heads": ("talkie", {"head_dim": 16}, "32 rows or columns are not 4 groups of 16; config.json does not"),
    "talkie scaled": ("talkie", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling is .*; the GGUF"),
    "neo-bert unit": ("neo-bert", {"hidden_act": "gelu"}, "hidden_act is gelu; expected silu"),
    "neo-bert positions": ("neo-bert", {"rope": False}, "rope is False; the GGUF architecture"),
    "neo-bert norms": ("neo-bert", {"rms_norm": False}, "rms_norm is False; the GGUF architecture"),
    "neo-bert nGPT": ("neo-bert", {"ngpt": True}, "ngpt is True; the GGUF architecture"),
    "neo-bert width": ("neo-bert", {"intermediate_size": None}, "intermediate_size is missing; expected a whole"),
    "neo-bert context": ("neo-bert", {"max_length": None}, "max_position_embeddings is missing; expected a whole"),
    "neo-bert heads": ("neo-bert", {"num_attention_heads": 3}, "96 rows or columns are not 3 groups of 30"),
}  # fmt: skip


def _exact(name: str) -> dict[str, float64.F64]:
    return {tensor: x.astype(np.float64) for tensor, x in written(name).items()}


# -- logits of the reference implementations -------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [8, 4, 40, 1])
def test_logits_of_plamo_are_those_of_its_program(shared: int, tmp_path: Path) -> None:
    """Query head i reads KV head i % KV heads, for any number of KV heads. llama.cpp's converter supports only 40 query
    heads and 5 KV heads.
    """
    write_own("plamo", tmp_path, n_shared_head=shared)
    given = written("plamo")
    for name in [name for name in given if "k_proj" in name or "v_proj" in name]:
        given[name] = numbers(name, [160 // shared, 160], 0.0)
    save(tmp_path / "model.safetensors", given)
    expected = float64.plamo({name: x.astype(np.float64) for name, x in given.items()}, ids(), 2, 40, shared, 1e-6)
    with open_checkpoint(tmp_path) as model:
        assert model.metadata["plamo.attention.head_count_kv"] == 40 // shared
        assert nmse(logits_of(model, ids()), expected).max() < 1e-10


def test_a_unigram_vocabulary_of_plamo_falls_back_to_bytes(tmp_path: Path) -> None:
    """PLaMo's unigram vocabulary converts to SentencePiece BPE keys with byte fallback, as in llama.cpp.

    As a T5 vocabulary, it would add EOS to every prompt.
    """
    write_own("plamo", tmp_path)
    with open_checkpoint(tmp_path) as model:
        theirs = model.metadata
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer.model").write_bytes(spm_file(spm_pieces(VOCABULARY, [TEXT]), model=UNIGRAM))
    with open_checkpoint(tmp_path) as model:
        assert len(model.notes) == 1
        assert model.notes[0].startswith("tokenizer.model is a unigram model; the file merges its pieces by score")
        tokenizer = Tokenizer.from_metadata(model.metadata)
        for key in ("model", "tokens", "token_type"):
            np.testing.assert_array_equal(model.metadata[f"tokenizer.ggml.{key}"], theirs[f"tokenizer.ggml.{key}"])
        ours = model.metadata["tokenizer.ggml.scores"]  # except the scores of <unk>, <s> and </s>
        np.testing.assert_array_equal(ours[3:], theirs["tokenizer.ggml.scores"][3:])
    found = tokenizer.encode("犬")
    assert found == [1, VOCABULARY - 1, *(3 + byte for byte in "犬".encode())]


def test_logits_of_talkie_are_those_of_its_program(tmp_path: Path) -> None:
    write_own("talkie", tmp_path)
    with open_checkpoint(tmp_path) as model:
        assert nmse(logits_of(model, ids()), float64.talkie(_exact("talkie"), ids(), 2, 4)).max() < 1e-10


@pytest.mark.parametrize("name", ["neo-bert", "neo-bert-rank"])
def test_rows_and_scores_of_neo_bert_are_those_of_its_program(name: str, tmp_path: Path) -> None:
    write_own(name, tmp_path)
    given = _exact(name)
    expected = float64.neo_bert(given, ids(), 2, 4, 1e-5)
    with open_checkpoint(tmp_path) as model:
        row = ARCHITECTURES["neo-bert"]
        config = read_config(model.metadata, row.name)
        rows = Driver(bind_reference(record(config, row, model.tensors, embeddings=True))).step([(0, ids())])
        pooler = Pooler(config, PoolingHead.of(config, row, model.tensors))
    assert nmse(rows, expected).max() < 1e-10
    if name == "neo-bert":
        assert config.pooling == "cls"
        assert nmse(pooler(rows, "cls"), expected[0]) < 1e-10
    else:
        inner = np.tanh(expected[0] @ given["dense.weight"].T + given["dense.bias"])
        scores = inner @ given["classifier.weight"].T + given["classifier.bias"]
        assert nmse(pooler(rows, "rank"), scores) < 1e-10
        assert model.metadata["neo-bert.classifier.output_labels"] == ["no", "maybe", "yes"]


def test_the_width_of_neo_bert_is_rounded_up(tmp_path: Path) -> None:
    write_own("neo-bert", tmp_path, intermediate_size=64)  # two thirds of 64 are 42, but the matrices have 48 rows
    with open_checkpoint(tmp_path) as model:
        assert model.metadata["neo-bert.feed_forward_length"] == 48
    write_own("neo-bert", tmp_path, intermediate_size=80)
    check_refused(tmp_path, r"blk.0.ffn_up.weight: expected shape \(112, 32\).*, found \(96, 32\)")


def test_the_pooling_of_sentence_transformers_overrides_neo_bert_s(tmp_path: Path) -> None:
    write_own("neo-bert", tmp_path)
    (tmp_path / "modules.json").write_text(json.dumps([{"path": "1", "type": "sentence_transformers.models.Pooling"}]))
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    with open_checkpoint(tmp_path) as model:
        assert model.metadata["neo-bert.pooling_type"] == 1


# -- Talkie ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gain", "message"),
    [(None, "tensor 'lm_head_gain.w_g' is missing"), ([1.0, 2.0], r"lm_head_gain.w_g: is F32 \(2,\); expected one")],
)
def test_the_factor_of_talkie_s_output_is_one_number(gain: list[float] | None, message: str, tmp_path: Path) -> None:
    write_own("talkie", tmp_path)
    given = written("talkie")
    del given["lm_head_gain.w_g"]
    save(tmp_path / "model.safetensors", given if gain is None else {**given, "lm_head_gain.w_g": np.float32(gain)})
    check_refused(tmp_path, message)


# -- Grok --------------------------------------------------------------------------------------------------------------


def _keys(name: str, folder: Path, **config: Any) -> dict[str, Any]:
    write_own(name, folder, **config)
    with open_checkpoint(folder) as model:
        return {key.removeprefix("grok."): value for key, value in model.metadata.items()}


def test_rotations_of_grok_2_as_published_are_not_stretched(tmp_path: Path) -> None:
    """With rope type `original`, SGLang uses the base frequency unscaled, while llama.cpp's converter writes YaRN."""
    keys = _keys("grok-2", tmp_path, rope_type="original")
    assert not [key for key in keys if key.startswith("rope.scaling")]
    assert keys["rope.freq_base"] == 50000.0


def test_lengths_are_not_scaled_where_grok_2_s_rotations_are_stretched(tmp_path: Path) -> None:
    """SGLang's YaRN does not scale attention by 1 + 0.1 log(factor).

    GGUF readers do, so `attn_factor` cancels the scale.
    """
    keys = _keys("grok-2", tmp_path)
    assert keys["rope.scaling.attn_factor"] * (1 + 0.1 * np.log(4.0)) == pytest.approx(1.0)


def test_caps_of_grok(tmp_path: Path) -> None:
    """Grok 2's config.json names the output cap `final_logit_softcapping`; llama.cpp's converter reads
    `final_logit_softcap`. Both names are accepted.
    """
    assert _keys("grok-2", tmp_path)["final_logit_softcapping"] == 50.0
    assert "final_logit_softcapping" not in _keys("grok", tmp_path)
    assert _keys("grok", tmp_path, final_logit_softcap=40)["final_logit_softcapping"] == 40.0
    assert _keys("grok", tmp_path, max_attn_value=20.0)["attn_logit_softcapping"] == 20.0
    assert "attention.temperature_length" not in _keys("grok-2", tmp_path, attn_temperature_len=-1)


def _save_pieces(folder: Path, cards: int, left_out: str = "") -> None:
    """Write Grok 2's published shards: one file of common tensors, and files with each GPU's slice of every expert."""
    given = written("grok-2")
    experts = {name: x for name, x in given.items() if ".experts." in name}
    (folder / "model.safetensors").unlink(missing_ok=True)
    save(folder / "pytorch_model-00009-TP-common.safetensors", {x: y for x, y in given.items() if x not in experts})
    for card in range(cards):
        for number, matrix in enumerate(("w1", "w2", "w3")):
            path = folder / f"pytorch_model-{number:05}-TP-{card:03}.safetensors"
            own = {
                name: np.ascontiguousarray(np.split(x, cards, axis=int(matrix == "w2"))[card])
                for name, x in experts.items()
                if f".{matrix}." in name
            }
            if path.name != left_out:
                save(path, own)


@pytest.mark.parametrize("cards", [1, 2, 8])
def test_pieces_of_grok_2_are_put_together(cards: int, tmp_path: Path) -> None:
    write_own("grok-2", tmp_path)
    _save_pieces(tmp_path, cards)
    with open_checkpoint(tmp_path) as model:
        found = {key: [list(x.shape), digest(values(x))] for key, x in model.tensors.items()}
        rows = model.tensors["blk.1.ffn_down_exps.weight"].read(33, 65)  # rows of the second and third expert
        whole = values(model.tensors["blk.1.ffn_down_exps.weight"]).reshape(-1, 24)
        np.testing.assert_array_equal(rows.view(np.float32), whole[33:65])
    assert found == read_expected()["grok-2"]["tensors"]


def test_a_piece_of_grok_2_that_is_missing(tmp_path: Path) -> None:
    write_own("grok-2", tmp_path)
    _save_pieces(tmp_path, 4, "pytorch_model-00001-TP-002.safetensors")
    check_refused(tmp_path, r"ffn_down_exps.weight: expected shape .*24.*18")


def test_pieces_that_do_not_fit(tmp_path: Path) -> None:
    write_own("grok-2", tmp_path)
    _save_pieces(tmp_path, 2)
    name = "model.layers.0.block_sparse_moe.experts.0.w2.weight"
    save(tmp_path / "pytorch_model-00008-TP-001.safetensors", {name: np.zeros((31, 12), np.float32)})
    check_refused(tmp_path, f"tensor '{name}' is in pytorch_model-00001-TP-001.safetensors too")
    (tmp_path / "pytorch_model-00008-TP-001.safetensors").rename(tmp_path / "pytorch_model-00008-TP-002.safetensors")
    check_refused(tmp_path, "they must be equally high to be one matrix")
    save(tmp_path / "pytorch_model-00008-TP-002.safetensors", {"model.norm.weight": np.zeros(32, np.float32)})
    check_refused(tmp_path, "tensor 'model.norm.weight' is in pytorch_model-00009-TP-common.safetensors too")


def test_pieces_of_other_tensors_are_refused(tmp_path: Path) -> None:
    write_own("grok-2", tmp_path)
    _save_pieces(tmp_path, 2)
    for card in range(2):
        path = tmp_path / f"pytorch_model-00008-TP-{card:03}.safetensors"
        save(path, {"model.layers.0.other.weight": np.zeros((4, 4), np.float32)})
    check_refused(tmp_path, "tensor 'model.layers.0.other.weight' is there in 2 pieces; only Grok's experts may be")


def test_the_tokenizer_of_grok_2_as_published(tmp_path: Path) -> None:
    write_own("grok-2", tmp_path)
    (tmp_path / "tokenizer.json").rename(tmp_path / "tokenizer.tok.json")
    check_refused(tmp_path, "holds tokenizer.tok.json, SGLang's own form of a tokenizer; put tokenizer.json, ")
