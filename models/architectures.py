"""The supported architectures: one entry each, with only the properties that are not in the GGUF.

`models.architecture` explains the fields. Biases, q/k norms, sinks, fused and shared matrices, tied output, head sizes
and rope frequency factors are determined by the GGUF. To add an architecture that fits `models.forward`, add an entry
here; the entries of the others are in `models.families`. Llama comes first; the others are sorted by name.
"""

from __future__ import annotations

from localllm.models.architecture import Architecture
from localllm.models.families import ROWS
from localllm.models.properties import QKV_EXTRAS, Indexer, Recurrent, Sliding
from localllm.models.routing import FILE_SIGMOID, FILE_SOFTMAX, SCALED_SIGMOID, SCALED_SOFTMAX, SOFTMAX, ExpertGating

FFN_BIASES = ("ffn_gate.bias", "ffn_up.bias", "ffn_down.bias")
PLAIN = (
    # Llama 1-3, Mistral 7B, Nemo and Small, Mixtral, TinyLlama, SmolLM 1-2, Yi, ...
    Architecture("llama", "interleaved", ffn_scales=True, routing=SCALED_SOFTMAX),
    Architecture(  # Trinity
        "afmoe", "neox", ignored=("attn_gate.scale",), qk_norm=True, root_width_embedding=True, post_norms=True,
        gated="sigmoid", no_rope_every=4, sliding=Sliding(4), routing=FILE_SIGMOID,
    ),
    Architecture("arcee", "interleaved", "relu2", ffn="plain", attention_scale=True),  # AFM 4.5B
    Architecture("bailingmoe", "interleaved", routing=FILE_SOFTMAX),  # Ling
    Architecture("bailingmoe2", "neox", qk_norm=True, routing=FILE_SOFTMAX),  # Ling 2.0
    Architecture(  # Ling 3
        "bailingmoe3", "interleaved", sections=True, axes="sections", gated="sigmoid", cache="latent",
        limits="silu_clamp",
        ignored=(*QKV_EXTRAS, "attn_output.scale"), recurrent=Recurrent("kda", "without_heads", bounded="slopes"),
        routing=FILE_SIGMOID,
    ),
    Architecture("bitnet", "neox", ffn_scales=True),
    Architecture("bloom", None, "gelu", norm="layer", ffn="plain", alibi=8.0),
    Architecture("chatglm", "interleaved", ffn="fused"),  # ChatGLM 2 and 3, GLM 4 9B of 2024
    Architecture("codeshell", "neox", "gelu", norm="layer", ffn="plain"),
    Architecture("cogvlm", "neox", ignored=("rope_freqs.weight", "attn_qkv.scale")),  # text part only
    Architecture(  # Command R7B, Command A, Aya Expanse
        "cohere2", "interleaved", ffn_scales=True, norm="layer", ffn_norm="attn_norm", parallel=True,
        multipliers="multiplied", sliding=Sliding(4, only_rope=True),
    ),
    Architecture(  # Command R and R+
        "command-r", "interleaved", norm="layer", ffn_norm="attn_norm", parallel=True, multipliers="multiplied",
    ),
    Architecture("dbrx", "neox", norm="layer", ffn_norm="attn_output_norm", clamp=True, routing=SOFTMAX),
    Architecture("deci", "interleaved"),  # Nemotron models made by pruning Llama
    Architecture("deepseek", "interleaved", routing=FILE_SOFTMAX),  # DeepSeek MoE 16B
    # text part only; GGUFs set `rope.dimension_count` to 0
    Architecture("deepseek2-ocr", "neox", ignored=("rope.dimension_count",), routing=FILE_SOFTMAX),
    Architecture(  # DeepSeek 3.2
        "deepseek32", "interleaved", ffn_scales=True, cache="latent", yarn_scores=True, indexer=Indexer("neox", "all"),
        routing=ExpertGating("softmax", False, from_file=True, scales=True),
    ),
    Architecture("dots1", "neox", qk_norm=True, routing=FILE_SIGMOID),  # dots.llm1
    Architecture(
        "dots3note", "interleaved", ffn_scales=True, cache="latent", gated="sigmoid", ignored=("attn_gate.scale",),
        sliding=Sliding(0), indexer=Indexer("neox", "full"), routing=SCALED_SIGMOID,
    ),
    Architecture("dream", "neox", ignored=("output.bias",), diffusion=True),
    Architecture("ernie4_5", "interleaved", ignored=("attn_output.bias", "expert_count")),
    Architecture("ernie4_5-moe", "interleaved", ignored=("attn_output.bias",), routing=SOFTMAX),
    Architecture("eurobert", "neox", encoder=True),
    Architecture("exaone", "neox"),  # EXAONE 3 and 3.5
    Architecture(
        "exaone-moe", "neox", qk_norm=True, sliding=Sliding(4, window=128, only_rope=True), routing=FILE_SIGMOID,
    ),
    Architecture(
        "falcon-h1", "neox", ignored=("rope_freqs.weight", "attn_output.bias"), recurrent=Recurrent("mamba2", "beside"),
    ),
    Architecture("gemma", "neox", "gelu", root_width_embedding=True),
    Architecture(  # EmbeddingGemma
        "gemma-embedding", "neox", "gelu", encoder=True, root_width_embedding=True, post_norms=True, qk_norm=True,
        sliding=Sliding(6, stretched=False, rope_base=10000.0),
    ),
    Architecture(  # GLM 5 to 5.2
        "glm-dsa", "interleaved", ffn_scales=True, cache="latent", yarn_scores=True,
        indexer=Indexer("interleaved", "types"), routing=SCALED_SIGMOID,
    ),
    Architecture("glm4", "interleaved", sections=True, axes="sections", ffn="fused", post_norms=True),
    Architecture("glm4moe", "neox", axes="sections", ffn_norm="post_attention_norm", routing=FILE_SIGMOID),
    Architecture(
        "gpt-oss", "neox", ffn_scales=True, ffn_norm="post_attention_norm", sliding=Sliding(2, window=128),
        routing=ExpertGating("softmax_of_chosen", False, activation="swiglu_oai"),
    ),
    Architecture("gpt2", None, "gelu", norm="layer", ffn="plain"),
    Architecture("granitemoe", "interleaved", multipliers="divided", attention_scale=True, routing=SOFTMAX),
    Architecture("hunyuan-dense", "neox", norms_rotated=True),
    Architecture("hunyuan-moe", "neox", norms_rotated=True, routing=SOFTMAX),
    Architecture("hunyuan_vl", "neox", sections=True, axes="sections", norms_rotated=True),
    Architecture("hy_v3", "neox", ffn_scales=True, qk_norm=True, routing=SCALED_SIGMOID),  # Hunyuan 3
    Architecture("internlm2", "interleaved"),
    Architecture("jais2", "neox", "relu2", norm="layer", ffn="plain"),
    Architecture(
        "jamba", "interleaved", no_rope_every=1, recurrent=Recurrent("mamba", "without_heads"),
        routing=ExpertGating("softmax", False),
    ),
    Architecture(
        "kimi-linear", None, ignored=QKV_EXTRAS, cache="latent", recurrent=Recurrent("kda", "without_heads"),
        routing=ExpertGating("sigmoid", True, from_file="scaled"),
    ),
    Architecture(
        "laguna", "neox", ignored=("attn_gate.scale",), qk_norm=True, gated="softplus",
        sliding=Sliding(4, first=True, stretched=False), routing=FILE_SIGMOID,
    ),
    Architecture(
        "lfm2", "neox", qk_norm=True, output_norm="token_embd_norm", recurrent=Recurrent("short_conv", "without_heads"),
        sliding=Sliding(0),
    ),
    Architecture(
        "lfm2moe", "neox", qk_norm=True, output_norm="token_embd_norm",
        recurrent=Recurrent("short_conv", "without_heads"), sliding=Sliding(0),
        routing=ExpertGating("sigmoid", True, from_file="gating"),
    ),
    Architecture(  # LLaDA 8B, LLaDA 1.5
        "llada", "interleaved", diffusion=True, ignored=("rope_freqs.weight", "attn_output.bias", *FFN_BIASES),
    ),
    Architecture(
        "llada-moe", "neox", diffusion=True, qk_norm=True, ignored=("attn_output.bias",),
        routing=ExpertGating("softmax", False),
    ),
    # Llama Embed Nemotron
    Architecture("llama-embed", "interleaved", ffn_scales=True, encoder=True, routing=SCALED_SOFTMAX),
    Architecture("maincoder", "interleaved", qk_norm=True, norms_rotated=True),
    Architecture(
        "maple", "neox", qk_norm=True, limits="swiglu_clamp", sliding=Sliding(0, only_rope=True), routing=SOFTMAX,
    ),
    Architecture("mellum", "neox", qk_norm=True, sliding=Sliding(4, stretched=False), routing=SCALED_SOFTMAX),
    Architecture(
        "minimax-m2", "neox", ignored=("attn_output.bias",), qk_norm=True,
        routing=ExpertGating("sigmoid", True, from_file="gating"),
    ),
    # Mistral Small 3.1 and later, Ministral 3
    Architecture("mistral3", "interleaved", ffn_scales=True, routing=SCALED_SOFTMAX),
    # Mistral Large 3, Mistral Small 4
    Architecture("mistral4", "interleaved", cache="latent", yarn_scores=True, routing=FILE_SOFTMAX),
    Architecture("mpt", None, "gelu", norm="layer", ffn="plain", clamp=True, alibi=0.0),
    Architecture("nemotron", "neox", "relu2", norm="layer", ffn="plain"),  # Nemotron 4, Minitron
    Architecture("neo-bert", "interleaved", encoder=True, ffn="fused", output_norm="enc.output_norm"),
    Architecture("olmo", "interleaved", norm="layer", norm_weights=False, clamp=True),  # OLMo 1
    Architecture(  # also OLMo 3
        "olmo2", "neox", qk_norm=True, attention_norm="", ffn_norm="", post_norms=True,
        sliding=Sliding(4, stretched=False),
    ),
    Architecture("olmoe", "neox", qk_norm=True, routing=ExpertGating("softmax", False)),
    Architecture("openelm", "neox", qk_norm=True, ignored=("attn_qkv.scale",)),
    Architecture("orion", "neox", norm="layer"),
    Architecture("paddleocr", "neox", axes="sections", ignored=("expert_count",)),
    Architecture("pangu-embedded", "neox", ignored=("rope_freqs.weight",)),  # openPangu
    Architecture("phi2", "neox", "gelu", norm="layer", ffn="plain", ffn_norm="attn_norm", parallel=True),  # Phi 2
    Architecture("phi3", "neox", ffn="fused"),  # Phi 3, 3.5 and 4
    # Phi 3.5 MoE
    Architecture("phimoe", "neox", norm="layer", rms_eps=True, routing=ExpertGating("sparse_mixer", False)),
    Architecture("plamo", "neox", ffn_norm="attn_norm", parallel=True),
    Architecture(
        "plamo3", "neox", ignored=("attn_qkv.scale",), ffn="fused", post_norms=True,
        sliding=Sliding(8, stretched=False, rope_base=10000.0),
    ),
    Architecture("plm", "interleaved", "relu2", ffn="plain", cache="latent"),
    Architecture("pockettts", "interleaved", "gelu", norm="layer", ffn="plain"),
    Architecture("qwen2", "neox"),
    Architecture("qwen2moe", "neox", routing=ExpertGating("softmax", False)),
    Architecture("qwen3", "neox", ffn_scales=True, qk_norm=True),
    Architecture("qwen3moe", "neox", ffn_scales=True, qk_norm=True, routing=SCALED_SOFTMAX),
    Architecture("qwen3vl", "neox", qk_norm=True, axes="interleaved"),
    Architecture("qwen3vlmoe", "neox", qk_norm=True, routing=SOFTMAX, axes="interleaved"),
    Architecture("refact", None, ignored=("attn_output.bias", *FFN_BIASES), alibi=8.0),
    Architecture("rnd1", "neox", ffn_scales=True, diffusion=True, qk_norm=True, routing=SOFTMAX),
    Architecture("seed_oss", "neox", ffn_norm="post_attention_norm"),
    Architecture("smollm3", "interleaved", no_rope_every=4),
    Architecture("spark2_5", "neox", "gelu", ignored=("attn_gate.scale",), gated="sigmoid", sliding=Sliding(0)),
    Architecture("starcoder", None, "gelu", norm="layer", ffn="plain"),  # also SantaCoder
    Architecture("starcoder2", "neox", "gelu", norm="layer", ffn="plain"),
    Architecture("xverse", "interleaved"),
)  # fmt: skip

_ALL = {row.name: row for row in (*PLAIN, *ROWS)}
ARCHITECTURES: dict[str, Architecture] = {name: _ALL[name] for name in ("llama", *sorted(_ALL.keys() - {"llama"}))}
