"""Hugging Face folders of every architecture, written without torch: names, shapes and config.json are stored as
transformers saves them; the values follow from the names; the stored logits are transformers' own.

    python -m tests.localllm.convert.hf_synthetic    # makes data/hf_all.* again; needs torch and transformers
"""

from __future__ import annotations

import gzip
import json
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from tests.localllm.convert.hf_tokenizers import save_tokenizer
from tests.localllm.convert.support import save

DATA = Path(__file__).parent / "data"
POSITIONS = [0, 6, 11, 17, 23]  # positions whose logits are stored
LEFT_OUT = ("gpt-oss-mxfp4",)  # its values cannot follow from names; it is in data/hf


def numbers(name: str, shape: list[int], base: float) -> np.ndarray:
    """Values that make every part matter: sharp attention, norms away from one, biases away from zero."""
    noise = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape).astype(np.float32)
    if "norm" in name and name.endswith("weight"):
        return np.float32(base) + np.float32(0.3) * noise
    if "bias" in name.rsplit(".", 1)[-1] or name.endswith("sinks"):
        return np.float32(0.3) * noise
    if "embed" in name:
        return noise
    gain = 2.0 if "q_proj" in name or "k_proj" in name or "qkv" in name else 1.0
    return noise * np.float32(gain / shape[-1] ** 0.5)


def write_folder(spec: dict[str, Any], folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(spec["config"]))
    save(folder / "model.safetensors", {name: numbers(name, *rest) for name, *rest in spec["tensors"]})
    save_tokenizer(spec["tokenizer"], folder)


def read_specs() -> dict[str, dict[str, Any]]:
    specs: dict[str, dict[str, Any]] = json.loads(gzip.decompress((DATA / "hf_all.json.gz").read_bytes()))
    return specs


def _spec(name: str, folder: Path) -> dict[str, Any]:
    """What transformers saves for one of `hf_models.MODELS`."""
    from safetensors.numpy import load_file

    from tests.localllm.convert.hf_models import MODELS, make

    make(name, folder)
    saved = load_file(folder / "model.safetensors")
    tensors = [
        (key, list(x.shape), float(round(x.mean())) if "norm" in key and key.endswith("weight") else 0.0)
        for key, x in sorted(saved.items())
    ]
    config = json.loads((folder / "config.json").read_text())
    return {"config": config, "tensors": tensors, "tokenizer": MODELS[name][2]}


def _logits(folder: Path) -> np.ndarray:
    import torch
    import transformers

    from tests.localllm.convert.hf_models import ids

    model, found = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
    )
    assert not any(found.values()), found
    with torch.no_grad():
        logits: np.ndarray = model.eval()(torch.tensor([ids()]), use_cache=False).logits[0].float().numpy()
    return logits[POSITIONS]


if __name__ == "__main__":
    from tests.localllm.convert.hf_models import MODELS

    all_specs, all_logits = {}, {}
    for model_name in MODELS:
        if model_name in LEFT_OUT:
            continue
        with tempfile.TemporaryDirectory() as place:
            all_specs[model_name] = _spec(model_name, Path(place))
        with tempfile.TemporaryDirectory() as place:
            write_folder(all_specs[model_name], Path(place))
            all_logits[model_name] = _logits(Path(place))
    text = json.dumps(all_specs, separators=(",", ":")).encode()
    (DATA / "hf_all.json.gz").write_bytes(gzip.compress(text, mtime=0))
    np.savez_compressed(DATA / "hf_all.npz", **all_logits)
