"""Tiny checkpoints of `hf_own` whose weights are quantized as published: DeepSeek 4, Kimi K3, and MiMo 2.

The quantized codes and scales are also seeded by the tensor names.
"""

from __future__ import annotations

import zlib

import numpy as np

from tests.localllm.convert.hf_own_shapes import EXPERTS, MLP, NORMS, TOP, Case, Tensors, below, experts, own
from tests.localllm.convert.hf_tokenizers import VOCABULARY
from tests.localllm.convert.weights import numbers

Stored = tuple[dict[str, np.ndarray], dict[str, str]]

# -- DeepSeek 4 as published: FP8 weights with block scales, MXFP4 experts, both with power-of-two scales ------------

_W123 = "(w1|w3) 96x64 w2 64x96"
_DEEPSEEK = (  # the converter ignores the router bias of the first layer
    "(attn|ffn)_norm 64 attn.attn_sink. 4 attn.wq_a 32x64 attn.q_norm 32 attn.wq_b 256x32 attn.wkv 64x64 "
    "attn.kv_norm 64 attn.wo_a 32x128 attn.wo_b 64x32 ffn.gate 4x64 ffn.gate.bias. 4 hc_(attn|ffn)_fn. 24x256 "
    "hc_(attn|ffn)_base. 24 hc_(attn|ffn)_scale. 3 " + below("ffn.shared_experts.", _W123)
    + experts("ffn.experts", _W123)
)  # fmt: skip


def _compressor(ratio: int, width: int) -> str:
    return f"compressor.(wkv|wgate) {width}x64 compressor.ape. {ratio}x{width} "


_POOLED = _DEEPSEEK + below("attn.", _compressor(4, 128) + "compressor.norm 64") + below(
    "attn.indexer.", _compressor(4, 64) + "compressor.norm 32 wq_b 512x32 weights_proj 16x64"
)  # fmt: skip
_HEAVY = _DEEPSEEK + below("attn.", _compressor(128, 64) + "compressor.norm 64")
_TABLE = np.stack([np.arange(VOCABULARY) % 4, np.arange(1, VOCABULARY + 1) % 4], axis=1).tolist()  # experts of tokens

# -- Kimi K3 as published: MXFP4 experts, packed by compressed-tensors -----------------------------------------------

_MOE = "block_sparse_moe."
_SPARSE = (
    below(_MOE, "gate 4x64 gate.e_score_correction_bias. 4 routed_expert_down_proj 32x64 routed_expert_norm 32 "
          "routed_expert_up_proj 64x32 shared_experts.(gate|up|down)_proj 64x64")
    + experts(f"{_MOE}experts", "(w1|w3) 64x32 w2 32x64")
)  # fmt: skip
_KIMI = (
    "(input|post_attention)_layernorm 64 (self_attention|mlp)_res_norm 64 (self_attention|mlp)_res_proj 1x64 "
    "self_attn.(g|o)_proj 64x64 "
)
_FULL = _KIMI + below("self_attn.", "q_a_proj 24x64 q_a_layernorm 24 q_b_proj 96x24 kv_a_proj_with_mqa 40x64 "
                      "kv_a_layernorm 32 kv_b_proj 128x32")  # fmt: skip
_LINEAR = _KIMI + below("self_attn.", "(q|k|v)_proj 64x64 (q|k|v)_conv1d 64x1x4 A_log. 4 dt_bias. 64 f_a_proj 16x64 "
                        "f_b_proj 64x16 b_proj 4x64 o_norm 16")  # fmt: skip
_KIMI_TEXT = own(
    "KimiK3ForConditionalGeneration", _LINEAR + _SPARSE,
    TOP.replace("32", "64") + "model.output_attn_res_norm 64 model.output_attn_res_proj 1x64",
    others={0: _LINEAR + below("mlp.", "(gate|up)_proj 96x64 down_proj 64x96"), 2: _FULL + _SPARSE, 4: _FULL + _SPARSE},
    model_type="kimi_linear", **EXPERTS, hidden_size=64, num_hidden_layers=5, num_key_value_heads=4, head_dim=16,
    hidden_act="situ", activation_situ_beta=7.0, activation_situ_linear_beta=8.0, intermediate_size=96,
    attn_res_block_size=2, first_k_dense_replace=1, kv_lora_rank=32, q_lora_rank=24, qk_nope_head_dim=16,
    qk_rope_head_dim=8, v_head_dim=16, mla_use_nope=True, rope_theta=10000.0, num_experts_per_token=2,
    num_shared_experts=1, moe_intermediate_size=64, moe_renormalize=True, moe_router_activation_func="sigmoid",
    routed_scaling_factor=2.5, routed_expert_hidden_size=32, topk_group=1, num_expert_group=1,
    linear_attn_config={
        "full_attn_layers": [3, 5], "kda_layers": [1, 2, 4], "head_dim": 16, "num_heads": 4,
        "short_conv_kernel_size": 4, "gate_lower_bound": -5.0,
    },
    quantization_config={
        "quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
            "num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True}}},
    },
)  # fmt: skip

# -- MiMo 2 as published: FP8 with the rows of one GPU's shard, which are not a multiple of the block size -----------

_CARDS, _ROWS = 4, 1200  # 8 heads of 84 queries, 4 of 84 keys and 48 values
_MIMO = NORMS + f"self_attn.qkv_proj {_ROWS}x32 self_attn.o_proj 32x384 "

