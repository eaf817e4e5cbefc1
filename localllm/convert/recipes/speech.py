"""The recipe of Qwen3-TTS's talker, which reads text and generates speech codes, in the format of llama.cpp's
converter.

transformers does not support it. The embedding table has the projected text embeddings, then the speech codes; the
output matrix has rows for speech codes only.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from localllm import quant
from localllm.convert import tensor as t
from localllm.convert.errors import ConvertError
from localllm.convert.hf_config import HfConfig
from localllm.convert.recipe import From, Recipe, Tensors
from localllm.convert.recipes.vision import SECTIONED
from localllm.convert.tensor import LazyTensor

_TABLES = ("model.text_embedding.weight", "model.codec_embedding.weight")
_PROJECTION = tuple([f"text_projection.linear_fc{i}.{part}" for i in (1, 2) for part in ("weight", "bias")])
# Special codes at the end of the codebook; only the end of speech may be generated.
_SPECIAL = 1024

F32 = NDArray[np.float32]


def _projected(parts: Tensors, config: HfConfig) -> LazyTensor:
    """Return F32 rows: the text embeddings after the projection (two matrices with SiLU between), then the code
    embeddings."""
    text, codes, up, up_bias, down, down_bias = parts
    inner, width = up.shape[0], down.shape[0]
    wanted = {
        up.name: (up.shape, (inner, text.shape[-1])), up_bias.name: (up_bias.shape, (inner,)),
        down.name: (down.shape, (width, inner)), down_bias.name: (down_bias.shape, (width,)),
        codes.name: (codes.shape[1:], (width,)),
    }  # fmt: skip
    for name, (found, expected) in wanted.items():
        if found != expected:
            raise ConvertError(f"{name}: is {found}; expected {expected}, as config.json and the other parts have it")

    @cache  # the first read loads the matrices for all later reads.
    def matrices() -> tuple[F32, ...]:
        return tuple([_values(part, 0, part.rows) for part in (up, up_bias, down, down_bias)])

    def read(start: int, stop: int) -> NDArray[np.uint8]:
        first, first_bias, second, second_bias = matrices()
        hidden = _values(text, start, stop) @ first.T + first_bias
        made = (hidden / (1 + np.exp(-hidden))) @ second.T + second_bias
        return np.ascontiguousarray(made, np.float32).view(np.uint8)

    rows = LazyTensor(text.name, "F32", (text.shape[0], width), 4 * width, read)
    return t.concatenated([rows, t.as_float32(codes)])


def _values(tensor: LazyTensor, start: int, stop: int) -> F32:
    return quant.dequantize(tensor.read(start, stop), tensor.format)


def _names(config: HfConfig) -> dict[int, str]:
    """Return the texts of the code tokens by id. Code tokens follow the text tokens, and config.json names some of
    them.
    """
    first, count = config.needed("text_vocab_size"), config.needed("vocab_size")
    names = [f"<|codec_{i}|>" for i in range(count)]
    for key, told in config.table("talker_config").items():
        if key.endswith("_id"):
            known = told.items() if isinstance(told, dict) else [("", told)]
            for part, i in known:
                if type(i) is int and 0 <= i < count:
                    names[i] = f"<|{'_'.join(filter(None, (key.removesuffix('_id'), part)))}|>"
    return {first + i: name for i, name in enumerate(names)}


def _end(config: HfConfig, *_: object) -> int:
    return config.needed("text_vocab_size") + config.needed("codec_eos_token_id")


def _never(config: HfConfig, *_: object) -> NDArray[np.int32]:
    """Return the code tokens that must not be generated."""
    end = config.needed("text_vocab_size") + config.needed("vocab_size")
    return np.array([i for i in range(max(0, end - _SPECIAL), end) if i != _end(config)], np.int32)


ROWS = (
    Recipe(
        "qwen3tts", ("Qwen3TTSForConditionalGeneration",), like="qwen3", keys=SECTIONED, tokens=_names,
        top={"token_embd.weight": From((*_TABLES, *_PROJECTION), _projected), "output": "codec_head"},
        whole_keys={
            "tokenizer.ggml.eos_token_id": _end, "tokenizer.ggml.add_eos_token": False,
            "tokenizer.ggml.suppress_tokens": _never, "tokenizer.chat_template": None,
        },
    ),
)  # fmt: skip
