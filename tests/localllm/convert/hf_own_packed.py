"""Tiny checkpoints for `hf_own` whose weights are quantized as published: DeepSeek 4, Kimi K3, and Grove MoE.

The quantized codes and scales are also seeded by the tensor names.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

from tests.localllm.convert.hf_synthetic import numbers
from tests.localllm.convert.hf_tokenizers import VOCABULARY

WIDTH, HEADS, EXPERTS = 64, 4, 4
Tensors = list[list[Any]]
_COMMON = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_attention_heads": HEADS, "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False,
    "num_experts_per_tok": 2,
}  # fmt: skip

# -- DeepSeek 4 as published: FP8 weights with block scales, MXFP4 experts, both with power-of-two scales ------------

_DEEPSEEK = {
    **_COMMON, "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "num_hidden_layers": 4,
    "num_key_value_heads": 1, "head_dim": 64, "qk_rope_head_dim": 16, "q_lora_rank": 32, "o_groups": 2,
    "o_lora_rank": 16, "moe_intermediate_size": 96, "n_routed_experts": EXPERTS, "n_shared_experts": 1,
    "norm_topk_prob": True, "routed_scaling_factor": 1.5, "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc",
    "hidden_act": "silu", "swiglu_limit": 10.0, "sliding_window": 8, "index_n_heads": 16, "index_head_dim": 32,
    "index_topk": 3, "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "num_hash_layers": 1,
    "compress_ratios": [0, 4, 128, 4, 0], "compress_rope_theta": 160000, "rope_theta": 10000,
    "num_nextn_predict_layers": 1, "expert_dtype": "fp4", "attention_bias": False,
    "rope_scaling": {
        "type": "yarn", "factor": 16, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1,
    },
    "quantization_config": {
        "quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    },
}  # fmt: skip


def _deepseek() -> Tensors:
    rank, size, index, wide = 32, 64, 32, 96
    found: dict[str, list[int]] = {
        "embed.weight": [VOCABULARY, WIDTH], "norm.weight": [WIDTH], "head.weight": [VOCABULARY, WIDTH],
        "hc_head_fn": [4, 4 * WIDTH], "hc_head_base": [4], "hc_head_scale": [1], "mtp.0.norm.weight": [WIDTH],
    }  # fmt: skip
    for layer, ratio in enumerate(_DEEPSEEK["compress_ratios"][:4]):
        own: dict[str, list[int]] = {
            "attn_norm.weight": [WIDTH], "ffn_norm.weight": [WIDTH], "attn.attn_sink": [HEADS],
            "attn.wq_a.weight": [rank, WIDTH], "attn.q_norm.weight": [rank], "attn.wq_b.weight": [HEADS * size, rank],
            "attn.wkv.weight": [size, WIDTH], "attn.kv_norm.weight": [size],
            "attn.wo_a.weight": [2 * 16, HEADS * size // 2], "attn.wo_b.weight": [WIDTH, 2 * 16],
            # the converter ignores the router bias of the first layer
            "ffn.gate.weight": [EXPERTS, WIDTH], "ffn.gate.bias": [EXPERTS],
        }  # fmt: skip
        for x in ("attn", "ffn"):
            own |= {f"hc_{x}_fn": [24, 4 * WIDTH], f"hc_{x}_base": [24], f"hc_{x}_scale": [3]}
        for x, width in (("attn", size), ("attn.indexer", index)):
            parts = 2 if ratio == 4 else 1
            if ratio == 4 or (ratio and x == "attn"):
                own |= {f"{x}.compressor.{part}.weight": [parts * width, WIDTH] for part in ("wkv", "wgate")}
                own |= {f"{x}.compressor.ape": [ratio, parts * width], f"{x}.compressor.norm.weight": [width]}
        if ratio == 4:
            own |= {"attn.indexer.wq_b.weight": [16 * index, rank], "attn.indexer.weights_proj.weight": [16, WIDTH]}
        for place in ("shared_experts", *(f"experts.{i}" for i in range(EXPERTS))):
            own |= {f"ffn.{place}.w1.weight": [wide, WIDTH], f"ffn.{place}.w3.weight": [wide, WIDTH]}
            own |= {f"ffn.{place}.w2.weight": [WIDTH, wide]}
        found |= {f"layers.{layer}.{name}": shape for name, shape in own.items()}
    table = np.stack([np.arange(VOCABULARY) % EXPERTS, np.arange(1, VOCABULARY + 1) % EXPERTS], axis=1)
    tensors: Tensors = [[name, shape, 1.0 if "norm" in name else 0.0] for name, shape in found.items()]
    return [*tensors, ["layers.0.ffn.gate.tid2eid", [VOCABULARY, 2], table.tolist()]]


# -- Kimi K3 as published: MXFP4 experts, packed by compressed-tensors -----------------------------------------------

_KIMI = {
    "architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3", "vision_config": {"hidden_size": 16},
    "text_config": {
        **_COMMON, "model_type": "kimi_linear", "num_hidden_layers": 5, "num_key_value_heads": HEADS, "head_dim": 16,
        "hidden_act": "situ", "activation_situ_beta": 7.0, "activation_situ_linear_beta": 8.0, "intermediate_size": 96,
        "attn_res_block_size": 2, "first_k_dense_replace": 1, "kv_lora_rank": 32, "q_lora_rank": 24,
        "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "mla_use_nope": True, "rope_theta": 10000.0,
        "num_experts": EXPERTS, "num_experts_per_token": 2, "num_shared_experts": 1, "moe_intermediate_size": 64,
        "moe_renormalize": True, "moe_router_activation_func": "sigmoid", "routed_scaling_factor": 2.5,
        "routed_expert_hidden_size": 32, "topk_group": 1, "num_expert_group": 1,
        "linear_attn_config": {
            "full_attn_layers": [3, 5], "kda_layers": [1, 2, 4], "head_dim": 16, "num_heads": HEADS,
            "short_conv_kernel_size": 4, "gate_lower_bound": -5.0,
        },
        "quantization_config": {
            "quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
                "num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True}}},
        },
    },
}  # fmt: skip


def _kimi() -> Tensors:
    inner, latent = HEADS * 16, 32
    found: dict[str, list[int]] = {
        "model.embed_tokens.weight": [VOCABULARY, WIDTH], "model.norm.weight": [WIDTH],
        "lm_head.weight": [VOCABULARY, WIDTH], "model.output_attn_res_norm.weight": [WIDTH],
        "model.output_attn_res_proj.weight": [1, WIDTH],
    }  # fmt: skip
    for layer in range(5):
        own: dict[str, list[int]] = {"input_layernorm.weight": [WIDTH], "post_attention_layernorm.weight": [WIDTH]}
        for x in ("self_attention", "mlp"):
            own |= {f"{x}_res_norm.weight": [WIDTH], f"{x}_res_proj.weight": [1, WIDTH]}
        own |= {"self_attn.g_proj.weight": [inner, WIDTH], "self_attn.o_proj.weight": [WIDTH, inner]}
        if layer + 1 in (3, 5):
            own |= {
                "self_attn.q_a_proj.weight": [24, WIDTH], "self_attn.q_a_layernorm.weight": [24],
                "self_attn.q_b_proj.weight": [HEADS * 24, 24], "self_attn.kv_a_proj_with_mqa.weight": [40, WIDTH],
                "self_attn.kv_a_layernorm.weight": [32], "self_attn.kv_b_proj.weight": [HEADS * 32, 32],
            }  # fmt: skip
        else:
            own |= {f"self_attn.{x}_proj.weight": [inner, WIDTH] for x in "qkv"}
            own |= {f"self_attn.{x}_conv1d.weight": [inner, 1, 4] for x in "qkv"}
            own |= {
                "self_attn.A_log": [HEADS], "self_attn.dt_bias": [inner], "self_attn.f_a_proj.weight": [16, WIDTH],
                "self_attn.f_b_proj.weight": [inner, 16], "self_attn.b_proj.weight": [HEADS, WIDTH],
                "self_attn.o_norm.weight": [16],
            }  # fmt: skip
        if layer:
            of = "block_sparse_moe"
            own |= {f"{of}.gate.weight": [EXPERTS, WIDTH], f"{of}.gate.e_score_correction_bias": [EXPERTS]}
            own |= {
                f"{of}.routed_expert_down_proj.weight": [latent, WIDTH],
                f"{of}.routed_expert_norm.weight": [latent],
            }
            own |= {f"{of}.routed_expert_up_proj.weight": [WIDTH, latent]}
            for i in range(EXPERTS):
                own |= {f"{of}.experts.{i}.{w}.weight": [64, latent] for w in ("w1", "w3")}
                own |= {f"{of}.experts.{i}.w2.weight": [latent, 64]}
            own |= _mlp(f"{of}.shared_experts.", 64)
        else:
            own |= _mlp("mlp.", 96)
        found |= {f"model.layers.{layer}.{name}": shape for name, shape in own.items()}
    tensors: Tensors = [
        [f"language_model.{name}", shape, 1.0 if "norm" in name else 0.0] for name, shape in found.items()
    ]
    return [*tensors, ["vision_tower.x.weight", [16, 16], 0.0]]


def _mlp(prefix: str, inner: int) -> dict[str, list[int]]:
    return {
        **{f"{prefix}{x}_proj.weight": [inner, WIDTH] for x in ("gate", "up")},
        f"{prefix}down_proj.weight": [WIDTH, inner],
    }


# -- Grove MoE ---------------------------------------------------------------------------------------------------------

_GROVE = {
    **_COMMON, "architectures": ["GroveMoeForCausalLM"], "model_type": "grove_moe", "num_hidden_layers": 2,
    "num_key_value_heads": 2, "head_dim": 16, "hidden_act": "silu", "intermediate_size": 96, "num_experts": EXPERTS,
    "moe_intermediate_size": 48, "norm_topk_prob": True, "rope_theta": 1e6, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "attention_bias": False,
}  # fmt: skip


def _grove() -> Tensors:
    found: dict[str, list[int]] = {
        "model.embed_tokens.weight": [VOCABULARY, WIDTH], "model.norm.weight": [WIDTH],
        "lm_head.weight": [VOCABULARY, WIDTH],
    }  # fmt: skip
    for layer in range(2):
        own: dict[str, list[int]] = {
            "input_layernorm.weight": [WIDTH], "post_attention_layernorm.weight": [WIDTH],
            "self_attn.q_proj.weight": [64, WIDTH], "self_attn.k_proj.weight": [32, WIDTH],
            "self_attn.v_proj.weight": [32, WIDTH], "self_attn.o_proj.weight": [WIDTH, 64],
            "self_attn.q_norm.weight": [16], "self_attn.k_norm.weight": [16],
            "mlp.gate.weight": [EXPERTS, WIDTH], "mlp.expert_bias": [EXPERTS],
        }  # fmt: skip
        for i in range(EXPERTS):
            own |= _mlp(f"mlp.experts.{i}.", 48)
        for i in range(EXPERTS // 2):
            own |= _mlp(f"mlp.chunk_experts.{i}.", 16)
        found |= {f"model.layers.{layer}.{name}": shape for name, shape in own.items()}
    return [[name, shape, 1.0 if "norm" in name else 0.0] for name, shape in found.items()]


OWN_PACKED: dict[str, tuple[dict[str, Any], Tensors, str]] = {
    "deepseek4": (_DEEPSEEK, _deepseek(), "deepseek-v3"),
    "kimi-k3": (_KIMI, _kimi(), "qwen2"),
    "grovemoe": (_GROVE, _grove(), "qwen2"),
}


def stored(name: str, tensors: Tensors) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Return the stored tensors of a checkpoint, and the types that numpy's dtypes cannot express."""
    found, types = {}, {}
    for key, shape, base in tensors:
        if name == "deepseek4" and ".experts." in key:
            codes, scales = _codes(key, shape)
            found |= {key: codes.view(np.int8), (own := key.removesuffix("weight") + "scale"): scales}
            types |= {key: "I8", own: "F8_E8M0"}
        elif name == "kimi-k3" and ".experts." in key:
            found[f"{key}_packed"], found[f"{key}_scale"] = _codes(key, shape)
        elif name == "deepseek4" and key.endswith(_FP8):
            bytes_, scales = _eight(key, shape)
            found |= {key: bytes_, (own := key.removesuffix("weight") + "scale"): scales}
            types |= {key: "F8_E4M3", own: "F8_E8M0"}
        else:
            found[key] = numbers(key, shape, base)
    return found, types


_FP8 = tuple([f".{x}.weight" for x in ("wq_a", "wq_b", "attn.wkv", "wo_a", "wo_b", "w1", "w2", "w3")])


def _codes(key: str, shape: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return random FP4 codes, two a byte, and E8M0 scales for blocks of 32. Values reach 6 * 2^-5."""
    random = np.random.RandomState(zlib.crc32(key.encode()))
    rows, columns = shape
    return random.randint(0, 256, (rows, columns // 2), np.uint8), random.randint(
        119, 123, (rows, columns // 32), np.uint8
    )


def _eight(key: str, shape: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return random FP8 codes and E8M0 scales for blocks of 128 x 128. Values reach 30 * 2^-6."""
    random = np.random.RandomState(zlib.crc32(key.encode()))
    parts = [-(-n // 128) for n in shape]
    signs = random.randint(0, 2, shape, np.uint8) << 7
    return random.randint(0, 0x60, shape, np.uint8) | signs, random.randint(119, 122, parts, np.uint8)
