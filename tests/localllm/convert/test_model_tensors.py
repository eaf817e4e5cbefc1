"""Tensors of single models: their changes, and the errors if they do not fit."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from localllm.convert import open_checkpoint
from tests.localllm.convert import hf_settings
from tests.localllm.convert.checkpoints import SPECS, check_logits, tensors_of, with_tensors, write
from tests.localllm.convert.support import check_refused, edit_tensors, save, save_zeros, values
from tests.localllm.convert.weights import numbers

ACT, GAIN = "model.layers.1.mlp.act_fn.eps", "lm_head_gain.w_g"
FC1, QKV = "talker.text_projection.linear_fc1.bias", "model.layers.1.self_attn.qkv_proj.weight"
NORM, EXPERT = "model.layers.1.input_layernorm.weight", "model.layers.0.block_sparse_moe.experts."
POCKET, EMBED = "flow_lm.transformer.layers.", "flow_lm.conditioner.embed.weight"


def _ones(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


# Model, tensors that are replaced (removed if None), and the message.
BAD: list[tuple[str, dict[str, np.ndarray | None], str]] = [
    ("apertus", {ACT: None}, f"tensor '{ACT}' is missing"),
    ("apertus", {ACT: np.zeros(2, np.float32)}, r"act_fn.eps: is F32 \(2,\); expected one number"),
    ("apertus", {ACT: np.zeros(1, np.int32)}, r"act_fn.eps: is I32 \(1,\); expected one number"),
    ("mixtral", {NORM: None}, r"blk.1.attn_norm.weight: this tensor is missing.*model.layers.1.input_layer"),
    ("mixtral", {"model.embed_tokens.weight": None}, "the tensor of token embeddings is missing"),
    ("mixtral", {NORM: _ones(2, 16)}, r"blk.1.attn_norm.weight: expected shape \(32\).* found \(2, 16\)"),
    ("mixtral", {f"{EXPERT}2.w1.weight": None}, f"tensor '{EXPERT}2.w1.weight' is missing"),
    ("mixtral", {f"{EXPERT}3.w2.weight": None}, r"blk.0.ffn_down_exps.weight: expected shape \(4, 32, 64\)"),
    (
        "mixtral",
        {f"{EXPERT}2.w1.weight": _ones(32, 64)},
        "they must be of the same shape and format to form one tensor",
    ),
    ("mixtral", {"model.layers.1.odd": _ones(32)}, "'model.layers.1.odd' cannot be stored in GGUF"),
    ("mixtral", {"model.layers.1.mlp.gate_proj.weight": _ones(32)}, "gate_proj.weight' cannot be stored in GGUF"),
    ("mixtral", {"odd.1.self_attn.q_proj.weight": _ones(32)}, "'odd.1.self_attn.q_proj.weight' cannot be stored"),
    ("mixtral", {NORM: np.ones(32, np.int16)}, "attn_norm.weight: is stored as I16; supported"),
    ("mixtral", {NORM: np.ones(32, np.int8)}, "is in FP8, but its scale .* is missing"),
    ("distilbert", {"lm_head.weight": _ones(320, 32)}, "'lm_head.weight' cannot be stored in GGUF files of bert"),
    (
        "stablelm",
        {f"model.layers.{n}.post_attention_layernorm.{x}": None for n in range(3) for x in ("weight", "bias")},
        "use_parallel_residual is False, but",
    ),
    ("pockettts", {EMBED: None}, r"conditioner\.embed\.weight' is missing or not a matrix"),
    ("pockettts", {EMBED: _ones(320, 100)}, "is 100 wide; expected heads of 64"),
    ("pockettts", {f"{POCKET}0.linear1.weight": _ones(192)}, r"linear1\.weight' is missing or not a matrix"),
    ("pockettts", {f"{POCKET}1.linear2.weight": None}, r"made of flow_lm\..*layers\.1\.linear2"),
    ("pockettts", {"flow_lm.bos_emb": _ones(7)}, r"input_linear\.weight: is \(128, 8\); expected \(128, 7\)"),
    ("pockettts", {"flow_lm.x.weight": _ones(4)}, r"'flow_lm\.x\.weight' cannot be stored in GGUF files of pocket"),
    ("qwen3tts", {FC1: np.zeros(23, np.float32)}, r"linear_fc1.bias: is \(23,\); expected \(24,\), as config.json"),
    ("qwen3tts", {FC1: None}, r"'text_projection.linear_fc1.bias' is missing"),
    ("t5", {"encoder.embed_tokens.weight": _ones(320, 32)}, "are both token_embd.weight"),
    ("t5", {"lm_head.weight": _ones(320, 32)}, "lm_head.weight is not the embedding"),
    ("t5", {"shared.weight": None}, "the tensor of token embeddings is missing"),
    ("t5", {"extra.block.0.weight": _ones(32)}, "cannot be stored in GGUF files of t5"),
    ("talkie", {GAIN: None}, f"tensor '{GAIN}' is missing"),
    ("talkie", {GAIN: _ones(2)}, r"lm_head_gain.w_g: is F32 \(2,\); expected one"),
]


@pytest.mark.parametrize(("name", "changes", "message"), BAD)
def test_tensors_that_do_not_fit(
    name: str, changes: dict[str, np.ndarray | None], message: str, tmp_path: Path
) -> None:
    check_refused(write(name, tmp_path, with_tensors(name, changes)), message)


# -- sizes that config.json leaves out ---------------------------------------------------------------------------------


def test_what_config_json_of_gemma3_may_leave_out(tmp_path: Path) -> None:
    """transformers' Gemma 3 defaults (8 query heads and 4 KV heads of size 256) apply, because published checkpoints
    omit these keys.
    """
    left_out = (
        "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings",
        "rope_parameters", "sliding_window", "query_pre_attn_scalar", "hidden_activation",
    )  # fmt: skip
    sizes = {"q_proj": [2048, 32], "k_proj": [1024, 32], "v_proj": [1024, 32], "o_proj": [32, 2048]}
    sizes |= {"q_norm": [256], "k_norm": [256]}
    write("gemma3", tmp_path, **dict.fromkeys(left_out))
    shapes = {name: sizes.get(name.split(".")[-2], shape) for name, shape, _ in SPECS["gemma3"]["tensors"]}
    save_zeros(tmp_path / "model.safetensors", shapes)
    with open_checkpoint(tmp_path) as model:
        keys = {key.removeprefix("gemma3."): value for key, value in model.metadata.items()}
    expected = {
        "attention.head_count": 8, "attention.head_count_kv": 4, "attention.key_length": 256,
        "attention.layer_norm_rms_epsilon": 1e-6, "context_length": 131072, "attention.sliding_window": 4096,
        "rope.freq_base": 1e6, "rope.freq_base_swa": 1e4,
    }  # fmt: skip
    assert {key: keys[key] for key in expected} == expected


@pytest.mark.parametrize(("scale", "fits"), [(8, True), (16, False)])
def test_scores_of_gemma2_27b_are_of_the_width(scale: int, fits: bool, tmp_path: Path) -> None:
    """A Gemma 2 of 46 layers scales its scores by the width per head, other Gemmas by the head size."""
    write("gemma2", tmp_path, num_hidden_layers=46, query_pre_attn_scalar=scale, layer_types=None)
    shapes = {name.replace(".1.", f".{i}."): x for name, x, _ in SPECS["gemma2"]["tensors"] for i in range(46)}
    save_zeros(tmp_path / "model.safetensors", shapes)
    if fits:
        open_checkpoint(tmp_path).close()
    else:
        check_refused(tmp_path, "query_pre_attn_scalar is 16; the GGUF architecture requires 8")


@pytest.mark.parametrize(("name", "ranks"), [
    ("rwkv6", {"time_decay_extra_dim": 128, "time_mix_extra_dim": 64}),
    ("rwkv7", {"attention.decay_lora_rank": 128, "attention.iclr_lora_rank": 128,
               "attention.value_residual_mix_lora_rank": 96, "attention.gate_lora_rank": 480}),
])  # fmt: skip
def test_ranks_of_a_large_rwkv_follow_from_its_width(name: str, ranks: dict[str, int], tmp_path: Path) -> None:
    """If config.json omits the ranks, they follow from the hidden size, as in the publisher's code."""
    left_out = dict.fromkeys(f"{x}_low_rank_dim" for x in ("decay", "a", "v", "gate"))
    write(name, tmp_path, hidden_size=4096, num_hidden_layers=1, **left_out)
    sizes = {"w_lora": 128, "a_lora": 128, "v_lora": 96, "g_lora": 480, "decay_w": 128, "maa_w": 64}
    shapes = {}
    for key, shape, _ in SPECS[name]["tensors"]:
        rank = next((size for part, size in sizes.items() if part in key), 0)
        small = {32: rank, 64: rank, 16: rank, 24: rank, 160: 5 * rank} if rank else {2: 64}
        shapes[key] = [4096 if n == 128 else small.get(n, n) for n in shape]
    save_zeros(tmp_path / "model.safetensors", {key: x for key, x in shapes.items() if not any(
        f"{part}.{n}." in key for part in ("layers", "blocks") for n in (1, 2))})  # fmt: skip
    with open_checkpoint(tmp_path) as model:
        assert {key: model.metadata[f"{name}.{key}"] for key in ranks} == ranks


