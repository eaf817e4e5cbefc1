"""Write a trained demo model as a GGUF: F32 weights, tokenizer, chat template and temperature.

Used by train.py. The parameters already have the names and the layout of GGUF, so nothing is permuted.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from corpus import BEGIN, END, SPECIAL, TEMPLATE
from tokenizers import Tokenizer

from localllm.gguf import NewTensor, write_gguf

FILE_TYPE_F32 = 0  # value of general.file_type
TEMPERATURE = 0.5
NORMAL_TOKEN, CONTROL_TOKEN = 1, 3


def tokenizer_metadata(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the tokenizer.* keys of a byte-level BPE tokenizer that starts every text with BEGIN."""
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    kinds = [CONTROL_TOKEN if token in SPECIAL else NORMAL_TOKEN for token in tokens]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(kinds, np.int32),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.bos_token_id": tokens.index(BEGIN),
        "tokenizer.ggml.eos_token_id": tokens.index(END),
        "tokenizer.ggml.eot_token_id": tokens.index(END),
        "tokenizer.ggml.padding_token_id": tokens.index(BEGIN),
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    }


def write(
    path: Path, name: str, description: str, sizes: dict[str, int | float], params: dict[str, Any], tokenizer: Tokenizer
) -> None:
    """Write one model.

    `sizes` holds the llama.* keys without their prefix, `params` the float32 arrays by GGUF name.
    """
    count = sum(value.size for value in params.values())
    metadata: dict[str, Any] = {
        "general.architecture": "llama",
        "general.type": "model",
        "general.name": name,
        "general.description": description,
        "general.size_label": f"{count / 1e6:.1f}M",
        "general.license": "cc-by-sa-4.0",
        "general.languages": ["en"],
        "general.file_type": FILE_TYPE_F32,
        "general.sampling.temp": TEMPERATURE,
    }
    metadata |= {f"llama.{key}": value for key, value in sizes.items()}
    metadata |= tokenizer_metadata(tokenizer)
    tensors = [
        NewTensor(tensor, "F32", value.shape, np.ascontiguousarray(value, np.float32).tobytes())
        for tensor, value in params.items()
    ]
    write_gguf(path, metadata, tensors, overwrite=True)
