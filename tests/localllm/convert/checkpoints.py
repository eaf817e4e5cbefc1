"""All tiny checkpoints of the tables: their contents, transformers' stored results, and how to write a folder.

Tensor names, shapes and config.json are stored as transformers saves them (`hf_make`), or come from the tables of
`hf_own_*`. The names of the tensors seed the weights.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from localllm.convert import Checkpoint, open_checkpoint
from tests.localllm.convert.hf_dense import DENSE, RECURRENT
from tests.localllm.convert.hf_encoders import DENSE_LAYERS, ENCODERS, T5
from tests.localllm.convert.hf_mixtures import MIXTURES, SPARSE
from tests.localllm.convert.hf_multimodal import CLASSES, MULTIMODAL
from tests.localllm.convert.hf_own_dense import DENSE as OWN_DENSE
from tests.localllm.convert.hf_own_experts import MIXTURES as OWN_MIXTURES
from tests.localllm.convert.hf_own_multimodal import SEES, SPEAKS
from tests.localllm.convert.hf_own_packed import QUANTIZED, quantized
from tests.localllm.convert.hf_own_recurrent import RECURRENT as OWN_RECURRENT
from tests.localllm.convert.hf_own_shapes import Case
from tests.localllm.convert.hf_settings import Tiny
from tests.localllm.convert.hf_tokenizers import save_tokenizer
from tests.localllm.convert.support import edit_json, logits_of, save, write_modules
from tests.localllm.convert.weights import POSITIONS, fp8, ids, numbers
from tests.models.support import nmse

DATA = Path(__file__).parent / "data"
MODELS: dict[str, Tiny] = {**DENSE, **MIXTURES, **RECURRENT, **SPARSE, **MULTIMODAL}
# File of DATA: the models whose specifications and results it holds.
TABLES = {"hf_all": MODELS, "hf_classes": CLASSES, "hf_encoders": ENCODERS, "hf_t5": T5}
LEFT_OUT = ("gpt-oss-mxfp4",)  # MXFP4 weights cannot be seeded by name; this checkpoint is in data/hf
OWN: dict[str, Case] = {
    **OWN_DENSE, **OWN_MIXTURES, **OWN_RECURRENT, **SEES, **SPEAKS, **QUANTIZED,
}  # fmt: skip


def read_json(name: str) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(gzip.decompress((DATA / f"{name}.json.gz").read_bytes()))
    return found


# Name: config.json, tensors (name, shape, mean of the random values), tokenizer, and the blocks of FP8 weights.
SPECS: dict[str, dict[str, Any]] = {name: spec for file in TABLES for name, spec in read_json(file).items()}
SPECS |= {name: case._asdict() for name, case in OWN.items()}
STORED: dict[str, np.ndarray] = {name: x for file in TABLES for name, x in np.load(DATA / f"{file}.npz").items()}
_INNER = (
    "text_config",
    "thinker_config",
    "talker_config",
    "language_config",
)  # tables of a text model


def tensors_of(name: str) -> dict[str, np.ndarray]:
    """Return the tensors of a checkpoint, before any quantization."""
    return {key: numbers(key, *rest) for key, *rest in SPECS[name]["tensors"]}


def with_tensors(name: str, changes: Mapping[str, np.ndarray | None]) -> dict[str, np.ndarray]:
    """Return the tensors of a checkpoint with some replaced, or removed if None."""
    return {key: x for key, x in {**tensors_of(name), **changes}.items() if x is not None}


def config_of(name: str, **changes: Any) -> dict[str, Any]:
    """Return config.json with some keys replaced: by null if `...`, or removed if None. `a.b` is key b of table a.

    A key that is not at the top changes the inner table of a multimodal model, as does a table of its name.
    """
    config = dict(SPECS[name]["config"])
    inner = next((key for key in _INNER if key in config), None)
    if inner and isinstance(changes.get(inner), dict):
        changes |= changes.pop(inner)
        told = changes
    else:
        tops = {key: key.partition(".")[0] for key in changes} if inner else {}
        told = {key: changes[key] for key, top in tops.items() if top not in config and not top.endswith("_config")}
    outer = {key: x for key, x in changes.items() if key not in told}
    return replaced(config, ({inner: replaced(config[inner], told)} if inner and told else {}) | outer)


def replaced(config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    found = dict(config)
    for path, x in changes.items():
        key, _, rest = path.partition(".")
        if rest:
            found[key] = replaced(found.get(key) or {}, {rest: x})
        elif x is None:
            found.pop(key, None)
        else:
            found[key] = None if x is ... else x
    return found


def write(
    name: str, folder: Path, tensors: Mapping[str, np.ndarray] | None = None, packed: bool = True, **config: Any
) -> Path:
    """Write a checkpoint, with changes to config.json as in `config_of` and with other tensors if given.

    With `packed` false, weights in FP8 are written dequantized.
    """
    folder.mkdir(exist_ok=True, parents=True)
    spec, told = SPECS[name], config_of(name, **config)
    found, types = quantized(name, spec["tensors"]) if name in QUANTIZED else (tensors_of(name), {})
    if blocks := spec.get("fp8"):
        if packed:
            told["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": blocks}
        for key in [key for key in found if "proj" in key and key.endswith("weight")]:
            codes, scales, found[key] = fp8(found[key], *blocks)
            if packed:
                found |= {key: codes, f"{key}_scale_inv": scales}
    if told:  # Pocket TTS has no config.json
        (folder / "config.json").write_text(json.dumps(told))
    save(folder / "model.safetensors", found if tensors is None else dict(tensors), types if tensors is None else {})
    save_tokenizer(spec["tokenizer"], folder)
    _write_around(name, folder)
    return folder


def metadata_of(name: str, folder: Path, **config: Any) -> dict[str, Any]:
    """Return the metadata that a checkpoint with a changed config.json converts to."""
    with open_checkpoint(write(name, folder, **config)) as model:
        return dict(model.metadata)


def check_logits(name: str, model: Checkpoint) -> None:
    """Check that the logits of a converted checkpoint are those that transformers stored."""
    positions = POSITIONS if len(STORED[name]) == len(POSITIONS) else POSITIONS[::2]
    assert nmse(logits_of(model, ids())[positions], STORED[name]).max() < 1e-9


def _write_around(name: str, folder: Path) -> None:
    """Write the files of sentence-transformers, and the settings that single models need."""
    kind, modules = "sentence_transformers.models.", {}
    if pooling := ENCODERS[name].pooling if name in ENCODERS else "lasttoken" * (name in ("qwen2-base", "qwen3-base")):
        modes = {"mean": "mean_tokens", "cls": "cls_token", "lasttoken": "lasttoken"}
        told = {f"pooling_mode_{flag}": mode == pooling for mode, flag in modes.items()}
        modules["1_Pooling"] = (f"{kind}Pooling", {"word_embedding_dimension": 32, **told})
    matrices = dense_layers(name)
    for path, matrix in matrices.items():
        sizes = {"in_features": matrix.shape[1], "out_features": matrix.shape[0], "bias": False}
        told = {**sizes, "activation_function": "torch.nn.modules.linear.Identity"}
        modules[path] = ("pylate.models.Dense.Dense" if name in OWN else f"{kind}Dense", told)
    if modules:
        write_modules(folder, modules)
    for path, matrix in matrices.items():
        save(folder / path / "model.safetensors", {"linear.weight": matrix})
    if name == "phi3-vision":  # llama.cpp's converter requires the class
        edit_json(folder / "tokenizer_config.json", tokenizer_class="LlamaTokenizer")


def dense_layers(name: str) -> dict[str, np.ndarray]:
    """Return the matrices of the dense layers behind the model, by their folders."""
    found, width = {}, 32
    for number, rows in enumerate(DENSE_LAYERS.get(name, ()), 1 if name in OWN else 2):
        path = f"{number}_Dense"
        random = np.random.RandomState(5).standard_normal((rows, width)).astype(np.float32)
        found[path] = random if name in OWN else numbers(path, [rows, width], 0.0)
        width = rows
    return found