# -- output matrices ---------------------------------------------------------------------------------------------------


def test_the_output_of_baichuan_2_has_rows_of_length_one(tmp_path: Path) -> None:
    """The rows of Baichuan 2's output matrix are normalized to unit length, as in the publisher's NormHead and in vLLM.

    Its vocabulary tells it from Baichuan 1, whose matrix is unchanged.
    """
    table = np.zeros((125696, 16), np.float32)
    table[1, :2], table[3, 0] = (3.0, 4.0), -0.5
    tensors = {**tensors_of("baichuan"), "lm_head.weight": table, "model.embed_tokens.weight": table}
    with open_checkpoint(write("baichuan", tmp_path, tensors, vocab_size=len(table))) as model:
        found = values(model.tensors["output.weight"])
    table[1, :2], table[3, 0] = (0.6, 0.8), -1.0
    np.testing.assert_allclose(found, table, rtol=1e-6)


@pytest.mark.parametrize("name", ["bailingmoe", "bailingmoe2"])
def test_the_output_of_ling_with_norm_head_has_columns_of_length_one(name: str, tmp_path: Path) -> None:
    with open_checkpoint(write(name, tmp_path, norm_head=True)) as model:
        found = values(model.tensors["output.weight"])
    table = tensors_of(name)["lm_head.weight"]
    np.testing.assert_allclose(found, table / (np.linalg.norm(table, axis=0) + 1e-7), rtol=1e-5)


