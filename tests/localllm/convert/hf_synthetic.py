"""Hugging Face checkpoints of every architecture, written without torch.

Tensor names, shapes and config.json are stored as transformers saves them. The names seed the random weights, and
transformers computed the stored logits.

    python -m tests.localllm.convert.hf_synthetic [MODEL...]    # regenerates data/hf_all.*, or these models

The command needs torch and transformers.
"""

from __future__ import annotations

import gzip
import json
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from tests.localllm.convert.hf_settings import COMPUTED, XIELU
from tests.localllm.convert.hf_table import MODELS
from tests.localllm.convert.hf_tokenizers import save_tokenizer
from tests.localllm.convert.support import save

DATA = Path(__file__).parent / "data"
POSITIONS = [0, 6, 11, 17, 23]  # positions whose logits are stored
LEFT_OUT = ("gpt-oss-mxfp4",)  # MXFP4 weights cannot be seeded by name; this checkpoint is in data/hf


def numbers(name: str, shape: list[int], base: float | list[Any]) -> np.ndarray:
    """Return weights, seeded by the name, that make every tensor matter: peaked attention, norms away from 1, nonzero
    biases.
    """
    if isinstance(base, list):
        return np.array(base)
    if name.endswith(XIELU):
        return np.full(shape, base, np.float32)
    noise = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape).astype(np.float32)
    if "norm" in name.lower() and name.endswith("weight"):
        return np.float32(base) + np.float32(0.3) * noise
    if "bias" in name.rsplit(".", 1)[-1] or name.endswith("sinks"):
        return np.float32(0.3) * noise
    if "embed" in name:
        return noise
    gain = 2.0 if "q_proj" in name or "k_proj" in name or "qkv" in name else 1.0
    return noise * np.float32(gain / shape[-1] ** 0.5)


def write_folder(spec: dict[str, Any], folder: Path, packed: bool = True) -> None:
    """Write a checkpoint. With the key `fp8`, weights are stored in FP8, or dequantized if `packed` is false."""
    config, tensors = dict(spec["config"]), {name: numbers(name, *rest) for name, *rest in spec["tensors"]}
    if blocks := spec.get("fp8"):
        if packed:
            config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": blocks}
        for name in [name for name in tensors if "proj" in name and name.endswith("weight")]:
            codes, scales, tensors[name] = _fp8(tensors[name], *blocks)
            if packed:
                tensors |= {name: codes, f"{name}_scale_inv": scales}
    (folder / "config.json").write_text(json.dumps(config))
    save(folder / "model.safetensors", tensors)
    save_tokenizer(spec["tokenizer"], folder)


def _fp8(x: np.ndarray, height: int, width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Quantize to FP8; return codes, block scales and dequantized values.

    Each block's maximum maps to the largest FP8 value.
    """
    code = np.arange(127)  # E4M3 codes of positive values: 4 exponent bits (bias 7), 3 mantissa bits
    positive = np.where(code < 8, code * 2.0**-9, (8 + code % 8) * 2.0 ** (code // 8 - 10.0))
    rows, columns = (np.arange(n) // size for n, size in zip(x.shape, (height, width), strict=True))
    scales = np.zeros((rows[-1] + 1, columns[-1] + 1), np.float32)
    np.maximum.at(scales, (rows[:, None], columns), np.abs(x) / np.float32(448))
    by_value = scales[rows[:, None], columns]
    nearest = np.searchsorted((positive[1:] + positive[:-1]) / 2, np.abs(x) / by_value)
    values = np.copysign(positive[nearest].astype(np.float32), x) * by_value
    return (nearest | np.where(x < 0, 128, 0)).astype(np.uint8).view(np.int8), scales, values


def read_specs() -> dict[str, dict[str, Any]]:
    specs: dict[str, dict[str, Any]] = json.loads(gzip.decompress((DATA / "hf_all.json.gz").read_bytes()))
    return specs


def _spec(name: str, folder: Path) -> dict[str, Any]:
    """Return config.json, tensor names and shapes as transformers saves them for an entry of `hf_table.MODELS`."""
    from safetensors.numpy import load_file

    from tests.localllm.convert.hf_models import make

    make(name, folder)
    saved = load_file(folder / "model.safetensors")
    tensors = [(key, list(x.shape), _base(key, x)) for key, x in sorted(saved.items()) if not key.endswith(COMPUTED)]
    config = json.loads((folder / "config.json").read_text())
    spec = {"config": config, "tensors": tensors, "tokenizer": MODELS[name][2]}
    return spec | ({"fp8": [64, 96]} if name.endswith("fp8") else {})


def _base(name: str, values: np.ndarray) -> float | list[Any]:
    """Return the mean of a tensor's random values, or the values themselves for integers."""
    if values.dtype == np.int64:
        found: list[Any] = values.tolist()
        return found
    if name.endswith(XIELU):
        return float(values)
    return float(round(values.mean())) if "norm" in name and name.endswith("weight") else 0.0


def _logits(folder: Path) -> np.ndarray:
    import torch
    import transformers

    from tests.localllm.convert.hf_models import by_tanh, ids

    of_pictures = "vision_config" in json.loads((folder / "config.json").read_text())
    maker = transformers.AutoModelForImageTextToText if of_pictures else transformers.AutoModelForCausalLM
    model, found = maker.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
    )
    assert not [key for keys in found.values() for key in keys if not key.endswith(COMPUTED)], found
    by_tanh(model.eval())
    with torch.no_grad():
        logits: np.ndarray = model(torch.tensor([ids()]), use_cache=False).logits[0].float().numpy()
    return logits[POSITIONS]


if __name__ == "__main__":
    kept = set(MODELS) - set(sys.argv[1:]) if sys.argv[1:] else set()
    all_specs = {name: spec for name, spec in read_specs().items() if name in kept} if kept else {}
    all_logits = {name: logits for name, logits in np.load(DATA / "hf_all.npz").items() if name in kept} if kept else {}
    for model_name in MODELS:
        if model_name in (*LEFT_OUT, *all_specs):
            continue
        with tempfile.TemporaryDirectory() as place:
            all_specs[model_name] = _spec(model_name, Path(place))
        with tempfile.TemporaryDirectory() as place:
            write_folder(all_specs[model_name], Path(place), packed=False)
            all_logits[model_name] = _logits(Path(place))
    text = json.dumps(all_specs, separators=(",", ":")).encode()
    (DATA / "hf_all.json.gz").write_bytes(gzip.compress(text, mtime=0))
    np.savez_compressed(DATA / "hf_all.npz", **all_logits)
