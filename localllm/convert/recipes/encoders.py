"""The recipes of encoders. The gguf package maps the tensor names. Classes with a classifier become rerankers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from localllm.convert import tensor as t
from localllm.convert.changes import of_groups
from localllm.convert.hf_config import HfConfig
from localllm.convert.modules import dense_keys
from localllm.convert.recipe import Key, Layer, Raw, Recipe, Tensors, integer, unchanged, without
from localllm.convert.recipes.gemma import GEMMA3_DEFAULTS, score_scale
from localllm.convert.recipes.shared import NOT_ROTATED, by_head
from localllm.convert.tensor import LazyTensor

# llama.cpp requires this key even of models without token types, such as DistilBERT.
_NO_TYPES = {"tokenizer.ggml.token_type_count": 1}
_CLS, _RANK = 2, 4  # GGUF pooling types: the first token's hidden state; the classifier's input
_BERT_FIXED = {"position_embedding_type": "absolute", "is_decoder": False}
_MASKED = without(
    *(
        model + head
        for model in ("", "bert.", "roberta.", "camembert.", "nomic_bert.")
        for head in ("cls.", "lm_head.", "pooler.")
    )
)  # the masked-LM head, and a pooler that embeddings do not use


def _labels(config: HfConfig) -> list[str] | None:
    """Return the labels of a classifier with several scores, in order."""
    table = config.table("id2label")
    if len(table) < 2 or not all(key.isdecimal() and len(key) < 10 for key in table):
        return None
    return [str(table[key]) for key in sorted(table, key=int)]


def _offset(config: HfConfig) -> int:
    """Return the number of unused leading positions. RoBERTa counts positions from pad_token_id + 1."""
    return (config.integer("pad_token_id") or 0) + 1


def _counted(parts: Tensors, config: HfConfig) -> LazyTensor:
    return t.strided(parts[0], _offset(config), parts[0].shape[0])


def _positions(config: HfConfig) -> int:
    return config.needed("max_position_embeddings") - _offset(config)


def _trained(config: HfConfig) -> int:
    """Return the context length of Nomic's training. Older checkpoints store a larger value, for scaled rope."""
    return min(config.needed("max_position_embeddings"), config.integer("max_trained_positions") or 1 << 30)


def _no_adapters(config: HfConfig) -> str | None:
    """Refuse Jina embeddings 3 in its original format, which has task adapters."""
    if not config.get("lora_adaptations"):
        return None
    return (
        "lora_adaptations are task adapters, which GGUF files cannot store; save it as JinaEmbeddingsV3Model: they are"
    )


def _period(config: HfConfig) -> int:
    """Return n for a ModernBERT with full attention in layers 0, n, 2n, ..."""
    kinds, layers = config.get("layer_types"), config.layers
    if kinds is None:
        return config.integer("global_attn_every_n_layers") or 3
    full = [i for i, kind in enumerate(kinds) if kind == "full_attention"] if isinstance(kinds, list) else []
    period = full[1] if len(full) > 1 else layers
    if full != list(range(0, layers, period)) or len(kinds) != layers:
        raise config.error("layer_types", kinds, "full attention in layers 0, n, 2n, ...")
    return period


def _activation(config: HfConfig) -> str:
    return "silu" if config.get("hidden_activation") in ("silu", "swish") else "gelu"


def _classifier_pooling(config: HfConfig) -> int:
    return config.choice("classifier_pooling", of={"cls": 2, "mean": 1}, default="cls")


def _and_ranker(
    row: Recipe,
    classes: tuple[str, ...],
    top: Layer = MappingProxyType({}),
    keys: Mapping[str, Key] = MappingProxyType({}),
    raw: Callable[[Raw, HfConfig], Raw] = unchanged,
) -> tuple[Recipe, Recipe]:
    """Return two recipes: an encoder, and its classes with a classifier. The arguments belong to the second."""
    ranking = {**row.keys, **keys, "pooling_type": _RANK, "classifier.output_labels": _labels}
    return row, replace(row, classes=classes, top=top, keys=ranking, raw=raw)