def test_special_tokens_without_an_embedding_are_never_chosen(tmp_path: Path) -> None:
    """Special tokens with an all-zero embedding are suppressed. MiniMax M1 has such untrained tokens."""
    key, tensors = "tokenizer.ggml.suppress_tokens", tensors_of("minimax-01")
    write("minimax-01", tmp_path)
    (tmp_path / "generation_config.json").write_text('{"suppress_tokens": [5]}')
    with open_checkpoint(tmp_path) as model:
        assert model.metadata[key].tolist() == [5]
        types = np.array(model.metadata["tokenizer.ggml.token_type"])
    special, word = np.flatnonzero(types == 3)[-1], np.flatnonzero(types == 1)[-1]
    tensors["model.embed_tokens.weight"][[special, word]] = 0
    save(tmp_path / "model.safetensors", tensors)
    with open_checkpoint(tmp_path) as model:
        assert model.metadata[key].tolist() == sorted([5, special])


# -- rows of attention -------------------------------------------------------------------------------------------------


def test_a_glm4v_without_sections_keeps_the_order_of_its_rows(tmp_path: Path) -> None:
    """Without M-RoPE sections the GGUF is a plain GLM 4, and K rows keep their order.

    Text logits are equal, because all sections use the same position.
    """
    name, key = "Glm4vForConditionalGeneration", "model.language_model.layers.1.self_attn.k_proj.weight"
    with open_checkpoint(write(name, tmp_path, **{"rope_parameters.mrope_section": None})) as model:
        assert "glm4.rope.dimension_sections" not in model.metadata
        assert_array_equal(values(model.tensors["blk.1.attn_k.weight"]), numbers(key, [16, 32], 0.0))
        check_logits(name, model)


def test_the_norm_of_falcon_h1_has_the_name_of_its_files(tmp_path: Path) -> None:
    with open_checkpoint(write("falcon-h1", tmp_path)) as model:
        assert "blk.0.ffn_norm" in model.tensors


def test_mimo_without_fp8_has_its_rows_in_order(tmp_path: Path) -> None:
    tensors = tensors_of("mimo2-cards")
    with open_checkpoint(write("mimo2-cards", tmp_path, tensors, quantization_config=None)) as model:
        assert_array_equal(values(model.tensors["blk.1.attn_qkv.weight"]), tensors[QKV])


