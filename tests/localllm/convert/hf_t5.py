"""Tiny T5-family models as Hugging Face checkpoints, written without torch as in `hf_synthetic`.

transformers computed the stored logits and hidden states.

    python -m tests.localllm.convert.hf_t5    # regenerates data/hf_t5.*

The command needs torch and transformers.
"""

from __future__ import annotations

import gzip
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from tests.localllm.convert.hf_models import ids
from tests.localllm.convert.hf_synthetic import DATA, write_folder
from tests.localllm.convert.hf_tokenizers import VOCABULARY

_COMMON = {
    "vocab_size": VOCABULARY, "d_model": 32, "d_kv": 12, "d_ff": 48, "num_layers": 2, "num_heads": 4,
    "initializer_factor": 1.0, "decoder_start_token_id": 0,
}  # fmt: skip

# Name: model class, configuration class, and further settings.
FAMILY: dict[str, tuple[str, str, dict[str, Any]]] = {
    "t5": ("T5ForConditionalGeneration", "T5Config", {"num_decoder_layers": 3}),
    "t5-gated": (
        "T5ForConditionalGeneration", "T5Config", {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
    "t5-mt5": ("MT5ForConditionalGeneration", "MT5Config", {}),
    "t5-umt5": ("UMT5ForConditionalGeneration", "UMT5Config", {}),
    "t5encoder": ("T5EncoderModel", "T5Config", {}),
    "t5encoder-mt5": ("MT5EncoderModel", "MT5Config", {}),
    "t5encoder-umt5": ("UMT5EncoderModel", "UMT5Config", {}),
}  # fmt: skip
TEXT, ANSWER = ids()[:16], [0, *ids()[16:]]  # encoder input, decoder input


def read_family() -> dict[str, dict[str, Any]]:
    specs: dict[str, dict[str, Any]] = json.loads(gzip.decompress((DATA / "hf_t5.json.gz").read_bytes()))
    return specs


def _spec(name: str, folder: Path) -> dict[str, Any]:
    """Return config.json, tensor names and shapes as transformers saves them for an entry of FAMILY."""
    import transformers
    from safetensors.numpy import load_file

    of_class, settings, more = FAMILY[name]
    getattr(transformers, of_class)(getattr(transformers, settings)(**{**_COMMON, **more})).save_pretrained(folder)
    saved = load_file(folder / "model.safetensors")
    tensors = [(key, list(x.shape), float("norm" in key)) for key, x in sorted(saved.items())]
    return {"config": json.loads((folder / "config.json").read_text()), "tensors": tensors, "tokenizer": "t5"}


def _results(name: str, folder: Path) -> np.ndarray:
    """Return the decoder's logits, or the hidden states of an encoder-only model."""
    import torch
    import transformers

    model, found = getattr(transformers, FAMILY[name][0]).from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
    )
    assert not found["missing_keys"], found
    with torch.no_grad():
        text = torch.tensor([TEXT])
        if FAMILY[name][0].endswith("EncoderModel"):
            rows: np.ndarray = model.eval()(text).last_hidden_state[0].numpy()
        else:
            rows = model.eval()(text, decoder_input_ids=torch.tensor([ANSWER])).logits[0].numpy()
    return rows


if __name__ == "__main__":
    all_specs, stored = {}, {}
    for model_name in FAMILY:
        with tempfile.TemporaryDirectory() as place:
            all_specs[model_name] = _spec(model_name, Path(place))
        with tempfile.TemporaryDirectory() as place:
            write_folder(all_specs[model_name], Path(place))
            stored[model_name] = _results(model_name, Path(place))
    (DATA / "hf_t5.json.gz").write_bytes(gzip.compress(json.dumps(all_specs, separators=(",", ":")).encode(), mtime=0))
    np.savez_compressed(DATA / "hf_t5.npz", **stored)
