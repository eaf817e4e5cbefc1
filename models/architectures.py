"""The supported architectures: one entry each, with only the properties that are not in the GGUF.

`models.architecture` explains the fields. Biases, q/k norms, sinks, fused and shared matrices, tied output, head sizes
and rope frequency factors are determined by the GGUF. To add an architecture that fits `models.forward`, add an entry.
Llama comes first; the others are sorted by name.
"""

from __future__ import annotations

from functools import partial

from localllm.models.architecture import Architecture, ExpertGating, Indexer, Multipliers, Recurrent, Sliding

COHERE = Multipliers("multiplied")
QKV_EXTRAS = tuple([f"attn_{which}.{what}" for which in "qkv" for what in ("bias", "scale")])
FFN_BIASES = ("ffn_gate.bias", "ffn_up.bias", "ffn_down.bias")
GRANITE = Multipliers(switch=True)
_bert = partial(  # encoders with norms after the residual add
    Architecture, encoder=True, norm="layer", attention_norm="", ffn_norm="", output_norm="",
    sum_norms=True, attention_post_norm="attn_output_norm", ffn_post_norm="layer_output_norm",
)  # fmt: skip
_t5 = partial(
    Architecture, rope_style=None, activation="gelu", ungated="relu", stack="enc", ffn="found",
    distances=True, score_scale=1.0, output_norm="enc.output_norm",
)  # fmt: skip