def test_scales_of_mimo_for_another_number_of_cards(tmp_path: Path) -> None:
    write("mimo2-cards", tmp_path)

    def cut(header: dict[str, Any]) -> None:
        scales = header[f"{QKV}_scale_inv"]
        start, end = scales["data_offsets"]
        scales |= {"shape": [6, 1], "data_offsets": [start, end - 24]}
        header["unread"] = {"dtype": "F32", "shape": [6], "data_offsets": [end - 24, end]}

    edit_tensors(tmp_path / "model.safetensors", cut)
    check_refused(tmp_path, r"qkv_proj.weight' \(1200, 32\) with scales \(6, 1\) is not in shares of 4 or 8 cards")


def test_two_dense_layers_behind_lfm2(tmp_path: Path) -> None:
    """GGUF supports one dense layer after LFM2, so a second is refused."""
    path = write("lfm2-colbert", tmp_path) / "modules.json"
    path.write_text(path.read_text().replace("]", ', {"path": "1_Dense", "type": "pylate.models.Dense.Dense"}]'))
    check_refused(tmp_path, "holds 2 dense layers after the model; files of this architecture have one")


# -- YaRN between two pairs -------------------------------------------------------------------------------------------

YARN = {**hf_settings.YARN, "truncate": False}


def blended(n_rot: int, rope: dict[str, Any]) -> list[float]:
    """Return YaRN frequencies by transformers' definition, without truncating the correction range."""
    base, factor, length = rope["rope_theta"], rope["factor"], rope["original_max_position_embeddings"]
    ends = [n_rot * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base)) for turns in (32, 1)]
    low, high = max(ends[0], 0), min(ends[1], n_rot - 1)
    found = []
    for pair in range(n_rot // 2):
        plain = base ** (-2 * pair / n_rot)
        ramp = min(max((pair - low) / (high - low), 0), 1)
        found.append(plain / factor * ramp + plain * (1 - ramp))
    return found


def test_yarn_that_does_not_truncate_is_written_as_factors(tmp_path: Path) -> None:
    with open_checkpoint(write("llama", tmp_path, rope_parameters=YARN)) as model:
        assert model.notes == ()
        factors = values(model.tensors["rope_freqs.weight"])
    frequencies = 10000.0 ** (-np.arange(0, 8, 2) / 8) / factors
    np.testing.assert_allclose(frequencies, blended(8, YARN), rtol=1e-6)


def test_yarn_that_does_not_truncate_is_a_note_where_it_hardly_matters(tmp_path: Path) -> None:
    """The published GPT-OSS differs by only 0.0002 radians per position."""
    with open_checkpoint(write("gpt-oss", tmp_path, rope_parameters={**YARN, "factor": 1.003})) as model:
        [note] = model.notes
        assert note.startswith("GGUF files cannot store rope truncate false: angles differ by up to 0.000")


# -- Pocket TTS, which has no config.json -----------------------------------------------------------------------------


def test_a_pocket_tts_without_a_row_that_begins_a_voice(tmp_path: Path) -> None:
    with open_checkpoint(write("pockettts", tmp_path)) as model:
        tokens, table = model.metadata["tokenizer.ggml.tokens"], values(model.tensors["token_embd.weight"])
    tensors = tensors_of("pockettts")
    assert_array_equal(table[320], tensors.pop("flow_lm.bos_before_voice")[0, 0])
    save(tmp_path / "model.safetensors", tensors)
    with open_checkpoint(tmp_path) as model:
        assert model.metadata["tokenizer.ggml.tokens"] == [text for text in tokens if text != "<|bos_before_voice|>"]
        found = model.tensors["token_embd.weight"]
        assert_array_equal(values(found), np.delete(table, 320, axis=0))
        assert_array_equal(found.read(319, 321), found.read(0, 321)[319:])


def test_config_json_counts_before_the_tensors_of_pocket_tts(tmp_path: Path) -> None:
    write("pockettts", tmp_path, with_tensors("pockettts", {"flow_lm.bos_emb": None}))
    check_refused(tmp_path, r"no config\.json; give a model folder")
    (tmp_path / "model.safetensors").unlink()
    check_refused(tmp_path, r"no config\.json; give a model folder")
    (write("pockettts", tmp_path) / "config.json").write_text('{"architectures": ["X"]}')
    check_refused(tmp_path, "class 'X' cannot be converted")