def _neo_width(config: HfConfig) -> int:
    """Return two thirds of intermediate_size, rounded up to a multiple of 8, as in the reference implementation."""
    return -(-(2 * config.needed("intermediate_size") // 3) // 8) * 8


def _neo_words(config: HfConfig) -> dict[str, Any]:
    unit = config.get("hidden_act")
    return {"hidden_act": "silu" if str(unit).lower() == "swiglu" else unit}


_NO_FREQUENCIES = ("freqs_cis", "model.freqs_cis")

ROWS = (
    *_and_ranker(
        Recipe(
            "bert", ("BertModel", "BertForMaskedLM"), keys=NOT_ROTATED, fixed=_BERT_FIXED, whole_keys=_NO_TYPES,
            defaults={"layer_norm_eps": 1e-12}, raw=_MASKED,
        ),
        ("BertForSequenceClassification",), {"cls": "bert.pooler.dense", "cls.output": "classifier"},
    ),
    Recipe(
        "bert", ("DistilBertModel", "DistilBertForMaskedLM"), keys=NOT_ROTATED, fixed={"activation": "gelu"},
        whole_keys=_NO_TYPES,
        defaults={"hidden_size": integer("dim"), "intermediate_size": integer("hidden_dim"), "layer_norm_eps": 1e-12},
        raw=without("vocab_"),
    ),
    *_and_ranker(
        Recipe(
            "bert",
            (
                "RobertaModel", "RobertaForMaskedLM", "XLMRobertaModel", "XLMRobertaForMaskedLM", "CamembertModel",
                "CamembertForMaskedLM",
            ),
            keys={**NOT_ROTATED, "context_length": _positions}, raw=_MASKED, whole_keys=_NO_TYPES, fixed=_BERT_FIXED,
            changes={"position_embd.weight": _counted}, checks=(_no_adapters,),
            defaults={"pad_token_id": 1, "layer_norm_eps": 1e-12},
        ),
        tuple([f"{x}ForSequenceClassification" for x in ("Roberta", "XLMRoberta", "Camembert")]),
    ),
    Recipe(
        "nomic-bert", ("NomicBertModel", "NomicBertForMaskedLM"), keys={"context_length": _trained},
        fixed={
            "prenorm": False, "rotary_emb_interleaved": False, "rotary_emb_fraction": 1.0,
            "activation_function": "swiglu", "causal": False, "moe_every_n_layers": 0,
        },
        defaults={"rope_theta": 1000.0, "layer_norm_eps": lambda config: config.real("layer_norm_epsilon") or 1e-12},
        raw=_MASKED,
    ),
    *_and_ranker(
        Recipe(
            "modern-bert", ("ModernBertModel", "ModernBertForMaskedLM"), raw=without("head.", "decoder."),
            keys={
                "attention.sliding_window": "local_attention", "attention.sliding_window_pattern": _period,
                "hidden_activation": _activation,
            },
            fixed={"classifier_activation": "gelu"},
            defaults={
                "local_attention": 128, "rope_theta": lambda config: config.real("global_rope_theta") or 160000.0,
                "rope_local_base_freq": lambda config: config.real("local_rope_theta") or 10000.0,
            },
        ),
        ("ModernBertForSequenceClassification",), {"cls.output": "classifier"},
        {"classifier.pooling_type": _classifier_pooling},
    ),
    *_and_ranker(
        Recipe(  # transformers does not support this architecture
            "neo-bert", ("NeoBERT", "NeoBERTLMHead"), raw=without("decoder.", *_NO_FREQUENCIES), words=_neo_words,
            # GGUF files store all queries, then all keys, then all values.
            changes={"attn_qkv.weight": of_groups(by_head, 0, 1, 2)}, keys={"feed_forward_length": _neo_width},
            whole_keys={"neo-bert.pooling_type": lambda config, keys, tensors: keys.get("neo-bert.pooling_type", _CLS)},
            fixed={"rope": True, "rms_norm": True, "ngpt": False},
            defaults={"norm_eps": 1e-6, "max_position_embeddings": integer("max_length")},
        ),
        ("NeoBERTForSequenceClassification",), {"cls": "dense", "cls.output": "classifier"},
        raw=without(*_NO_FREQUENCIES),
    ),
    Recipe(  # transformers does not support this architecture
        "jina-bert-v2", ("JinaBertModel", "JinaBertForMaskedLM"), keys=NOT_ROTATED,
        fixed={"position_embedding_type": "alibi", "is_decoder": False, "feed_forward_type": "geglu"},
        defaults={"layer_norm_eps": 1e-12, "position_embedding_type": "absolute", "feed_forward_type": "original"},
        raw=_MASKED,
    ),
    *_and_ranker(
        Recipe(
            "jina-bert-v3", ("JinaEmbeddingsV3Model", "JinaEmbeddingsV3ForMaskedLM"), raw=_MASKED,
            defaults={"rope_theta": 20000.0},
        ),
        ("JinaEmbeddingsV3ForSequenceClassification",),
        {"cls": "classifier.dense", "cls.output": "classifier.out_proj"},
    ),
    Recipe("eurobert", ("EuroBertModel", "EuroBertForMaskedLM", "JinaEmbeddingsV5Model"), raw=without("lm_head.")),
    Recipe(
        "gemma-embedding", ("Gemma3TextModel",), norm_offset=1.0, defaults=GEMMA3_DEFAULTS,
        fixed={"use_bidirectional_attention": True, **score_scale(0)}, dense=dense_keys,
    ),
)  # fmt: skip
