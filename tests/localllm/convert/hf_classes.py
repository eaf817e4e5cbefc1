"""Tiny checkpoints of classes that share a GGUF architecture with other classes: text models, vision models and audio
models.

transformers computed the stored text logits. Tensors of other modalities are cut to a single value, because the
converter skips them.

    python -m tests.localllm.convert.hf_classes [CLASS...]    # regenerates data/hf_classes.*, or only these entries

The command needs torch and transformers.
"""

from __future__ import annotations

import gzip
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from tests.localllm.convert.hf_classes_table import ANSWERS, BESIDE, CLASSES, PROGRAMS, TEXT
from tests.localllm.convert.hf_synthetic import DATA, write_folder

COUNTS = "num_batches_tracked"  # name suffix of BatchNorm counters
POSITIONS = [0, 11, 23]  # positions whose logits are stored


def read_classes() -> dict[str, dict[str, Any]]:
    specs: dict[str, dict[str, Any]] = json.loads(gzip.decompress((DATA / "hf_classes.json.gz").read_bytes()))
    return specs


def _built(name: str) -> Any:
    """Build the transformers model with random weights."""
    import torch
    import transformers

    kind, settings, _ = CLASSES[name]
    torch.manual_seed(7)
    config = getattr(transformers, kind)(**settings)
    return getattr(transformers, PROGRAMS.get(name, name.partition("-")[0]))._from_config(
        config, attn_implementation="eager", dtype=torch.float32
    )


def _spec(name: str, folder: Path) -> dict[str, Any]:
    """Return config.json and the tensor names and shapes that transformers saves."""
    from safetensors.numpy import load_file

    _built(name).save_pretrained(folder)
    saved = {key: x for path in folder.glob("*.safetensors") for key, x in load_file(path).items()}
    tensors = [(key, list(x.shape), _base(key, x)) for key, x in sorted(saved.items()) if not key.endswith(COUNTS)]
    config = json.loads((folder / "config.json").read_text())
    return {
        "config": {**config, "architectures": [name.partition("-")[0]]},
        "tensors": tensors,
        "tokenizer": CLASSES[name][2],
    }


def _base(name: str, values: np.ndarray) -> float | list[Any]:
    """Return the mean of a tensor's random values, or the values themselves for integers."""
    if values.dtype == np.int64:
        found: list[Any] = values.tolist()
        return found
    return float(round(values.mean())) if "norm" in name.lower() and name.endswith("weight") else 0.0


def _logits(name: str, folder: Path) -> np.ndarray:
    import torch
    import transformers

    from tests.localllm.convert.hf_models import ids

    program = getattr(transformers, ANSWERS.get(name) or PROGRAMS.get(name, name.partition("-")[0]))
    model, told = program.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
    )
    assert not [key for keys in told.values() for key in keys if not key.endswith(COUNTS)], told
    model.eval()
    with torch.no_grad():
        logits: np.ndarray = model(torch.tensor([ids()]), use_cache=False).logits[0].float().numpy()
    return logits[POSITIONS]


def _trimmed(name: str, spec: dict[str, Any]) -> dict[str, Any]:
    """Cut tensors outside the language model to a single value, and add placeholder tensors of additional models."""
    tensors = [(key, shape, base) if TEXT.match(key) else (key, [1], 0.0) for key, shape, base in spec["tensors"]]
    return {**spec, "tensors": tensors + [(key, [1], 0.0) for key in BESIDE.get(name, ())]}


if __name__ == "__main__":
    kept = set(CLASSES) - set(sys.argv[1:]) if sys.argv[1:] else set()
    all_specs = {name: spec for name, spec in read_classes().items() if name in kept} if kept else {}
    stored = np.load(DATA / "hf_classes.npz") if kept else {}
    all_logits = {name: stored[name] for name in all_specs}
    for class_name in CLASSES:
        if class_name in all_specs or (sys.argv[1:] and class_name not in sys.argv[1:]):
            continue
        with tempfile.TemporaryDirectory() as place:
            whole = _spec(class_name, Path(place))
        with tempfile.TemporaryDirectory() as place:
            write_folder(whole, Path(place))
            all_logits[class_name] = _logits(class_name, Path(place))
        all_specs[class_name] = _trimmed(class_name, whole)
        print(class_name, len(whole["tensors"]))
    text = json.dumps(all_specs, separators=(",", ":")).encode()
    (DATA / "hf_classes.json.gz").write_bytes(gzip.compress(text, mtime=0))
    np.savez_compressed(DATA / "hf_classes.npz", **all_logits)