QUANTIZED: dict[str, Case] = {
    "deepseek4-fp4": own(
        "DeepseekV4ForCausalLM", _POOLED,
        "embed Vx64 norm 64 head Vx64 hc_head_fn. 4x256 hc_head_base. 4 hc_head_scale. 1 mtp.0.norm 64", "deepseek-v3",
        prefix="layers.{}.", others={0: _DEEPSEEK, 2: _HEAVY}, model_type="deepseek_v4", hidden_size=64,
        intermediate_size=None, num_experts_per_tok=2, num_hidden_layers=4, num_key_value_heads=1, head_dim=64,
        qk_rope_head_dim=16, q_lora_rank=32, o_groups=2, o_lora_rank=16, moe_intermediate_size=96, n_routed_experts=4,
        n_shared_experts=1, norm_topk_prob=True, routed_scaling_factor=1.5, scoring_func="sqrtsoftplus",
        topk_method="noaux_tc", swiglu_limit=10.0, sliding_window=8, index_n_heads=16, index_head_dim=32, index_topk=3,
        hc_mult=4, hc_sinkhorn_iters=20, hc_eps=1e-6, num_hash_layers=1, compress_ratios=[0, 4, 128, 4, 0],
        compress_rope_theta=160000, rope_theta=10000, num_nextn_predict_layers=1, expert_dtype="fp4",
        attention_bias=False,
        rope_scaling={"type": "yarn", "factor": 16, "original_max_position_embeddings": 64, "beta_fast": 32,
            "beta_slow": 1},
        quantization_config={"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0",
            "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    ),
    "kimi-k3": Case(
        {"architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3",
         "vision_config": {"hidden_size": 16},
         "text_config": {key: x for key, x in _KIMI_TEXT.config.items() if key != "architectures"}},
        [(f"language_model.{name}", *rest) for name, *rest in _KIMI_TEXT.tensors]
        + [("vision_tower.x.weight", [16, 16], 0.0)],
        "qwen2",
    ),
    "mimo2-cards": own(
        "MiMoV2ForCausalLM",
        _MIMO + "self_attn.attention_sink_bias. 8 mlp.gate 4x32 mlp.gate.e_score_correction_bias. 4 "
        + experts("mlp.experts", MLP),
        TOP + "visual.patch_embed.proj 4 speech_embeddings.0 4x4", others={0: _MIMO + below("mlp.", MLP)},
        model_type="mimo_v2", num_attention_heads=8, num_key_value_heads=4, head_dim=84, v_head_dim=48,
        swa_num_attention_heads=8, swa_num_key_value_heads=4, swa_head_dim=84, swa_v_head_dim=48, sliding_window=8,
        hybrid_layer_pattern=[0, 1], swa_rope_theta=10000, partial_rotary_factor=0.334, layernorm_epsilon=1e-5,
        rms_norm_eps=None, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, norm_topk_prob=True,
        topk_method="noaux_tc", scoring_func="sigmoid", n_group=1, topk_group=1, attention_value_scale=0.612,
        quantization_config={"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
    ),
}  # fmt: skip
QUANTIZED["deepseek4-fp4"].tensors.append(("layers.0.ffn.gate.tid2eid", [VOCABULARY, 2], _TABLE))


def quantized(name: str, tensors: Tensors) -> Stored:
    """Return the stored tensors of a checkpoint, and the types that numpy's dtypes cannot express."""
    found, types = {}, {}
    noise = np.random.RandomState(9)
    for key, shape, base in tensors:
        random = np.random.RandomState(zlib.crc32(key.encode()))
        scale = key.removesuffix("weight") + "scale"
        if ".experts." in key and name != "mimo2-cards":  # FP4, two codes a byte, scales of 32: up to 6 * 2^-5
            codes = random.randint(0, 256, (shape[0], shape[1] // 2), np.uint8)
            scales = random.randint(119, 123, (shape[0], shape[1] // 32), np.uint8)
            if name == "kimi-k3":
                found |= {f"{key}_packed": codes, f"{key}_scale": scales}
            else:
                found |= {key: codes.view(np.int8), scale: scales}
                types |= {key: "I8", scale: "F8_E8M0"}
        elif name == "deepseek4-fp4" and key.endswith(_FP8):  # scales of 128 x 128; values reach 30 * 2^-6
            signs = random.randint(0, 2, shape, np.uint8) << 7
            found[key] = random.randint(0, 0x60, shape, np.uint8) | signs
            found[scale] = random.randint(119, 122, [-(-n // 128) for n in shape], np.uint8)
            types |= {key: "F8_E4M3", scale: "F8_E8M0"}
        elif name == "mimo2-cards" and key.endswith("qkv_proj.weight"):
            found[key] = (noise.randint(0, 0x7C, shape) | noise.choice([0, 128], shape)).astype(np.uint8)
            blocks = _CARDS * -(-_ROWS // _CARDS // 128)
            found[f"{key}_scale_inv"] = noise.uniform(5e-4, 2e-3, (blocks, 1)).astype(np.float32)
            types[key] = "F8_E4M3"
        else:
            found[key] = numbers(key, shape, base)
    return found, types


_FP8 = tuple([f".{x}.weight" for x in ("wq_a", "wq_b", "attn.wkv", "wo_a", "wo_b", "w1", "w2", "w3")])
