"""The notation of the tables of `hf_own_*`: the tensors of a layer as text, and the settings most models share.

(gate|up)_proj 48x32 down_proj 32x48    # three matrices: gate_proj.weight and up_proj.weight are (48, 32)
lm_head+ Vx32                           # V is the size of the vocabulary; + adds a bias
A_log. 4                                # a final dot: no suffix `.weight`
"""

from __future__ import annotations

import re
from itertools import product
from typing import Any, NamedTuple

from tests.localllm.convert import hf_settings as settings
from tests.localllm.convert.hf_tokenizers import VOCABULARY

Tensors = list[Any]  # (name, shape, mean of the random values)


class Case(NamedTuple):
    config: dict[str, Any]
    tensors: Tensors
    tokenizer: str


TOKENS = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SIZES = {
    **TOKENS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip
COMMON = {
    **SIZES, "num_key_value_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "rope_theta": 50000.0,
    "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
LATENT = {**settings.LATENT, "first_k_dense_replace": None, "head_dim": 8}
LLAMA3 = {key: x for key, x in settings.LLAMA3.items() if key != "rope_theta"}

TOP = "model.embed_tokens Vx32 model.norm 32 lm_head Vx32 "
NORMS = "(input|post_attention)_layernorm 32 "
QUERIES = "self_attn.(q|o)_proj 32x32 "
ATTENTION = QUERIES + "self_attn.(k|v)_proj 16x32 "
BIASED = "self_attn.q_proj+ 32x32 self_attn.(k|v)_proj+ 16x32 self_attn.o_proj 32x32 "
HEAD_NORMS = "self_attn.(q|k)_norm 8 "
MLP = "(gate|up)_proj 48x32 down_proj 32x48 "
SMALL_MLP = "(gate|up)_proj 24x32 down_proj 32x24 "
W123 = "(w1|w3) 48x32 w2 32x48 "


def below(prefix: str, text: str) -> str:
    """Return the tensors with a prefix before each name."""
    parts = text.split()
    return "".join(f"{prefix}{name} {shape} " for name, shape in zip(parts[::2], parts[1::2], strict=True))


def experts(prefix: str, text: str) -> str:
    return below(f"{prefix}.(0|1|2|3).", text)


LLAMA = NORMS + ATTENTION + below("mlp.", MLP)
MLA = (
    "self_attn.q_a_proj 24x32 self_attn.q_a_layernorm 24 self_attn.q_b_proj 72x24 "
    "self_attn.kv_a_proj_with_mqa 24x32 self_attn.kv_a_layernorm 16 self_attn.kv_b_proj 88x16 self_attn.o_proj 32x48 "
)


def shapes(text: str, prefix: str = "") -> Tensors:
    """Return (name, shape, mean of the random values) of each tensor of a text."""
    found: Tensors = []
    parts = text.split()
    for pattern, size in zip(parts[::2], parts[1::2], strict=True):
        shape = [VOCABULARY if n == "V" else int(n) for n in size.split("x")]
        choices = [part.split("|") for part in re.split(r"[()]", pattern)]
        for letters in product(*choices):
            base = prefix + "".join(letters).rstrip("+.")
            name = base if pattern.endswith(".") else f"{base}.weight"
            found.append((name, shape, float("norm" in name and name.endswith("weight"))))
            if pattern.endswith("+"):
                found.append((f"{base}.bias", shape[:1], 0.0))
    return found


def own(
    of_class: str, layer: str, top: str = TOP, tokenizer: str = "qwen2", *, base: dict[str, Any] = COMMON,
    prefix: str = "model.layers.{}.", others: dict[int, str] | None = None, **config: Any,
) -> Case:  # fmt: skip
    """Return config.json, tensors and tokenizer of a model.

    `config` replaces keys of `base`, and None removes them. `others` replaces the tensors of single layers.
    """
    told = {"architectures": [of_class], "model_type": of_class.lower(), **base, **config}
    count = next(told[key] for key in LAYERS if told.get(key) is not None)
    tensors = shapes(top)
    for n in range(count):
        tensors += shapes((others or {}).get(n, layer), prefix.format(n))
    return Case({key: value for key, value in told.items() if value is not None}, tensors, tokenizer)


LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_transformer_layers")