_ROWS = (
    Architecture(  # Llama 1-3, Mistral 7B, Nemo and Small, Mixtral, TinyLlama, SmolLM 1-2, Yi, ...
        "llama", "interleaved", ffn_scales=True, routing=ExpertGating("softmax", True, scales=True),
    ),
    Architecture(  # Trinity
        "afmoe", "neox", ignored=("attn_gate.scale",), qk_norm=True, root_width_embedding=True,
        post_norms=True, gated="sigmoid", no_rope_every=4, sliding=Sliding(4),
        routing=ExpertGating("sigmoid", False, from_file=True),
    ),
    Architecture(
        "apertus", "neox", "xielu", ffn="plain", qk_norm=True, attention_scale=True,
    ),
    Architecture("arcee", "interleaved", "relu2", ffn="plain", attention_scale=True),  # AFM 4.5B
    Architecture(
        "arctic", "interleaved", ignored=("attn_output.bias",),
        routing=ExpertGating("softmax", True, norm="ffn_norm_exps", dense=True),
    ),
    Architecture("arwkv7", None, recurrent=Recurrent("rwkv7", "all")),  # ARWKV
    Architecture(  # 7B is rotated, 13B has ALiBi
        "baichuan", "interleaved", ignored=("attn_output.bias",), rope_depth=32, alibi=8.0,
        alibi_depth=40,
    ),
    Architecture(  # Ling
        "bailingmoe", "interleaved", routing=ExpertGating("softmax", False, from_file=True),
    ),
    Architecture(  # Ling 2.0
        "bailingmoe2", "neox", qk_norm=True,
        routing=ExpertGating("softmax", False, from_file=True),
    ),
    Architecture(  # Ling 3
        "bailingmoe3", "interleaved", sections=True, gated="sigmoid", latent=True,
        limits="silu_clamp",
        ignored=(*QKV_EXTRAS, "attn_output.scale"),
        recurrent=Recurrent("kda", "without_heads", bounded="slopes"),
        routing=ExpertGating("sigmoid", False, from_file=True),
    ),
    _bert("bert", None, "gelu", ffn="plain"),  # BGE, E5, MiniLM, XLM-RoBERTa, BGE rerankers, ...
    Architecture("bitnet", "neox", ffn_scales=True),
    Architecture("bloom", None, "gelu", norm="layer", ffn="plain", alibi=8.0),
    Architecture(  # text part only
        "chameleon", "interleaved", ignored=("attn_output.bias",), qk_norm=True, head_norm_eps=1e-5,
        swin=True, attention_post_norm="attn_norm", ffn_post_norm="ffn_norm", silent=(4, 8196),
    ),
    Architecture("chatglm", "interleaved", ffn="fused"),  # ChatGLM 2 and 3, GLM 4 9B of 2024
    Architecture("codeshell", "neox", "gelu", norm="layer", ffn="plain"),
    Architecture("cogvlm", "neox", ignored=("rope_freqs.weight", "attn_qkv.scale")),  # text part only
    Architecture(  # Command R7B, Command A, Aya Expanse
        "cohere2", "interleaved", ffn_scales=True,
        norm="layer", ffn_norm="attn_norm", parallel=True, multipliers=COHERE,
        sliding=Sliding(4, only_rope=True),
    ),
    Architecture(  # North
        "cohere2moe", "interleaved", ffn_scales=True,
        norm="layer", norm_by_eps=True, ffn_norm="attn_norm", parallel=True,
        multipliers=COHERE, lead_rotated=True, sliding=Sliding(4, first=True, only_rope=True),
        routing=ExpertGating("sigmoid", False, from_file=True, scales=True, sum_scale=0.5),
    ),
    Architecture(  # Command R and R+
        "command-r", "interleaved", norm="layer", ffn_norm="attn_norm", parallel=True,
        multipliers=COHERE,
    ),
    Architecture(
        "dbrx", "neox", norm="layer", ffn_norm="attn_output_norm", clamp=True,
        routing=ExpertGating("softmax", True),
    ),
    Architecture("deci", "interleaved"),  # Nemotron models made by pruning Llama
    Architecture(  # DeepSeek MoE 16B
        "deepseek", "interleaved", routing=ExpertGating("softmax", False, from_file=True),
    ),
    Architecture(  # DeepSeek V2, V3 and R1, Kimi K2, GLM 4.7 Flash
        "deepseek2", "interleaved", latent=True, yarn_scores=True,
        routing=ExpertGating("softmax", False, from_file=True, biased="sigmoid"),  # GLM GGUFs may lack the gating key
    ),
    Architecture(  # text part only; GGUFs set `rope.dimension_count` to 0
        "deepseek2-ocr", "neox", ignored=("rope.dimension_count",),
        routing=ExpertGating("softmax", False, from_file=True),
    ),
    Architecture(  # DeepSeek 3.2
        "deepseek32", "interleaved", ffn_scales=True, latent=True, yarn_scores=True, indexer=Indexer("neox", "all"),
        routing=ExpertGating("softmax", False, from_file=True, scales=True),
    ),
    Architecture(  # DeepSeek 4
        "deepseek4", "interleaved", ignored=("exp_probs_b_vl.bias",), compressed=True,
        connections="mixed",
        limits="swiglu_clamp", limits_of_all=True, sliding=Sliding(0, stretched=False),
        indexer=Indexer("interleaved", "all", compressed=True),
        routing=ExpertGating("sqrt_softplus", False, from_file=True),
    ),
    Architecture(  # dots.llm1
        "dots1", "neox", qk_norm=True, routing=ExpertGating("sigmoid", False, from_file=True),
    ),
    Architecture(
        "dots3note", "interleaved", ffn_scales=True,
        latent=True, gated="sigmoid", ignored=("attn_gate.scale",), sliding=Sliding(0),
        indexer=Indexer("neox", "full"), routing=ExpertGating("sigmoid", False, from_file=True, scales=True),
    ),
    Architecture("dream", "neox", ignored=("output.bias",), diffusion=True),
    Architecture("ernie4_5", "interleaved", ignored=("attn_output.bias", "expert_count")),
    Architecture(
        "ernie4_5-moe", "interleaved", ignored=("attn_output.bias",),
        routing=ExpertGating("softmax", True),
    ),
    Architecture("eurobert", "neox", encoder=True),
    Architecture("exaone", "neox"),  # EXAONE 3 and 3.5
    Architecture(
        "exaone-moe", "neox", qk_norm=True, sliding=Sliding(4, window=128, only_rope=True),
        routing=ExpertGating("sigmoid", False, from_file=True),
    ),
    Architecture(
        "exaone4", "neox", qk_norm=True, attention_norm="", ffn_norm="", post_norms=True,
        sliding=Sliding(4, window=4096, only_rope=True, depth=64),
    ),
    Architecture(  # Falcon 7B and 40B
        "falcon", "neox", "gelu", norm="layer", ffn="plain", ffn_norm="attn_norm", parallel=True,
    ),
    Architecture(
        "falcon-h1", "neox", ignored=("rope_freqs.weight", "attn_output.bias"),
        recurrent=Recurrent("mamba2", "beside"),
    ),
    Architecture("gemma", "neox", "gelu", root_width_embedding=True),
    Architecture(  # EmbeddingGemma
        "gemma-embedding", "neox", "gelu", encoder=True, root_width_embedding=True, post_norms=True,
        qk_norm=True, sliding=Sliding(6, stretched=False, rope_base=10000.0, both_ways=True),
    ),
    Architecture(
        "gemma2", "neox", "gelu", root_width_embedding=True, post_norms=True, wide_scores=46,
        attention_softcap=50.0, logit_softcap=30.0, sliding=Sliding(2, window=4096),
    ),
    Architecture(
        "gemma3", "neox", "gelu", root_width_embedding=True, post_norms=True, wide_scores=62,
        qk_norm=True, logit_softcap=0.0, sliding=Sliding(6, stretched=False, rope_base=10000.0),
    ),
    Architecture(
        "gemma3n", "neox", "gelu", root_width_embedding=True, score_scale=1.0, qk_norm=True,
        value_norm=True, kv_layers=20, per_layer_inputs=True, altup=True, logit_softcap=30.0,
        ignored=("rope_freqs.weight",), sliding=Sliding(5, stretched=False, rope_base=10000.0),
    ),
    Architecture(
        "gemma4", "neox", "gelu", root_width_embedding=True, post_norms=True, score_scale=1.0,
        qk_norm=True, value_norm=True, keys_as_values=True, kv_layers=0, per_layer_inputs=True, logit_softcap=0.0,
        sliding=Sliding(6, stretched=False, factors=False, rope_base=10000.0),
        routing=ExpertGating("softmax", True, scales=True, activation="gelu", beside=True),
    ),
    Architecture(  # GLM 5 to 5.2
        "glm-dsa", "interleaved", ffn_scales=True,
        latent=True, yarn_scores=True, indexer=Indexer("interleaved", "types"),
        routing=ExpertGating("sigmoid", False, from_file=True, scales=True),
    ),
    Architecture("glm4", "interleaved", sections=True, ffn="fused", post_norms=True),
    Architecture(
        "glm4moe", "neox", ffn_norm="post_attention_norm",
        routing=ExpertGating("sigmoid", False, from_file=True),
    ),
    Architecture(  # GLM 5.3 Flash
        "glm5-next", None, ignored=(*QKV_EXTRAS, "attn_output.scale"), latent=True,
        indexer=Indexer("interleaved", "types", "layer", pooled=True), connections="mixed", limits="swiglu_clamp",
        limits_of_all=True,
        recurrent=Recurrent("kda", "without_heads", bounded="negative", unit_eps=1e-6),
        routing=ExpertGating("sigmoid", False, from_file=True),
    ),
    Architecture(
        "gpt-oss", "neox", ffn_scales=True, ffn_norm="post_attention_norm", sliding=Sliding(2, window=128),
        routing=ExpertGating("softmax_of_chosen", False, activation="swiglu_oai"),
    ),
    Architecture("gpt2", None, "gelu", norm="layer", ffn="plain"),
    Architecture(  # Pythia, GPT-NeoX 20B
        "gptneox", "neox", "gelu", parallel_key=True, norm="layer", ffn="plain",
    ),
    Architecture(
        "granite", "interleaved", multipliers=GRANITE, attention_scale=True,
        routing=ExpertGating("softmax", True),
    ),
    Architecture(
        "granite_swa", "interleaved", multipliers=Multipliers(), attention_scale=True,
        sliding=Sliding(0),
        rope_pattern=True, shared_fused=True, routing=ExpertGating("softmax", True),
    ),
    Architecture(  # Granite 4.0 H
        "granitehybrid", "interleaved", multipliers=GRANITE, attention_scale=True,
        recurrent=Recurrent("mamba2", "without_heads"), routing=ExpertGating("softmax", True),
    ),
    Architecture(
        "granitemoe", "interleaved", multipliers=Multipliers(), attention_scale=True,
        routing=ExpertGating("softmax", True),
    ),
    Architecture(  # Grok 1 and 2
        "grok", "neox", "gelu", post_norms=True, attention_post_norm="attn_output_norm",
        ffn_post_norm="layer_output_norm", attention_scale=True, score_scale_key="attention.output_scale",
        attention_softcap=30.0, logit_softcap=0.0,
        multipliers=Multipliers("multiplied", 78.38367176906169, logit=0.5773502691896257),
        routing=ExpertGating("softmax", True, activation="gelu", dense=True, sum_scale=0.5**0.5),
    ),
    Architecture(
        "grovemoe", "neox", qk_norm=True, routing=ExpertGating("softmax", True, adjugate=True),
    ),
    Architecture(  # HRM-Text, DFM Mimir
        "hrm_text", "neox", ignored=("attn_gate.scale",), norm_weights=False, gated="sigmoid",
        multipliers=Multipliers(), stacks=True,
    ),
    Architecture("hunyuan-dense", "neox", norms_rotated=True),
    Architecture("hunyuan-moe", "neox", norms_rotated=True, routing=ExpertGating("softmax", True)),
    Architecture("hunyuan_vl", "neox", sections=True, norms_rotated=True),  # text part only
    Architecture(  # Hunyuan 3
        "hy_v3", "neox", ffn_scales=True,
        qk_norm=True, routing=ExpertGating("sigmoid", False, from_file=True, scales=True),
    ),
    Architecture(  # Hunyuan 4
        "hy_v4", "interleaved",
        ignored=("attn_output.scale", "attn_gate.scale", "swiglu_clamp_shexp"),
        latent=True, indexer=Indexer("interleaved", "types", "rms", trailing=True, optional=True), gated="sigmoid",
        connections="independent", limits="swiglu_clamp",
        routing=ExpertGating("sigmoid", False, from_file=True),
    ),
    Architecture("internlm2", "interleaved"),
    Architecture("jais", None, norm="layer", alibi=0.0, scores_by_width=True),
    Architecture("jais2", "neox", "relu2", norm="layer", ffn="plain"),
    Architecture(
        "jamba", "interleaved", no_rope_every=1, recurrent=Recurrent("mamba", "without_heads"),
        routing=ExpertGating("softmax", False),
    ),
    _bert("jina-bert-v2", None, "gelu", ffn="found", alibi=8.0),
    _bert("jina-bert-v3", "neox", "gelu", ffn="plain"),
    Architecture(
        "kimi-k3", None, gated="sigmoid", latent=True, limits="situ", checkpoints=True,
        ignored=(*QKV_EXTRAS, "attn_output.scale"),
        recurrent=Recurrent("kda", "without_heads", bounded="negative"),
        routing=ExpertGating("sigmoid", False, from_file=True),
    ),
    Architecture(
        "kimi-linear", None, ignored=QKV_EXTRAS, latent=True,
        recurrent=Recurrent("kda", "without_heads"), routing=ExpertGating("sigmoid", True, from_file="scaled"),
    ),
    Architecture(
        "laguna", "neox", ignored=("attn_gate.scale",), qk_norm=True, gated="softplus",
        sliding=Sliding(4, first=True, stretched=False), routing=ExpertGating("sigmoid", False, from_file=True),
    ),
    Architecture(
        "lfm2", "neox", qk_norm=True, output_norm="token_embd_norm",
        recurrent=Recurrent("short_conv", "without_heads"), sliding=Sliding(0),
    ),
    Architecture(
        "lfm2moe", "neox", qk_norm=True, output_norm="token_embd_norm",
        recurrent=Recurrent("short_conv", "without_heads"), sliding=Sliding(0),
        routing=ExpertGating("sigmoid", True, from_file="gating"),
    ),
    Architecture(  # LLaDA 8B, LLaDA 1.5
        "llada", "interleaved", diffusion=True,
        ignored=("rope_freqs.weight", "attn_output.bias", *FFN_BIASES),
    ),
    Architecture(
        "llada-moe", "neox", diffusion=True, qk_norm=True, ignored=("attn_output.bias",),
        routing=ExpertGating("softmax", False),
    ),
    Architecture(  # Llama Embed Nemotron
        "llama-embed", "interleaved", ffn_scales=True, encoder=True, routing=ExpertGating("softmax", True, scales=True),
    ),
    Architecture(  # text part only
        "llama4", "interleaved", attention_scale=True, norms_rotated=True, unit_qk_norm=True,
        unit_qk_norm_but=128, no_rope_every=4, unrotated_temperature=(0.1, 8192),
        sliding=Sliding(4, window=8192, chunked=True),
        routing=ExpertGating("sigmoid_of_chosen", False, from_file=True, weighted_input=True),
    ),
    Architecture("maincoder", "interleaved", qk_norm=True, norms_rotated=True),
    Architecture(  # also Falcon Mamba
        "mamba", "interleaved", ffn_scales=True, recurrent=Recurrent("mamba", "all", alone=True),
    ),
    Architecture("mamba2", "interleaved", ffn_scales=True, recurrent=Recurrent("mamba2", "all", alone=True)),
    Architecture(
        "maple", "neox", qk_norm=True, limits="swiglu_clamp", sliding=Sliding(0, only_rope=True),
        routing=ExpertGating("softmax", True),
    ),
    Architecture(
        "mellum", "neox", qk_norm=True, sliding=Sliding(4, stretched=False),
        routing=ExpertGating("softmax", True, scales=True),
    ),
    Architecture(  # MiMo V2
        "mimo2", "neox", heads_norm=False, ignored=QKV_EXTRAS, value_scale=True,
        sliding=Sliding(0, stretched=False, rope_base=10000.0), routing=ExpertGating("sigmoid", True),
    ),
    Architecture(  # MiniCPM 1 and 2
        "minicpm", "interleaved", multipliers=Multipliers("divided", 12.0, 1.4, 256),
        attention_scale=True, routing=ExpertGating("softmax", True),
    ),
    Architecture(
        "minicpm3", "neox", latent=True,
        multipliers=Multipliers("multiplied", 12.0, 1.4, 256, from_file=False),
    ),
    Architecture(
        "minimax-01", "neox", multipliers=Multipliers(), normed_residual=True,
        recurrent=Recurrent("lightning", "interval", interval=8), routing=ExpertGating("softmax", True),
    ),
    Architecture(
        "minimax-m2", "neox", ignored=("attn_output.bias",), qk_norm=True,
        routing=ExpertGating("sigmoid", True, from_file="gating"),
    ),
    Architecture(
        "minimax-m3", "neox", qk_norm=True, unit="swiglu_oai", indexer=Indexer("neox", "routed"),
        routing=ExpertGating("sigmoid", False, from_file=True, activation="swiglu_oai"),
    ),
    Architecture(  # Mistral Small 3.1 and later, Ministral 3
        "mistral3", "interleaved", ffn_scales=True, routing=ExpertGating("softmax", True, scales=True),
    ),
    Architecture(  # Mistral Large 3, Mistral Small 4
        "mistral4", "interleaved", latent=True, yarn_scores=True,
        routing=ExpertGating("softmax", False, from_file=True),
    ),
    Architecture(  # ModernBERT, Granite Embedding R2
        "modern-bert", "neox", "gelu", encoder=True, norm="layer", ffn="fused", bare_start=True,
        classifier_pooling="mean", activation_key=True, sliding=Sliding(3, first=True, both_ways=True),
    ),
    Architecture("mpt", None, "gelu", norm="layer", ffn="plain", clamp=True, alibi=0.0),
    Architecture(
        "muse-glimmer", "interleaved", ignored=("attn_gate.scale",), qk_norm=True,
        embedding_norm=True,
        post_norm_eps=1e-08, post_norms=True, gated="sigmoid", logit_softcap=0.0, multipliers=COHERE,
        sliding=Sliding(4, only_rope=True),
    ),
    Architecture("nanbeige", "interleaved", ffn_scales=True, loops=True),
    Architecture("nemotron", "neox", "relu2", norm="layer", ffn="plain"),  # Nemotron 4, Minitron
    Architecture(
        "nemotron_h", "neox", "relu2", ffn_scales=True, ffn="plain", no_rope_every=1,
        recurrent=Recurrent("mamba2", "without_heads", alone=True),
    ),
    Architecture(  # Nemotron 3
        "nemotron_h_moe", "neox", "relu2", ffn_scales=True, ffn="plain", no_rope_every=1,
        recurrent=Recurrent("mamba2", "without_heads", alone=True),
        routing=ExpertGating("sigmoid", False, from_file=True, scales=True, activation="relu"),
    ),
    Architecture("neo-bert", "interleaved", encoder=True, ffn="fused", output_norm="enc.output_norm"),
    _bert("nomic-bert", "neox"),  # Nomic Embed 1 and 1.5
    _bert(  # Nomic Embed 2
        "nomic-bert-moe", "neox", "gelu", ffn="plain",
        routing=ExpertGating("softmax", False, activation="gelu_alone"),
    ),
    Architecture("olmo", "interleaved", norm="layer", norm_weights=False, clamp=True),  # OLMo 1
    Architecture(  # also OLMo 3
        "olmo2", "neox", qk_norm=True, attention_norm="", ffn_norm="", post_norms=True,
        sliding=Sliding(4, stretched=False),
    ),
    Architecture("olmoe", "neox", qk_norm=True, routing=ExpertGating("softmax", False)),
    Architecture("openelm", "neox", qk_norm=True, ignored=("attn_qkv.scale",)),
    Architecture("orion", "neox", norm="layer"),
    Architecture("paddleocr", "neox", ignored=("expert_count",)),  # text part only
    Architecture("pangu-embedded", "neox", ignored=("rope_freqs.weight",)),  # openPangu
    Architecture(  # Phi 2
        "phi2", "neox", "gelu", norm="layer", ffn="plain", ffn_norm="attn_norm", parallel=True,
    ),
    Architecture("phi3", "neox", ffn="fused"),  # Phi 3, 3.5 and 4
    Architecture(  # Phi 3.5 MoE
        "phimoe", "neox", norm="layer", rms_eps=True, routing=ExpertGating("sparse_mixer", False),
    ),
    Architecture("plamo", "neox", ffn_norm="attn_norm", parallel=True),
    Architecture(
        "plamo2", "neox", ignored=("attn_qkv.scale", "ssm_in.scale", "ssm_out.scale"), ffn="fused",
        post_norms=True, recurrent=Recurrent("plamo2", "without_heads"),
    ),
    Architecture(
        "plamo3", "neox", ignored=("attn_qkv.scale",), ffn="fused", post_norms=True,
        sliding=Sliding(8, stretched=False, rope_base=10000.0),
    ),
    Architecture("plm", "interleaved", "relu2", ffn="plain", latent=True),
    Architecture("pockettts", "interleaved", "gelu", norm="layer", ffn="plain"),
    Architecture("qwen", "neox", halves=True),  # Qwen 1
    Architecture("qwen2", "neox"),
    Architecture("qwen2moe", "neox", routing=ExpertGating("softmax", False)),
    Architecture("qwen2vl", "neox", eps=1e-6, ignored=("output.bias",)),  # text part only
    Architecture("qwen3", "neox", ffn_scales=True, qk_norm=True),
    Architecture(
        "qwen35", "neox", ffn_scales=True, qk_norm=True, ffn_norm="post_attention_norm", query_gate=True,
        recurrent=Recurrent("delta_net", "interval"),
    ),
    Architecture(
        "qwen35moe", "neox", ffn_scales=True, qk_norm=True, ffn_norm="post_attention_norm", query_gate=True,
        recurrent=Recurrent("delta_net", "interval"), routing=ExpertGating("softmax", True, scales=True),
    ),
    Architecture("qwen3moe", "neox", ffn_scales=True, qk_norm=True, routing=ExpertGating("softmax", True, scales=True)),
    Architecture(
        "qwen3next", "neox", ffn_scales=True,
        ignored=("attn_qkv.scale", "attn_gate.scale", "ssm_out.scale"), qk_norm=True,
        ffn_norm="post_attention_norm", query_gate=True,
        recurrent=Recurrent("delta_net", "interval"), routing=ExpertGating("softmax", True, scales=True),
    ),
    Architecture(  # the language model of Qwen3-TTS, which generates speech codes from text
        "qwen3tts", "neox", qk_norm=True, narrow_output=True,
    ),
    Architecture("qwen3vl", "neox", qk_norm=True),  # text part only
    Architecture(  # text part only
        "qwen3vlmoe", "neox", qk_norm=True, routing=ExpertGating("softmax", True),
    ),
    Architecture(  # Qwen 4 Experimental
        "qwen4exp", "neox", ffn_scales=True, ignored=tuple([f"attn_{which}.bias" for which in "qkv"]), qk_norm=True,
        attention_norm="", ffn_norm="", output_norm="", query_gate=True, connections="low_rank", ngrams=True,
        indexer=Indexer("neox", "ratios", pooled=True),
        recurrent=Recurrent("delta_net", "interval", gate="sigmoid"),
        routing=ExpertGating("softmax", True, scales=True),
    ),
    Architecture("refact", None, ignored=("attn_output.bias", *FFN_BIASES), alibi=8.0),
    Architecture("rnd1", "neox", ffn_scales=True, diffusion=True, qk_norm=True, routing=ExpertGating("softmax", True)),
    Architecture(  # RWKV-6 Finch
        "rwkv6", None, "relu2", ffn_scales=True, norm="layer", ffn="plain", ffn_norm="attn_norm_2",
        recurrent=Recurrent("rwkv6", "all", channel_mix=True),
    ),
    Architecture("rwkv6qwen2", None, recurrent=Recurrent("rwkv6", "all")),  # QRWKV6
    Architecture(  # RWKV-7 Goose
        "rwkv7", None, "relu2", ffn_scales=True, norm="layer", ffn="plain", ffn_norm="attn_norm_2",
        recurrent=Recurrent("rwkv7", "all", channel_mix=True),
    ),
    Architecture("seed_oss", "neox", ffn_norm="post_attention_norm"),
    Architecture(
        "smallthinker", "neox", sliding=Sliding(4, first=True, only_rope=True),
        routing=ExpertGating("softmax", True, from_file="gating", activation="relu", router="unnormed"),
    ),
    Architecture("smollm3", "interleaved", no_rope_every=4),
    Architecture(
        "spark2_5", "neox", "gelu", ignored=("attn_gate.scale",), gated="sigmoid",
        sliding=Sliding(0),
    ),
    Architecture("stablelm", "neox", norm="layer"),
    Architecture("starcoder", None, "gelu", norm="layer", ffn="plain"),  # also SantaCoder
    Architecture("starcoder2", "neox", "gelu", norm="layer", ffn="plain"),
    Architecture(  # Step 3.5
        "step35", "neox", heads_norm=False, gated="sigmoid", limits="silu_clamp",
        sliding=Sliding(0, stretched=False, half=True, factors=False, rope_base=10000.0),
        routing=ExpertGating("sigmoid", False, from_file=True),
    ),
    _t5("t5", decoder="dec.output_norm"),  # T5, Flan-T5, MADLAD-400, ...
    _t5("t5encoder", encoder=True),  # Sentence-T5, GTR, the text encoders of Stable Diffusion 3 and FLUX
    Architecture(
        "talkie", "neox", ffn_scales=True,
        ignored=("ffn_gate.scale", "ffn_up.scale"), norm_weights=False, embedding_norm=True,
        norms_rotated=True, unit_qk_norm=True, embedding_skip=True, multipliers=COHERE,
    ),
    Architecture("xverse", "interleaved"),
)  # fmt: skip

ARCHITECTURES: dict[str, Architecture] = {row.name: row for row in _ROWS}
