"""Further tiny checkpoints for `hf_own`: older config.json keys, base models, and language models of vision models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.localllm.convert.hf_programs import (
    ATTENTION,
    COMMON,
    FFN,
    FUSED,
    HEAD,
    HEAD_NORMS,
    HEADS,
    LAYERS,
    MLP,
    NORMS,
    TOKENS,
    TOP,
    WIDTH,
    Case,
    Shapes,
)
from tests.localllm.convert.hf_synthetic import numbers
from tests.localllm.convert.hf_tokenizers import VOCABULARY
from tests.localllm.convert.support import save

_QWEN = {**COMMON, **TOKENS, "max_position_embeddings": 256}
_BIASES: Shapes = {f"self_attn.{x}_proj.bias": ATTENTION[f"self_attn.{x}_proj"][:1] for x in "qkv"}
_LATENT = {
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 10, "v_head_dim": 12,
    "num_key_value_heads": HEADS, "head_dim": 8,
}  # fmt: skip
_MLA: Shapes = {
    **NORMS, "self_attn.q_a_proj": [24, WIDTH], "self_attn.q_a_layernorm": [24],
    "self_attn.q_b_proj": [HEADS * 18, 24], "self_attn.kv_a_proj_with_mqa": [24, WIDTH],
    "self_attn.kv_a_layernorm": [16], "self_attn.kv_b_proj": [HEADS * 22, 16], "self_attn.o_proj": [WIDTH, HEADS * 12],
}  # fmt: skip
_SEES: Shapes = {"visual.patch_embed.proj": [4], "visual.merger.mlp.0": [4]}


def _tensors(*parts: Shapes, prefix: str = "") -> list[Any]:
    """Return (name, shape, mean of the random values) of each tensor. Names without a suffix get `.weight`."""
    found = {prefix + name: shape for part in parts for name, shape in part.items()}
    ended = {
        name if name.endswith((".bias", "_bias", "_log", ".D")) else f"{name}.weight": x for name, x in found.items()
    }
    return [(name, x, float("norm" in name and name.endswith("weight"))) for name, x in ended.items()]


def _layers(*parts: Shapes, prefix: str = "model.layers") -> Shapes:
    return {
        f"{prefix}.{layer}.{name}": shape for layer in range(LAYERS) for part in parts for name, shape in part.items()
    }


def _below(prefix: str, shapes: Shapes) -> Shapes:
    return {f"{prefix}.{name}": shape for name, shape in shapes.items()}


def _bare(shapes: Shapes) -> Shapes:
    return {name.removeprefix("model."): shape for name, shape in shapes.items() if name != "lm_head"}


_LLAMA: Shapes = {**NORMS, **ATTENTION, **_below("mlp", MLP)}
_QWEN3: Shapes = {**_LLAMA, **HEAD_NORMS}
_ERNIE: Shapes = {
    **NORMS, "self_attn.qkv_proj": [FUSED, WIDTH], "self_attn.o_proj": [WIDTH, HEADS * HEAD],
    "mlp.up_gate_proj": [2 * FFN, WIDTH], "mlp.down_proj": [WIDTH, FFN],
}  # fmt: skip
_KORMO: Shapes = {
    "pre_attention_layernorm": [WIDTH], "pre_mlp_layernorm": [WIDTH], **ATTENTION, **_below("mlp", MLP),
}  # fmt: skip
_PHI: Shapes = {
    **NORMS, "self_attn.qkv_proj": [FUSED, WIDTH], "self_attn.o_proj": [WIDTH, HEADS * HEAD],
    "mlp.gate_up_proj": [2 * FFN, WIDTH], "mlp.down_proj": [WIDTH, FFN],
}  # fmt: skip
_INNER, _STATE, _RANK = 2 * WIDTH, 16, 2
_MAMBA: Shapes = {
    "norm": [WIDTH], "mixer.in_proj": [2 * _INNER, WIDTH], "mixer.conv1d": [_INNER, 1, 4],
    "mixer.conv1d.bias": [_INNER], "mixer.x_proj": [_RANK + 2 * _STATE, _INNER], "mixer.dt_proj": [_INNER, _RANK],
    "mixer.dt_proj.bias": [_INNER], "mixer.A_log": [_INNER, _STATE], "mixer.D": [_INNER],
    "mixer.out_proj": [WIDTH, _INNER],
}  # fmt: skip
_RW = {
    "model_type": "RefinedWebModel", "architectures": ["RWForCausalLM"], "alibi": False, "bias": False,
    "hidden_size": WIDTH, "n_head": HEADS, "n_layer": LAYERS, "layer_norm_epsilon": 1e-5, "multi_query": True,
    "parallel_attn": True, "vocab_size": VOCABULARY, "apply_residual_connection_post_layernorm": False,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_RW_TOP: Shapes = {
    "transformer.word_embeddings": [VOCABULARY, WIDTH], "transformer.ln_f": [WIDTH], "transformer.ln_f.bias": [WIDTH],
    "lm_head": [VOCABULARY, WIDTH],
}  # fmt: skip


def _rw(kv: int, *norms: str) -> Shapes:
    return {
        **{f"{norm}{end}": [WIDTH] for norm in norms for end in ("", ".bias")},
        "self_attention.query_key_value": [(HEADS + 2 * kv) * HEAD, WIDTH], "self_attention.dense": [WIDTH, WIDTH],
        "mlp.dense_h_to_4h": [4 * WIDTH, WIDTH], "mlp.dense_4h_to_h": [WIDTH, 4 * WIDTH],
    }  # fmt: skip


_LFM: Shapes = {
    "operator_norm": [WIDTH], "ffn_norm": [WIDTH], "feed_forward.w1": [FFN, WIDTH], "feed_forward.w3": [FFN, WIDTH],
    "feed_forward.w2": [WIDTH, FFN],
}  # fmt: skip
_LFM_LAYERS: Shapes = {
    **_below("layers.0", {
        **_LFM, "conv.in_proj": [3 * WIDTH, WIDTH], "conv.conv": [WIDTH, 1, 3], "conv.out_proj": [WIDTH, WIDTH],
    }),
    **_below("layers.1", {
        **_LFM, **{name.replace("o_proj", "out_proj"): shape for name, shape in ATTENTION.items()},
        "self_attn.q_layernorm": [HEAD], "self_attn.k_layernorm": [HEAD],
    }),
}  # fmt: skip

_WHOLE: Shapes = {**NORMS, **{f"self_attn.{x}_proj": [WIDTH, WIDTH] for x in "qkvo"}}
_EXPERT: Shapes = {"gate_proj": [24, WIDTH], "up_proj": [24, WIDTH], "down_proj": [WIDTH, 24]}
_OCR: Shapes = {
    **_below("model.layers.0", {**_WHOLE, **_below("mlp", MLP)}),
    **_below("model.layers.1", {
        **_WHOLE, "mlp.gate": [4, WIDTH],
        **{f"mlp.experts.{i}.{name}": shape for i in range(4) for name, shape in _EXPERT.items()},
        **{f"mlp.shared_experts.{name}": [2 * n if n == 24 else n for n in shape] for name, shape in _EXPERT.items()},
    }),
}  # fmt: skip

FURTHER: dict[str, Case] = {
    "ernie4_5-fused": (
        {**_QWEN, "architectures": ["Ernie4_5_ForCausalLM"], "model_type": "ernie4_5", "head_dim": HEAD,
         "use_bias": False},
        [(name.replace("model.", "ernie."), *rest) for name, *rest in _tensors(TOP, _layers(_ERNIE))], "spm",
    ),
    "qwen2-kormo": (
        {**_QWEN, "architectures": ["KORMoForCausalLM"], "model_type": "kormo"}, _tensors(TOP, _layers(_KORMO)),
        "llama3",
    ),
    "mamba-lm": (
        {"architectures": ["MambaLMHeadModel"], "d_model": WIDTH, "n_layer": LAYERS, "vocab_size": VOCABULARY,
         "ssm_cfg": {}, "rms_norm": True, "residual_in_fp32": True, "fused_add_norm": True,
         "pad_vocab_size_multiple": 8},
        _tensors({"backbone.embedding": [VOCABULARY, WIDTH], "backbone.norm_f": [WIDTH]},
                 _layers(_MAMBA, prefix="backbone.layers")),
        "gpt-2",
    ),
    "falcon-rw": (_RW, _tensors(_RW_TOP, _layers(_rw(1, "input_layernorm"), prefix="transformer.h")), "falcon"),
    "falcon-rw-groups": (
        {**_RW, "model_type": "RefinedWeb", "n_head_kv": 2, "multi_query": None},
        _tensors(_RW_TOP, _layers(_rw(2, "ln_attn", "ln_mlp"), prefix="transformer.h")), "falcon",
    ),
    "llama-base": (
        {**_QWEN, "architectures": ["LlamaModel"], "model_type": "llama", "head_dim": HEAD},
        _tensors(_bare(TOP), _layers(_LLAMA, prefix="layers")), "llama3",
    ),
    "llama-embed": (
        {**_QWEN, "architectures": ["LlamaBidirectionalModel"], "model_type": "llama_bidirec", "head_dim": HEAD,
         "pooling": "avg"},
        _tensors(_bare(TOP), _layers(_LLAMA, prefix="layers")), "llama3",
    ),
    "deepseek2-ocr": (
        {"architectures": ["DeepseekOCRForCausalLM"], "model_type": "deepseek_vl_v2",
         "language_config": {
             **COMMON, **TOKENS, "rope_theta": 10000.0, "num_key_value_heads": HEADS,
             "max_position_embeddings": 256, "moe_intermediate_size": 24, "n_routed_experts": 4,
             "n_shared_experts": 2, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
             "use_mla": False, "q_lora_rank": None, "kv_lora_rank": None, "qk_nope_head_dim": 0,
             "qk_rope_head_dim": 0, "v_head_dim": 0, "topk_method": "greedy", "n_group": 1, "topk_group": 1,
         },
         "vision_config": {"width": {"sam_vit_b": {}}}},
        _tensors(TOP, _OCR, {
            "model.sam_model.pos_embed": [4], "model.vision_model.pre_layrnorm": [4], "model.projector.layers": [4, 4],
            "model.image_newline": [4], "model.view_seperator": [4],
        }),
        "deepseek-llm",
    ),
    "qwen2-base": (
        {**_QWEN, "architectures": ["Qwen2Model"], "model_type": "qwen2"},
        _tensors(_bare(TOP), _layers(_LLAMA, _BIASES, prefix="layers")), "spm",
    ),
    "qwen3-base": (
        {**_QWEN, "architectures": ["Qwen3Model"], "model_type": "qwen3", "head_dim": HEAD},
        _tensors(_bare(TOP), _layers(_QWEN3, prefix="layers")), "spm",
    ),
    "lfm2-colbert": (
        {**_QWEN, "architectures": ["Lfm2Model"], "model_type": "lfm2", "layer_types": ["conv", "full_attention"],
         "conv_L_cache": 3, "norm_eps": 1e-5, "block_auto_adjust_ff_dim": False, "block_ffn_dim_multiplier": 1.0,
         "block_multiple_of": 16, "intermediate_size": FFN},
        _tensors({"embed_tokens": [VOCABULARY, WIDTH], "embedding_norm": [WIDTH]}, _LFM_LAYERS), "qwen2",
    ),
    "llama-sarashina2": (
        {"architectures": ["Sarashina2VisionForCausalLM"], "model_type": "sarashina2_vision",
         "text_config": {**_QWEN, "model_type": "llama"}, "vision_config": {"hidden_size": 4}},
        _tensors(TOP, _layers(_LLAMA), prefix="llm.") + _tensors(_SEES, {"norm": [WIDTH]}), "llama3",
    ),
    "phi3-vision": (
        {**_QWEN, "architectures": ["Phi4ForCausalLMV"], "model_type": "phi4-siglip",
         "original_max_position_embeddings": 256},
        _tensors(TOP, _layers(_PHI), {"model.vision_tower.vision_tower.vision_model.post_layernorm": [4],
                                      "model.mm_projector.0": [4, 4]}),
        "spm",
    ),
    "qwen2-dots": (
        {**_QWEN, "architectures": ["DotsOCRForCausalLM"], "model_type": "dots_ocr",
         "vision_config": {"embed_dim": 4}},
        _tensors(TOP, _layers(_LLAMA, _BIASES), {"vision_tower.blocks.0.attn.qkv": [4, 4]}), "qwen2",
    ),
    "qwen3-step-vl": (
        {"architectures": ["StepVLForConditionalGeneration"], "model_type": "step_robotics",
         "text_config": {**_QWEN, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": HEAD},
         "vision_config": {"width": 4}},
        _tensors(TOP, _layers(_QWEN3), {"vision_model.conv1": [4, 4], "vit_large_projector": [4, 4]}), "qwen2",
    ),
    "deepseek2-youtu-vl": (
        {**_QWEN, **_LATENT, "architectures": ["YoutuVLForConditionalGeneration"], "model_type": "youtu_vl",
         "vision_config": {"hidden_size": 4}},
        _tensors(TOP, _layers({**_MLA, **_below("mlp", MLP)}),
                 {"siglip2.vision_model.post_layernorm": [4], "merger.mlp.0": [4, 4]}),
        "qwen2",
    ),
}  # fmt: skip


_LING: Shapes = {
    **_below("model.layers.0", {
        **NORMS, **{f"attention.{x}_proj": [WIDTH, WIDTH] for x in "qkvfg"},
        **{f"attention.{x}_conv1d": [WIDTH, 1, 4] for x in "qkv"}, "attention.b_proj": [HEADS, WIDTH],
        "attention.A_log": [HEADS], "attention.dt_bias": [WIDTH], "attention.o_norm": [HEAD],
        "attention.dense": [WIDTH, WIDTH], **_below("mlp", MLP),
    }),
    **_below("model.layers.1", {
        **NORMS, "attention.q_proj": [HEADS * 18, WIDTH], "attention.kv_a_proj_with_mqa": [24, WIDTH],
        "attention.kv_a_layernorm": [16], "attention.kv_b_proj": [HEADS * 22, 16], "attention.g_proj": [HEADS, WIDTH],
        "attention.dense": [WIDTH, HEADS * 12], "mlp.gate": [4, WIDTH], "mlp.gate.expert_bias": [4],
        **{f"mlp.experts.{i}.{name}": shape for i in range(4) for name, shape in MLP.items()},
        **_below("mlp.shared_experts", MLP),
    }),
}  # fmt: skip
FURTHER["bailingmoe3-vl"] = (
    {"architectures": ["BailingMoeV3VLForConditionalGeneration"], "model_type": "bailing_moe_v3_vl",
     "vision_config": {"hidden_size": 4},
     "text_config": {
         **_QWEN, **_LATENT, "model_type": "bailing_moe_v3", "q_lora_rank": None, "head_dim": HEAD,
         "layer_group_size": 2, "first_k_dense_replace": 1, "num_experts": 4, "num_experts_per_tok": 2,
         "moe_intermediate_size": FFN, "moe_shared_expert_intermediate_size": FFN, "num_shared_experts": 1,
         "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.5, "norm_topk_prob": True, "kda_safe_gate": True,
         "no_kda_lora": True, "gated_attention_proj_granularity_type": "head_wise",
         "kda_lower_bound": -5.0, "short_conv_kernel_size": 4, "mrope_section": [1, 1, 2], "score_function": "sigmoid",
     }},
    _tensors({"model.word_embeddings": [VOCABULARY, WIDTH], "model.norm": [WIDTH], "lm_head": [VOCABULARY, WIDTH]},
             _LING, {"model.visual.merger.norm": [4], "linear_proj.0": [4, 4]}),
    "qwen2",
)  # fmt: skip


_KEY, _VALUE, _CARDS = 84, 48, 4  # the rows of one GPU's shard are not a multiple of the FP8 block size
_MIMO_ROWS = 8 * _KEY + 4 * (_KEY + _VALUE)
_MIMO: Shapes = {
    **NORMS, "self_attn.qkv_proj": [_MIMO_ROWS, WIDTH], "self_attn.o_proj": [WIDTH, 8 * _VALUE],
}  # fmt: skip
FURTHER["mimo2-cards"] = (
    {**_QWEN, "architectures": ["MiMoV2ForCausalLM"], "model_type": "mimo_v2", "num_attention_heads": 8,
     "num_key_value_heads": 4, "head_dim": _KEY, "v_head_dim": _VALUE, "swa_num_attention_heads": 8,
     "swa_num_key_value_heads": 4, "swa_head_dim": _KEY, "swa_v_head_dim": _VALUE, "sliding_window": 8,
     "hybrid_layer_pattern": [0, 1], "swa_rope_theta": 10000, "partial_rotary_factor": 0.334,
     "layernorm_epsilon": 1e-5, "rms_norm_eps": None, "n_routed_experts": 4, "num_experts_per_tok": 2,
     "moe_intermediate_size": FFN, "norm_topk_prob": True, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
     "n_group": 1, "topk_group": 1, "attention_value_scale": 0.612, "n_shared_experts": None,
     "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}},
    _tensors(TOP, {
        **_below("model.layers.0", {**_MIMO, **_below("mlp", MLP)}),
        **_below("model.layers.1", {
            **_MIMO, "self_attn.attention_sink_bias": [8], "mlp.gate": [4, WIDTH],
            "mlp.gate.e_score_correction_bias": [4],
            **{f"mlp.experts.{i}.{name}": shape for i in range(4) for name, shape in MLP.items()},
        }),
        "visual.patch_embed.proj": [4], "speech_embeddings.0": [4, 4],
    }),
    "qwen2",
)  # fmt: skip


def _by_cards(folder: Path) -> None:
    """Write the fused QKV weights in FP8 with block scales per GPU shard, as the published checkpoint does."""
    noise, tensors = np.random.RandomState(9), {}
    types = {}
    for name, *rest in FURTHER["mimo2-cards"][1]:
        tensors[name] = numbers(name, *rest)
        if name.endswith("qkv_proj.weight"):
            codes = noise.randint(0, 0x7C, rest[0]) | noise.choice([0, 128], rest[0])
            tensors[name], types[name] = codes.astype(np.uint8), "F8_E4M3"
            blocks = _CARDS * -(-_MIMO_ROWS // _CARDS // 128)
            tensors[f"{name}_scale_inv"] = noise.uniform(5e-4, 2e-3, (blocks, 1)).astype(np.float32)
    save(folder / "model.safetensors", tensors, types)


def _pooling(folder: Path, *further: dict[str, Any]) -> None:
    (folder / "modules.json").write_text(json.dumps([
        {"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"}, *further,
    ]))  # fmt: skip


def _last(folder: Path) -> None:
    """Write the sentence-transformers files of a model with last-token pooling."""
    _pooling(folder, {"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"})
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_lasttoken": True}))


def _dense(folder: Path) -> None:
    """Write the files of a dense layer after the model, as PyLate saves it."""
    _pooling(folder, {"idx": 1, "path": "1_Dense", "type": "pylate.models.Dense.Dense"})
    (folder / "1_Dense").mkdir(exist_ok=True)
    settings = {"in_features": WIDTH, "out_features": 12, "bias": False,
                "activation_function": "torch.nn.modules.linear.Identity"}  # fmt: skip
    (folder / "1_Dense" / "config.json").write_text(json.dumps(settings))
    values = np.random.RandomState(5).standard_normal((12, WIDTH)).astype(np.float32)
    save(folder / "1_Dense" / "model.safetensors", {"linear.weight": values})


def _named(folder: Path) -> None:
    """Add `tokenizer_class` to tokenizer_config.json, which llama.cpp's converter requires."""
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "tokenizer_class": "LlamaTokenizer"}))


SEES = (  # models with tensors of other modalities
    "deepseek2-ocr", "llama-sarashina2", "phi3-vision", "qwen2-dots", "qwen3-step-vl", "deepseek2-youtu-vl",
    "bailingmoe3-vl",
    "mimo2-cards",
)  # fmt: skip
BESIDE = {
    "qwen2-base": _last,
    "qwen3-base": _last,
    "lfm2-colbert": _dense,
    "phi3-vision": _named,
    "mimo2-cards": _by_cards,
}  # functions that write further files of a checkpoint
