"""Models with custom code give the results of that code. Settings that GGUF cannot express are refused.

`test_own` compares their GGUF with llama.cpp's converter.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localllm.convert import ConvertError, open_checkpoint
from localllm.convert.hf_config import HfConfig
from localllm.convert.recipes.small import BAICHUAN_2
from localllm.convert.recipes.table import RECIPES
from localllm.convert.tensor import array_tensor
from tests.localllm.convert.hf_own import OWN, write_own
from tests.localllm.convert.hf_synthetic import numbers, read_specs, write_folder
from tests.localllm.convert.support import save, values

STEP = "step35-program"
# `test_own` covers the accepted settings
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "baichuan depth": ("baichuan", {"num_hidden_layers": 30}, "num_hidden_layers is 30; the GGUF architecture has 32"),
    "xverse heads": ("xverse", {"num_key_value_heads": 2}, "num_key_value_heads is 2 of 4 heads"),
    "chatglm norms": ("chatglm", {"rmsnorm": False}, "rmsnorm is False; the GGUF architecture"),
    "chatglm biases": ("chatglm", {"add_bias_linear": True}, "add_bias_linear is True; the GGUF architecture"),
    "chatglm order": ("chatglm", {"apply_residual_connection_post_layernorm": True}, "post_layernorm is True; the "),
    "chatglm heads": ("chatglm", {"kv_channels": 16}, "4 heads of 16 are not 32 together, which the GGUF architecture"),
    "chatglm no sizes": ("chatglm", {"seq_length": None}, "max_position_embeddings is missing; expected a whole"),
    "codeshell positions": ("codeshell", {"position_embedding_type": "alibi"}, "position_embedding_type is alibi"),
    "exaone activation": ("exaone", {"activation_function": "gelu"}, "hidden_act is gelu; expected silu"),
    "jais positions": ("jais", {"position_embedding_type": "learned"}, "position_embedding_type is learned; the GGUF"),
    "jais scores": ("jais", {"mup_scale_qk_dot_by_d": False}, "mup_scale_qk_dot_by_d is False; the GGUF architecture"),
    "jais no scale": ("jais", {"mup_width_scale": None}, "width_scale is missing; expected a number"),
    "minicpm experts": ("minicpm", {"num_experts": 8}, "num_experts is 8; the GGUF architecture"),
    "minicpm scale": ("minicpm", {"dim_model_base": 0}, "dim_model_base is 0.0; expected a number other than 0"),
    "openelm heads": ("openelm", {"num_query_heads": [4]}, r"num_query_heads is \[4\]; expected 2 numbers from 1 up"),
    "openelm widths": ("openelm", {"ffn_multipliers": 0.5}, "ffn_multipliers is 0.5; expected 2 positive numbers"),
    "plm queries": ("plm", {"q_lora_rank": 8}, "q_lora_rank is 8; the GGUF architecture"),
    "qwen share": ("qwen", {"rotary_pct": 0.5}, "rotary_pct is 0.5; the GGUF architecture"),
    "refact heads": ("refact", {"multi_query": False}, "multi_query is False; the GGUF architecture"),
    "arctic": ("arctic", {"parallel_attn_mlp_res": None}, "parallel_attn_mlp_res is False; the GGUF architecture"),
    "deepseek scores": ("deepseek", {"norm_topk_prob": True}, "norm_topk_prob is True; the GGUF architecture"),
    "ling dense": ("bailingmoe", {"first_k_dense_replace": 1}, "first_k_dense_replace is 1; the GGUF architecture"),
    "ling norms": ("bailingmoe2", {"use_rmsnorm": False}, "use_rmsnorm is False; the GGUF architecture"),
    "ling scores": ("bailingmoe2", {"score_function": "tanh"}, "score_function is tanh; expected softmax or sigmoid"),
    "maple": ("maple", {"nope_on_global_attention": None}, "nope_on_global_attention is False; the GGUF architecture"),
    "smallthinker windows": ("smallthinker", {"sliding_window_layout": [1] * 5}, "sliding_window_layout is not every"),
    "smallthinker rotation": ("smallthinker", {"rope_layout": [1] * 5}, "rope_layout is not sliding_window_layout"),
    "smallthinker layout": ("smallthinker", {"rope_layout": [2] * 5}, r"rope_layout is \[2, 2, .*expected 0 or 1, 5"),
    "jina positions": ("jina-bert-v2", {"position_embedding_type": None}, "position_embedding_type is absolute; the"),
    "jina units": ("jina-bert-v2", {"feed_forward_type": "reglu"}, "feed_forward_type is reglu; the GGUF architecture"),
    "deci no attention": (
        "deci-blocks",
        {"block_configs": [{"attention": {"n_heads_in_group": n}, "ffn": {"ffn_mult": 2.0}} for n in (2, None)]},
        "block_configs is a layer without attention; expected attention in all layers",
    ),
    "deci no feed-forward": (
        "deci-blocks",
        {"block_configs": [{"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": x}} for x in (2.0, None)]},
        "block_configs is ffn_mult None; expected a feed-forward in all layers",
    ),
    "deci blocks": ("deci-blocks", {"block_configs": [{}]}, "block_configs is something else; expected attention of 2"),
    "deci heads": ("deci", {"num_key_value_heads_per_layer": [2]}, r"per_layer is \[2\]; expected 2 numbers of heads"),
    "plamo2": ("plamo2", {"mamba_enabled": False}, "mamba_enabled is False; the GGUF architecture"),
    "plamo3 scaled": ("plamo3", {"rope_scaling_factor": 4}, "rope_scaling_factor is 4; the GGUF architecture"),
    "spark gate": ("spark2_5", {"gate_attn_act_mode": None}, "gate_attn_act_mode is ; the GGUF architecture"),
    "spark heads": ("spark2_5", {"headwise_attn_output_gate": False}, "headwise_attn_output_gate is False; the GGUF"),
    "step shares": (STEP, {"partial_rotary_factors": [0.5] * 3}, "rotated share of heads is not 1 with slid"),
    "step bases": (STEP, {"rope_theta": [5e6, 1e4, 1e5]}, r"rope_theta is \[10000.0, 100000.0\]; expected one"),
    "step kinds": (STEP, {"layer_types": ["full_attention"]}, "layer_types is .*; expected full_attention or"),
    "step limits": (STEP, {"swiglu_limits": [7.0]}, r"swiglu_limits is \[7.0\]; expected 3 numbers"),
    "step dense": (STEP, {"moe_layers_enum": "0,2"}, r"moe_layers_enum is \[0, 2\]; expected all layers from"),
    "step experts": (STEP, {"moe_layers_enum": "1,x"}, "moe_layers_enum is 1,x; expected numbers of layers"),
    "step gates": (STEP, {"use_head_wise_attn_gate": False}, "use_head_wise_attn_gate is False; the GGUF"),
    "step scores": (STEP, {"query_pre_attn_scalar": 4}, "query_pre_attn_scalar is 4; the GGUF architecture"),
}  # fmt: skip


def written(name: str) -> dict[str, np.ndarray]:
    return {tensor: numbers(tensor, shape, base) for tensor, shape, base in OWN[name][1]}


@pytest.mark.parametrize("vocabulary", [BAICHUAN_2, BAICHUAN_2 + 1])
def test_the_output_of_baichuan_2_has_rows_of_length_one(vocabulary: int, tmp_path: Path) -> None:
    """The rows of Baichuan 2's output matrix are normalized to unit length, as in the publisher's NormHead and in vLLM.

    Baichuan 1's output matrix is unchanged.
    """
    table = np.array([[3.0, 4.0], [0.0, 0.0], [-0.5, 0.0]], np.float32)
    config = HfConfig(tmp_path, {"vocab_size": vocabulary}, {})
    found = values(RECIPES["baichuan"].changes["output"]([array_tensor("lm_head.weight", table)], config))
    unit = np.array([[0.6, 0.8], [0.0, 0.0], [-1.0, 0.0]], np.float32)
    np.testing.assert_allclose(found, unit if vocabulary == BAICHUAN_2 else table, rtol=1e-6)


@pytest.mark.parametrize("name", ["bailingmoe", "bailingmoe2"])
def test_the_output_of_ling_with_norm_head_has_columns_of_length_one(name: str, tmp_path: Path) -> None:
    write_own(name, tmp_path, norm_head=True)
    with open_checkpoint(tmp_path) as model:
        found = values(model.tensors["output.weight"])
    table = written(name)["lm_head.weight"]
    np.testing.assert_allclose(found, table / (np.linalg.norm(table, axis=0) + 1e-7), rtol=1e-5)


@pytest.mark.parametrize("slides", [[0, 1, 1, 1, 0], [0] * 5])
def test_windows_of_smallthinker(slides: list[int], tmp_path: Path) -> None:
    write_own("smallthinker", tmp_path, sliding_window_layout=slides, rope_layout=slides if any(slides) else [1] * 5)
    with open_checkpoint(tmp_path) as model:
        found = model.metadata.get("smallthinker.attention.sliding_window_pattern")
        assert (None if found is None else np.asarray(found).tolist()) == (
            [*map(bool, slides)] if any(slides) else None
        )


def test_slopes_that_jais_computes_are_left_out(tmp_path: Path) -> None:
    write_own("jais", tmp_path)
    save(tmp_path / "model.safetensors", {**written("jais"), "transformer.relative_pe.slopes": np.ones(4, np.float32)})
    with open_checkpoint(tmp_path) as model:
        assert model.metadata["jais.attention.max_alibi_bias"] == 8.0


MUSE: dict[str, tuple[dict[str, Any], str]] = {
    "norms": ({"post_norm_eps": 1e-6}, "post_norm_eps is 1e-06; the GGUF architecture"),
    "rotated everywhere": ({"layer_rope_theta": [1e4] * 5}, "layer_rope_theta is not 0 in layers that see everything"),
    "two bases": (
        {"layer_rope_theta": [0, 1e4, 1e5, 1e4, 0]},
        "layer_rope_theta is not 0 in layers that see everything",
    ),
}


@pytest.mark.parametrize("case", MUSE)
def test_what_gguf_cannot_say_of_muse_glimmer(case: str, tmp_path: Path) -> None:
    config, message = MUSE[case]
    spec = read_specs()["muse-glimmer"]
    write_folder(
        {**spec, "config": {**spec["config"], "text_config": {**spec["config"]["text_config"], **config}}}, tmp_path
    )
    with pytest.raises(ConvertError, match=message) as error:
        open_checkpoint(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("full", "length"), [([], 100), ([1], 256)])
def test_the_context_of_plamo_2_ends_with_its_window(full: list[int], length: int, tmp_path: Path) -> None:
    """If some layers of PLaMo 2 use sliding-window attention, the context length is the window, because GGUF cannot
    express the window.
    """
    write_own("plamo2", tmp_path, attention_window_size=100, full_attention_idx=full)
    with open_checkpoint(tmp_path) as model:
        assert model.metadata["plamo2.context_length"] == length


BAD_PLAMO = {
    "no json": (["[", "line 1 is not a token with its score and kind"], 0),
    "a number": (["[1, 2]", "line 3 is not a token with its score and kind"], 2),
    "no score": (['["a"]', "line 3 is not a token with its score and kind"], 2),
    "infinite": (['["a", Infinity]', "line 3 is not a token with its score and kind"], 2),
    "few": (["", "holds 4 tokens, and the embedding has 320 rows"], 4),
}


@pytest.mark.parametrize("case", BAD_PLAMO)
def test_a_damaged_vocabulary_of_plamo_is_one_line(case: str, tmp_path: Path) -> None:
    (line, message), at = BAD_PLAMO[case]
    write_own("plamo3", tmp_path)
    path = tmp_path / "tokenizer.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:at], line, *lines[at + 1 :]] if line else lines[:at]))
    with pytest.raises(ConvertError, match=message) as error:
        open_checkpoint(tmp_path)
    assert "\n" not in str(error.value)
    path.write_bytes(b"\xff")
    with pytest.raises(ConvertError, match=r"jsonl: cannot be read"):
        open_checkpoint(tmp_path)
