"""The recipe of Pocket TTS's language model, which reads text and audio latents, in the format of llama.cpp's
converter.

The checkpoints have no config.json. Sizes come from the tensors, and all published models have heads of width 64. In
the embedding table, the text rows are followed by the rows of the voice and audio start tokens.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from localllm import quant
from localllm.convert import tensor as t
from localllm.convert.changes import share
from localllm.convert.errors import ConvertError
from localllm.convert.hf_config import HfConfig
from localllm.convert.recipe import From, Layer, Recipe, Tensors, layers_at, taken
from localllm.convert.safetensors import Shard
from localllm.convert.tensor import LazyTensor

_FILE, _START, _VOICE = "model.safetensors", "flow_lm.bos_emb", "flow_lm.bos_before_voice"
_TABLE, _LATENT = "flow_lm.conditioner.embed.weight", "flow_lm.input_linear.weight"
_LAYERS = re.compile(r"flow_lm\.transformer\.layers\.(\d+)\.norm1\.weight")
_HEAD, _CONTEXT = 64, 4096  # the model has no maximum context; this is llama.cpp's value
# Padding is the last row of the checkpoint's table.
_TOKENS = ("<|pad|>", "<|bos_before_voice|>", "<|audio_bos|>")


def told_by_tensors(folder: Path) -> HfConfig | None:
    """Return the config of a Pocket TTS checkpoint, derived from its tensors, or None for any other checkpoint."""
    if (folder / "config.json").is_file() or not (folder / _FILE).is_file():
        return None
    shard = Shard(folder / _FILE)
    try:
        shapes = {name: tensor.shape for name, tensor in shard.tensors.items()}
    finally:
        shard.close()
    if _START not in shapes:
        return None
    inner = "flow_lm.transformer.layers.0.linear1.weight"
    for name in (_TABLE, inner):
        if len(shapes.get(name, ())) != 2:
            raise ConvertError(
                f"{folder / _FILE}: tensor '{name}' is missing or not a matrix; download the model again"
            )
    (rows, width), voice = shapes[_TABLE], _VOICE in shapes
    if width % _HEAD:
        raise ConvertError(f"{folder / _FILE}: {_TABLE} is {width} wide; expected heads of {_HEAD}")
    values = {
        "architectures": ["PocketTTSModel"], "hidden_size": width, "num_attention_heads": width // _HEAD,
        "num_hidden_layers": len([name for name in shapes if _LAYERS.fullmatch(name)]), "vocab_size": rows + 1 + voice,
        "intermediate_size": shapes[inner][0], "max_position_embeddings": _CONTEXT,
        "rope_theta": 10000.0, "voice": voice,
    }  # fmt: skip
    return HfConfig(folder / _FILE, values, {})


def _table(parts: Tensors, config: HfConfig) -> LazyTensor:
    """Return one embedding table: the rows of text and padding, the voice row if there is one, and the audio start row.

    The last row is the product of a matrix and the latent that starts the audio.
    """
    *rows, start, matrix = parts
    if matrix.shape != (rows[0].shape[-1], *start.shape):
        raise ConvertError(f"{matrix.name}: is {matrix.shape}; expected {(rows[0].shape[-1], *start.shape)}")

    def read(first: int, stop: int) -> NDArray[np.uint8]:
        latent, made = (quant.dequantize(part.read(0, part.rows), part.format) for part in (start, matrix))
        row: NDArray[np.float32] = (made.astype(np.float64) @ latent.astype(np.float64).reshape(-1)).astype(np.float32)
        return row.view(np.uint8)[None][first:stop]

    sound = LazyTensor(start.name, "F32", (1, matrix.shape[0]), 4 * matrix.shape[0], read)
    told = [t.shaped(t.flattened(part), matrix.shape[0]) if i else part for i, part in enumerate(rows)]
    return t.concatenated([*(t.as_float32(part) for part in told), sound])


def _table_of_voices(parts: Tensors, config: HfConfig) -> LazyTensor:
    voice, text, *rest = parts  # the first tensor decides whether this source applies
    return _table([text, voice, *rest], config)


def _tokens(config: HfConfig) -> dict[int, str]:
    names = [name for name in _TOKENS if name != _TOKENS[1] or config.flag("voice")]
    first = config.needed("vocab_size") - len(names)
    return {first + i: name for i, name in enumerate(names)}


_LAYER: Layer = {
    "attn_norm": "norm1",
    "ffn_norm": "norm2",
    **{f"attn_{x}": taken("self_attn.in_proj", share(i, 3)) for i, x in enumerate("qkv")},
    "ffn_up": "linear1",
    "ffn_down": "linear2",
}

ROWS = (
    Recipe(
        "pockettts", ("PocketTTSModel",), _LAYER, raw=layers_at("flow_lm.transformer.layers."), tokens=_tokens,
        top={
            "token_embd.weight": (
                From((_VOICE, _TABLE, _START, _LATENT), _table_of_voices), From((_TABLE, _START, _LATENT), _table),
            ),
            "output_norm": "flow_lm.out_norm",
        },
        whole_keys={"tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_eos_token": False},
    ),
)  # fmt: skip
