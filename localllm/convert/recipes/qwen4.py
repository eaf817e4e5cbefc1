"""The recipe of Qwen 4 Experimental: Qwen 3.5 plus hyper-connections, an attention indexer and n-gram embeddings."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from localllm.convert import tensor as t
from localllm.convert.changes import joined, plus, squeezed
from localllm.convert.errors import ConvertError
from localllm.convert.hf_config import HfConfig, Reader
from localllm.convert.recipe import Change, Key, Keys, Layer, Recipe, Take, Tensors, by_name, taken
from localllm.convert.recipes.gated_delta import DELTA_KEYS, QWEN35, is_kind, sections
from localllm.convert.tensor import LazyTensor

_TABLE = "ple_embedding.ngram_embedding"
# The one layer that adds n-gram embeddings.
_OF_LAYER = re.compile(r"^model\.layers\.[0-9]+\.ple\.(?=ple_embedding\.)")
_HASHES = {
    "layer_multipliers": "layer_multipliers",
    "head_offsets": "ngram_heads_offsets",
    "head_vocab_sizes": "ngram_heads_vocab_sizes",
}


def _index_rows(keys: bool) -> Change:
    """Return a change that picks the indexer's query rows, or its key rows, which follow them."""

    def change(parts: Tensors, config: HfConfig) -> LazyTensor:
        rows = parts[0].shape[0]
        queries = config.needed("indexer_n_heads") * config.needed("indexer_head_dim")
        return t.strided(parts[0], queries, rows) if keys else t.strided(parts[0], 0, queries)

    return change


def _linear(config: HfConfig) -> np.ndarray:
    """Return all layers but the last of each interval."""
    return np.array((np.arange(config.layers) + 1) % (config.integer("full_attention_interval") or 4) != 0)


def _ratios(config: HfConfig) -> np.ndarray:
    """Return the indexer's compression ratio by layer, with 0 for layers with linear attention."""
    linear = is_kind("linear_attention", otherwise=_linear)(config)
    return np.where(linear, 0, config.needed("indexer_compress_ratio")).astype(np.int32)


def _layers(config: HfConfig) -> list[int]:
    """Return the layers that add n-gram embeddings, which config.json counts from 1."""
    found, layers = config.get("ple_layer_ids") or [], config.layers
    if not isinstance(found, list) or not all(type(n) is int and 1 <= n <= layers for n in found):
        raise config.error("ple_layer_ids", found, f"layers from 1 to {layers}")
    return sorted({n - 1 for n in found})


def _if_ngrams(value: Reader[int]) -> Key:
    """Return a value that is only written for models with n-gram embeddings."""
    return lambda config: value(config) if _layers(config) else None


def _width(config: HfConfig) -> int:
    """Return the width of one head of the n-gram table."""
    heads = config.needed("heads_per_ngram") * (config.needed("ngram_size") - 1)
    return (config.integer("ple_embed_dim") or config.width) // max(1, heads)


def _end(config: HfConfig) -> int:
    """Return the token at which the n-gram hashes stop looking back: the first of `eos_token_id`, as in
    transformers."""
    found = config.get("eos_token_id")
    first = found[0] if isinstance(found, list) and found else found
    if type(first) is not int or first < 0:
        raise config.error("eos_token_id", found, "a token, which the hashes of n-grams need")
    return first


def _hashes(take: Take, config: HfConfig) -> dict[str, Any]:
    """Return the integers of the n-gram hashes (uint64)."""
    found: dict[str, Any] = {}
    for key, name in _HASHES.items():
        parts = take("", (f"ple_embedding.{name}",))
        if parts is not None:
            if parts[0].format != "I64" or len(parts[0].shape) != 1:
                kind = f"{parts[0].format} {parts[0].shape}"
                raise ConvertError(f"ple.ple_embedding.{name}: is {kind}; expected a vector of I64")
            found[f"qwen4exp.ple.{key}"] = parts[0].read(0, 1)[0].view(np.int64).astype(np.uint64)
    return found


def _one_layer(config: HfConfig) -> str | None:
    count = len(_layers(config))
    return None if count < 2 else f"ple_layer_ids lists {count} layers; the GGUF architecture has one"


def _gate(config: HfConfig) -> str | None:
    found = config.get("output_gate_type", "hidden_act")
    return None if found == "sigmoid" else f"output_gate_type is {found}; the GGUF architecture requires sigmoid"


def _connection(name: str) -> dict[str, str]:
    """Return the tensor names of a hyper-connection: its parts in the GGUF file, and their names in the checkpoint."""
    names = {"norm": "hc_norm", "down": "input_mix_weight_down", "up": "input_mix_weight_up"}
    return {part: f"{name}.{own}" for part, own in names.items()}


_LAYER: Layer = {
    **{
        f"hc_{part}_{key}": name
        for part, module in (("attn", "attn_hyper_connection"), ("ffn", "mlp_hyper_connection"))
        for key, name in {**_connection(module), "inject": f"{module}.block_inject_weight"}.items()
    },
    "indexer.q_proj": taken("self_attn.indexer.index_qk_proj", _index_rows(keys=False)),
    "indexer.k_proj": taken("self_attn.indexer.index_qk_proj", _index_rows(keys=True)),
    **{f"indexer.{x}_norm": f"self_attn.indexer.{x}_layernorm" for x in "qk"},
    **{f"ple_{x}": f"ple.{x}_proj" for x in ("key", "value")},
    **{f"ple_norm_{x}": taken(f"ple.norm_{x}", plus(1.0)) for x in ("key", "query", "conv")},
    "ple_conv1d": taken("ple.conv1d", squeezed),
}
_KEYS: Keys = {
    **DELTA_KEYS,
    "rope.dimension_sections": sections,
    "hyper_connection.count": "hc_count",
    "hyper_connection.low_rank": "hc_lowrank",
    "attention.indexer.head_count": "indexer_n_heads",
    "attention.indexer.key_length": "indexer_head_dim",
    "attention.indexer.top_k": "indexer_budget",
    "attention.compress_ratios": _ratios,
    "ple.layers": lambda config: np.array(_layers(config), np.int32) if _layers(config) else None,
    "ple.ngram_size": _if_ngrams(by_name("ngram_size")),
    "ple.heads_per_ngram": _if_ngrams(by_name("heads_per_ngram")),
    "ple.conv_kernel": _if_ngrams(by_name("ple_conv_kernel_size")),
    "ple.eos_token_id": _if_ngrams(_end),
    "embedding_length_per_layer_input": _if_ngrams(_width),
}

ROWS = (
    Recipe(
        "qwen4exp", ("Qwen4ExpForCausalLM", "Qwen4ExpForConditionalGeneration"), _LAYER, norm_offset=1.0,
        plain_norms=("ssm_norm",), keys=_KEYS,
        top={
            **{f"output_hc_{key}": name for key, name in _connection("model.hyper_connection_mixer").items()},
            "per_layer_token_embd": (taken(f"{_TABLE}.shard_{{}}", joined), _TABLE),
        },
        raw=lambda raw, config: {_OF_LAYER.sub("", name): parts for name, parts in raw.items()}, values=_hashes,
        changes=QWEN35, like="qwen35moe",
        defaults={
            "partial_rotary_factor": 0.25, "hc_count": 4, "hc_lowrank": 320, "ple_conv_kernel_size": 4, "ngram_size": 3,
            "heads_per_ngram": 8,
        },
        fixed={"norm_topk_prob": True, "attention_bias": False},
        checks=(_one_layer, _gate),
    ),
)  # fmt: skip
