"""The recipes of T5 (arXiv:1910.10683), mT5 and UMT5, and of their encoders alone.

The gguf package maps the tensor names. T5 divides the logits by sqrt(width) if the output matrix is tied to the
embedding. A GGUF file marks this by omitting the output matrix.
"""

from __future__ import annotations

from typing import Any

from localllm.convert import tensor as t
from localllm.convert.errors import ConvertError
from localllm.convert.hf_config import HfConfig, class_of
from localllm.convert.recipe import Keys, Recipe, by_name, integer, without
from localllm.convert.recipes.shared import NOT_ROTATED
from localllm.convert.tensor import LazyTensor

# Trained length, which config.json lacks; longer texts work too, since positions are relative.
_CONTEXT = 512
# Unused tensor of old checkpoints.
_NO_PLACE = ("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.",)


def _divided(config: HfConfig) -> bool:
    """Return whether the logits are divided by sqrt(width), which mT5 never does. transformers 5 always writes
    tie_word_embeddings as true, and adds scale_decoder_outputs if the model was trained otherwise."""
    if class_of(config) == "MT5ForConditionalGeneration":
        return False
    return config.flag("scale_decoder_outputs", "tie_word_embeddings") is not False


def _output(tensors: dict[str, LazyTensor], config: HfConfig) -> dict[str, LazyTensor]:
    """Add an output matrix, or drop it if the logits are divided."""
    others = {name: tensor for name, tensor in tensors.items() if name != "output.weight"}
    table, output = tensors["token_embd.weight"], tensors.get("output.weight")
    if not _divided(config):
        return {**others, "output.weight": output or t.renamed(table, "output.weight")}
    if output is not None and not t.alike(table, output):
        raise ConvertError(
            "lm_head.weight is not the embedding, but tie_word_embeddings is not false: its logits would be divided, "
            "which GGUF cannot express"
        )
    return others


def _start(config: HfConfig) -> int | None:
    """Return the decoder start token."""
    return config.integer("decoder_start_token_id", "pad_token_id")


_SIZES: dict[str, Any] = {
    "head_dim": by_name("d_kv"),
    "layer_norm_epsilon": 1e-6,
    "relative_attention_num_buckets": 32,
    "max_position_embeddings": _CONTEXT,
}
_KEYS: Keys = {
    **NOT_ROTATED,
    "attention.causal": None,
    "attention.relative_buckets_count": "relative_attention_num_buckets",
}
_DECODER_KEYS: Keys = {
    **_KEYS,
    "decoder_block_count": integer("num_decoder_layers", "num_layers"),
    "decoder_start_token_id": _start,
}


def _rows(prefix: str, feed_forward: str, older: tuple[str, ...] = ()) -> tuple[Recipe, Recipe]:
    """Return the recipes of a family: the full model, and the encoder alone."""
    shared: dict[str, Any] = {
                "fixed": {
            "relative_attention_max_distance": 128, "feed_forward_proj": ("relu", "gated-gelu", "gated-gelu_new"),
        },
        "defaults": {**_SIZES, "feed_forward_proj": feed_forward},
    }  # fmt: skip
    return (
        Recipe(
            "t5", (f"{prefix}ForConditionalGeneration", *older), keys=_DECODER_KEYS,
            raw=without(*_NO_PLACE), output=_output, **shared,
        ),
        Recipe(
            "t5encoder", (f"{prefix}EncoderModel",), keys=_KEYS,
            raw=without("decoder.", "lm_head."), **shared,
        ),
    )  # fmt: skip


ROWS = (
    *_rows("T5", "relu", ("T5WithLMHeadModel",)),
    *_rows("MT5", "gated-gelu"),
    *_rows("UMT5", "gated-gelu", ("UMT5Model",)),
)
