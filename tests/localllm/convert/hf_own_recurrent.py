"""Tiny checkpoints of RWKV, Mamba and hybrid models with custom code, for `hf_own`, with the names of that code."""

from __future__ import annotations

from tests.localllm.convert.hf_own_shapes import ATTENTION, COMMON, TOKENS, TOP, Case, below, own

# llama.cpp computes RWKV-7 incorrectly with a head size of 32
_RWKV = {**TOKENS, "hidden_size": 128, "num_hidden_layers": 3, "tie_word_embeddings": False, "pad_token_id": None}
_QWEN = {**COMMON, "pad_token_id": None, "hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 3,
         "num_attention_heads": 2, "num_key_value_heads": 1, "rope_theta": None}  # fmt: skip
_MLP = "(input|post_attention)_layernorm 128 mlp.(gate|up)_proj 96x128 mlp.down_proj 128x96 "
_TOP = TOP.replace("32", "128")


def _shift(rank: int, decay: int) -> str:
    """Return the token-shift weights of RWKV-6."""
    return (
        "time_maa_(x|w|k|v|r|g). 1x1x128 time_decay. 1x1x128 "
        f"time_maa_w1. 128x{5 * rank} time_maa_w2. 5x{rank}x128 time_decay_w1. 128x{decay} time_decay_w2. {decay}x128 "
    )


def _low_rank(letter: str, rank: int) -> str:
    return f"{letter}0. 1x1x128 {letter}1. 128x{rank} {letter}2. {rank}x128 "


def _lora(letter: str, rank: int, end: str = "+") -> str:
    return f"attn.{letter}_lora.lora.0 {rank}x128 attn.{letter}_lora.lora.2{end} 128x{rank} "


_RWKV7 = (
    "(attn_norm|ffn_norm|attn.g_norm)+ 128 attn.x_(r|w|k|v|a|g). 1x1x128 attn.(k_k|k_a). 128 attn.r_k. 2x64 "
    "attn.(r|k|v|o)_proj 128x128 ffn.x_k. 128 ffn.key 96x128 ffn.value 128x96 "
    + _lora("w", 32) + _lora("a", 32) + _lora("g", 24, "")
)  # fmt: skip
_LFM = "(operator|ffn)_norm 32 feed_forward.(w1|w3) 48x32 feed_forward.w2 32x48 "
_PLAMO = "(pre|post)_(mixer|mlp)_norm 32 mlp.gate_up_proj 96x32 mlp.down_proj 32x48 "

RECURRENT: dict[str, Case] = {
    "rwkv6": own(
        "Rwkv6ForCausalLM",
        "(ln1|ln2|attention.ln_x)+ 128 " + below("attention.", _shift(32, 64)) + "attention.time_faaaa. 2x64 "
        "attention.(receptance|key|value|gate|output) 128x128 feed_forward.time_maa_(k|r). 1x1x128 "
        "feed_forward.key 96x128 feed_forward.receptance 128x128 feed_forward.value 128x96",
        "rwkv.embeddings Vx128 rwkv.(blocks.0.pre_ln|ln_out)+ 128 head Vx128", "world", prefix="rwkv.blocks.{}.",
        base=_RWKV, model_type="rwkv6", head_size=64, intermediate_size=96, layer_norm_epsilon=1e-5, rescale_every=2,
        bos_token_id=0, eos_token_id=0,
    ),
    "rwkv6qwen2": own(
        "RWKV6Qwen2ForCausalLM",
        _MLP + below("self_attn.", _shift(24, 40)) + "self_attn.q_proj+ 128x128 self_attn.(k|v)_proj+ 64x128 "
        "self_attn.(gate|o_proj) 128x128",
        _TOP, base=_QWEN, model_type="rwkv6qwen2", lora_rank_tokenshift=24, lora_rank_decay=40,
    ),
    "rwkv7": own(
        "RWKV7ForCausalLM", _RWKV7 + _lora("v", 16),
        "model.embeddings Vx128 model.(layers.0.pre_norm|norm)+ 128 lm_head Vx128", "world", others={0: _RWKV7},
        base=_RWKV, model_type="rwkv7", head_dim=64, intermediate_size=96, norm_eps=1e-5, hidden_act="sqrelu",
        decay_low_rank_dim=32, a_low_rank_dim=32, v_low_rank_dim=16, gate_low_rank_dim=24,
    ),
    "arwkv7": own(
        "RwkvHybridForCausalLM",
        _MLP + below("self_attn.time_mixer.", "x_(r|w|k|v|a). 1x1x128 (k_k|k_a). 1x1x128 r_k. 2x64 "
                     "(receptance|key|value|output) 128x128 " + _low_rank("w", 64) + _low_rank("a", 64)
                     + _low_rank("v", 32)),
        _TOP, base=_QWEN, model_type="rwkv_hybrid", head_size=64, wkv_has_gate=False, wkv_version=7,
    ),
    "lfm2-colbert": own(
        "Lfm2Model", _LFM + "conv.in_proj 96x32 conv.conv 32x1x3 conv.out_proj 32x32",
        "embed_tokens Vx32 embedding_norm 32", prefix="layers.{}.", model_type="lfm2",
        others={1: _LFM + ATTENTION.replace("(q|o)_", "(q|out)_") + "self_attn.(q|k)_layernorm 8"},
        layer_types=["conv", "full_attention"], conv_L_cache=3, norm_eps=1e-5, block_auto_adjust_ff_dim=False,
        block_ffn_dim_multiplier=1.0, block_multiple_of=16,
    ),
    "mamba-lm": own(
        "MambaLMHeadModel",
        "norm 32 mixer.in_proj 128x32 mixer.conv1d+ 64x1x4 mixer.x_proj 34x64 mixer.dt_proj+ 64x2 mixer.A_log. 64x16 "
            "mixer.D. 64 mixer.out_proj 32x64", "backbone.embedding Vx32 backbone.norm_f 32", "gpt-2",
        prefix="backbone.layers.{}.", model_type=None, base={"vocab_size": TOKENS["vocab_size"]}, d_model=32,
        n_layer=2, ssm_cfg={}, rms_norm=True, residual_in_fp32=True, fused_add_norm=True, pad_vocab_size_multiple=8,
    ),
    "plamo2": own(  # 2 heads of Mamba
        "Plamo2ForCausalLM",
        _PLAMO + "mixer.in_proj 32x32 mixer.conv1d 16x1x4 mixer.bcdt_proj 96x16 mixer.dt_proj 2x64 "
        "mixer.(dt_bias|A_log|D). 2 mixer.dt_norm_weight. 64 mixer.(B|C)_norm_weight. 16 mixer.out_proj 32x16",
        TOP, "plamo", prefix="model.layers.layers.{}.", num_hidden_layers=3, hidden_size_per_head=8, mamba_num_heads=2,
        mamba_d_state=16, mamba_d_conv=4, mamba_step=3, attention_window_size=256, full_attention_idx=[],
        others={1: _PLAMO + "mixer.qkv_proj 64x32 mixer.o_proj 32x32 mixer.q_weight. 4x8 mixer.k_weight. 2x8"},
    ),
}  # fmt: skip
