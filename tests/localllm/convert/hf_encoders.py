"""Settings of tiny encoders, embedding models and T5 models, which `hf_make` builds with transformers."""

from __future__ import annotations

from typing import Any

from tests.localllm.convert.hf_settings import COMMON, CONTEXT, WINDOW, Tiny
from tests.localllm.convert.hf_tokenizers import VOCABULARY

_SIZES = {**COMMON, "intermediate_size": 48, "max_position_embeddings": CONTEXT, "initializer_range": 0.4}
del _SIZES["num_key_value_heads"]
_MODERN = {
    "num_hidden_layers": 5, "local_attention": WINDOW, "global_attn_every_n_layers": 3, "cls_token_id": 1,
    "sep_token_id": 2,
}  # fmt: skip


def _encoder(program: str, tokenizer: str, pooling: str = "", **settings: Any) -> Tiny:
    kind = program.partition("For")[0].removesuffix("Model") + "Config"
    return Tiny(kind, {**_SIZES, **settings}, tokenizer, program, pooling)


def _t5(program: str, **settings: Any) -> Tiny:
    sizes = {
        "vocab_size": VOCABULARY, "d_model": 32, "d_kv": 12, "d_ff": 48, "num_layers": 2, "num_heads": 4,
        "initializer_factor": 1.0, "decoder_start_token_id": 0,
    }  # fmt: skip
    return Tiny(program.partition("T5")[0] + "T5Config", {**sizes, **settings}, "t5", program)


ENCODERS: dict[str, Tiny] = {
    "bert": _encoder("BertModel", "wordpiece", "cls"),
    "bert-masked": _encoder("BertForMaskedLM", "wordpiece"),
    "bert-rank": _encoder("BertForSequenceClassification", "wordpiece", num_labels=3),
    "distilbert": _encoder("DistilBertModel", "wordpiece", "mean", dim=32, hidden_dim=48, n_layers=2, n_heads=4),
    "roberta": _encoder("RobertaModel", "roberta", "mean"),
    "roberta-rank": _encoder("RobertaForSequenceClassification", "roberta", num_labels=1),
    "xlm-roberta": _encoder("XLMRobertaModel", "unigram", "cls"),
    "xlm-roberta-rank": _encoder("XLMRobertaForSequenceClassification", "unigram", num_labels=1),
    "nomic-bert": _encoder("NomicBertModel", "wordpiece", "mean"),
    "modern-bert": _encoder("ModernBertModel", "roberta", "mean", **_MODERN),
    "modern-bert-silu": _encoder(
        "ModernBertForMaskedLM", "roberta", "cls", **_MODERN, hidden_activation="silu", norm_bias=True, mlp_bias=True,
        attention_bias=True,
    ),
    "modern-bert-rank": _encoder(
        "ModernBertForSequenceClassification", "roberta", **_MODERN, num_labels=1, classifier_pooling="mean",
    ),
    "jina-bert-v3": _encoder("JinaEmbeddingsV3Model", "unigram", "mean"),
    "jina-bert-v3-rank": _encoder("JinaEmbeddingsV3ForSequenceClassification", "unigram", num_labels=1),
    "eurobert": _encoder("EuroBertModel", "llama3", "mean", num_key_value_heads=2, mask_token_id=3),
    "gemma-embedding": _encoder(
        "Gemma3TextModel", "spm", "mean", head_dim=16, num_key_value_heads=2, query_pre_attn_scalar=16,
        sliding_window=WINDOW, num_hidden_layers=7, use_bidirectional_attention=True,
    ),
    "qwen3-embedding": _encoder("Qwen3ForCausalLM", "qwen2", "lasttoken", head_dim=16, num_key_value_heads=2),
    "qwen3-rank": _encoder(
        "Qwen3ForSequenceClassification", "qwen2", head_dim=16, num_key_value_heads=2, num_labels=1,
    ),
}  # fmt: skip
T5: dict[str, Tiny] = {
    "t5": _t5("T5ForConditionalGeneration", num_decoder_layers=3),
    "t5-gated": _t5("T5ForConditionalGeneration", feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    "t5-mt5": _t5("MT5ForConditionalGeneration"),
    "t5-umt5": _t5("UMT5ForConditionalGeneration"),
    "t5encoder": _t5("T5EncoderModel"),
    "t5encoder-mt5": _t5("MT5EncoderModel"),
    "t5encoder-umt5": _t5("UMT5EncoderModel"),
}
DENSE_LAYERS = {"gemma-embedding": (40, 32), "lfm2-colbert": (12,)}  # output widths of the dense layers behind
