"""The recipes of PLaMo 1, PLaMo 2 (alternating Mamba and attention layers), and PLaMo 3.

transformers supports none of them. The tensor names come from their reference implementations.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from localllm.convert import tensor as t
from localllm.convert.changes import height, numbered, plus
from localllm.convert.hf_config import HfConfig
from localllm.convert.recipe import Keys, Layer, Recipe, Tensors, by_name, integer, layers_at, real, taken
from localllm.convert.tensor import LazyTensor

_LAYERS = layers_at("model.layers.layers.")
_MAMBA = {"mamba_num_heads": 64, "hidden_size_per_head": 128}


def _attends(config: HfConfig) -> NDArray[np.bool_]:
    """Return which layers have attention: one in every `mamba_step` or, in a small model, only the last layer."""
    layers, step = config.layers, config.needed("mamba_step")
    numbers = np.arange(layers)
    attends: NDArray[np.bool_] = numbers == layers - 1 if layers <= step // 2 else numbers % step == step // 2
    return attends


def _where_attending(name: str) -> Callable[[HfConfig], NDArray[np.int32]]:
    return lambda config: np.where(_attends(config), config.needed(name), 0).astype(np.int32)


def _context(config: HfConfig) -> int:
    """Return the context length, capped at the attention window: GGUF files of this architecture cannot store a sliding
    window."""
    whole, window = config.needed("max_position_embeddings"), config.integer("attention_window_size")
    full = config.get("full_attention_idx") or []
    attending = {int(layer) for layer in np.flatnonzero(_attends(config))}
    return min(whole, window) if window and not attending <= {*full} else whole


def _keys_of_plamo(config: HfConfig) -> int:
    """Return PLaMo 1's number of KV heads, each shared by `n_shared_head` queries. `num_key_value_heads` is ignored."""
    heads, shared = config.heads, config.needed("n_shared_head")
    if heads % shared:
        raise config.error("n_shared_head", shared, f"a number that divides the {heads} heads")
    return heads // shared


def _neighbours(config: HfConfig, tensor: LazyTensor, count: int) -> NDArray[np.int64]:
    """Return the order of rows or columns that makes queries with the same key adjacent.

    In PLaMo 1's reference implementation query i reads key i % keys; in GGUF files it reads key i // (queries per key).
    """
    heads, keys = config.heads, _keys_of_plamo(config)
    order = numbered(tensor, count, heads, config.width // heads)
    return order.reshape(heads // keys, keys, -1).swapaxes(0, 1).reshape(-1)


def _queries(parts: Tensors, config: HfConfig) -> LazyTensor:
    rows = height(parts[0])
    return t.picked(parts[0], _neighbours(config, parts[0], rows), rows)


def _output(parts: Tensors, config: HfConfig) -> LazyTensor:
    return t.picked_columns(parts[0], _neighbours(config, parts[0], parts[0].shape[-1]))


_BOTH: Layer = {
    "post_attention_norm.": taken("post_mixer_norm.weight", plus(1.0 / 5)),
    "post_ffw_norm.": taken("post_mlp_norm.weight", plus(1.0 / 5**1.5)),
}
_PLAMO2: Layer = {
    **_BOTH,
    **{f"attn_{x}_norm.weight": f"mixer.{x}_weight" for x in "qk"},  # (heads, width)
    **{f"ssm_{x.lower()}_norm.": f"mixer.{x}_norm_weight" for x in ("dt", "B", "C")},
    "ssm_out": "mixer.out_proj",
}
_PLAMO2_KEYS: Keys = {
    "context_length": _context,
    "attention.head_count": _where_attending("num_attention_heads"),
    "attention.head_count_kv": _where_attending("num_key_value_heads"),
    "attention.key_length": "hidden_size_per_head",
    "attention.value_length": "hidden_size_per_head",
    "ssm.state_size": "mamba_d_state",
    "ssm.conv_kernel": "mamba_d_conv",
    "ssm.time_step_rank": "mamba_num_heads",
    "ssm.inner_size": lambda config: config.needed("mamba_num_heads") * config.needed("hidden_size_per_head"),
    "ssm.group_count": 0,
}

ROWS = (
    Recipe(
        "plamo", ("PlamoForCausalLM",), raw=_LAYERS, changes={"attn_q": _queries, "attn_output": _output},
        keys={"attention.head_count_kv": _keys_of_plamo}, fixed={"rope_scaling": None, "rope_theta": 10000.0},
        tokenizer="llama", defaults={"n_shared_head": 8, "rms_norm_eps": 1e-6, "max_position_embeddings": 4096},
    ),
    Recipe(
        "plamo2", ("Plamo2ForCausalLM", "PLaMo2ForCausalLM"), _PLAMO2, raw=_LAYERS, norm_offset=1.0,
        plain_norms=("attn_q_norm", "attn_k_norm"), keys=_PLAMO2_KEYS, head_dim=by_name("hidden_size_per_head"),
        fixed={"mamba_enabled": True},
        defaults={
            **_MAMBA, "mamba_step": 2, "mamba_d_state": 64, "mamba_d_conv": 4, "num_attention_heads": 32,
            "num_key_value_heads": 4, "rms_norm_eps": 1e-6, "max_position_embeddings": 2048,
            "attention_window_size": 2048,
        },
    ),
    Recipe(
        "plamo3", ("Plamo3ForCausalLM", "PLaMo3ForCausalLM"), _BOTH, raw=_LAYERS, norm_offset=1.0,
        keys={
            "attention.sliding_window": integer("window_size", "sliding_window"),
            "attention.sliding_window_pattern": "sliding_window_pattern",
        },
        fixed={"rope_scaling_factor": 1, "rope_scaling": None},
        defaults={"sliding_window_pattern": 8, "rope_local_base_freq": real("rope_local_theta")},
    ),
)  # fmt: skip
