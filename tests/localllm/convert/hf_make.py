"""Build the tiny models of the tables with torch and transformers, and store their contents and results.

python -m tests.localllm.convert.hf_make [MODEL...]    # data/hf_*.json.gz and .npz: all models, or only these
python -m tests.localllm.convert.hf_make --folders     # data/hf: whole checkpoints with weights of several types
"""

from __future__ import annotations

import copy
import gzip
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from localllm import quant
from tests.localllm.convert.checkpoints import DATA, LEFT_OUT, SPECS, STORED, TABLES, dense_layers, read_json, write
from tests.localllm.convert.hf_multimodal import ANSWERS, BESIDE, CLASSES, TEXT
from tests.localllm.convert.hf_settings import Tiny
from tests.localllm.convert.hf_tokenizers import save_tokenizer
from tests.localllm.convert.weights import ANSWER, POSITIONS, PROMPT, XIELU, ids

ALL: dict[str, Tiny] = {name: model for table in TABLES.values() for name, model in table.items()}
# Buffers that follow from config.json, and counters of BatchNorm.
COMPUTED = (".slope_rate", ".query_decay", ".key_decay", ".diagonal_decay", "num_batches_tracked")


def _program(name: str, of_answers: bool = False) -> Any:
    """Return the model class in transformers: of the whole model, or of the submodule that returns text logits."""
    import transformers

    found = (ANSWERS.get(name) if of_answers else None) or ALL[name].program
    auto = "AutoModelForImageTextToText" if "vision_config" in ALL[name].settings else "AutoModelForCausalLM"
    return getattr(transformers, found or auto)


def make(name: str, folder: Path, dtype: str = "float32", **save: Any) -> Any:
    """Save the model to `folder` with random weights of type `dtype`, and return it.

    `save` holds further arguments of save_pretrained.
    """
    import torch
    import transformers

    torch.manual_seed(sum(name.encode()))
    config = getattr(transformers, ALL[name].kind)(**copy.deepcopy(ALL[name].settings))
    program = _program(name)
    build = program.from_config if program.__name__.startswith("Auto") else program._from_config
    model = build(config, attn_implementation="eager", dtype=torch.float32)
    kept = getattr(torch, dtype)
    experts = {}
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.copy_(_values(torch, key, parameter).to(kept))
            if name.endswith("mxfp4") and key.endswith(("gate_up_proj", "down_proj")):
                experts[key], values = mxfp4(parameter.numpy())
                parameter.copy_(torch.from_numpy(values))
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer.copy_((0.3 * torch.randn(buffer.shape)).to(kept))
            if key.endswith("tid2eid"):  # hash-routed layers: distinct experts for each token id
                buffer.copy_(torch.rand(len(buffer), 4).argsort(1)[:, : buffer.shape[1]])
            if key.endswith(XIELU):
                buffer.fill_(0.75 if key.endswith("beta") else -0.25)
    copy.deepcopy(model).to(kept).save_pretrained(folder, **save)  # `model` keeps its rotations in float32
    if experts:
        replace_experts(folder / "model.safetensors", experts)
    save_tokenizer(ALL[name].tokenizer, folder)
    return model.eval()


def _values(torch: Any, name: str, parameter: Any) -> Any:
    """Return random weights that make every tensor matter: peaked attention, norm weights away from 1, and nonzero
    biases.
    """
    noise = torch.randn(parameter.shape)
    if "norm" in name.lower() and name.endswith("weight"):
        return parameter + 0.3 * noise
    if name.endswith(("bias", "sinks")) or "bias" in name.rsplit(".", 1)[-1]:
        return 0.3 * noise
    if "embed" in name:
        return noise
    gain = 2.0 if "q_proj" in name or "k_proj" in name or "qkv" in name else 1.0
    columns = parameter.shape[-2] if parameter.ndim == 3 and "experts" in name else parameter.shape[-1]
    return gain * noise / columns**0.5


def mxfp4(x: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Quantize expert weights (E, a, b) to MXFP4 in the layout of gpt-oss checkpoints.

    Return blocks (E, b, a / 32, 16), scales (E, b, a / 32), and the dequantized weights (E, a, b).
    """
    experts, a, b = x.shape
    rows = quant.quantize(np.ascontiguousarray(x.transpose(0, 2, 1)).reshape(-1, a), "MXFP4")
    values = quant.dequantize(rows, "MXFP4").reshape(experts, b, a).transpose(0, 2, 1)
    stored = rows.reshape(-1, 17)
    codes = np.concatenate([stored[:, 1:] & 15, stored[:, 1:] >> 4], axis=1)
    blocks = codes[:, 0::2] | codes[:, 1::2] << 4
    parts = {"blocks": blocks.reshape(experts, b, a // 32, 16), "scales": stored[:, 0].reshape(experts, b, a // 32)}
    return parts, np.ascontiguousarray(values)


def replace_experts(path: Path, experts: dict[str, dict[str, np.ndarray]]) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(path)
    for name, parts in experts.items():
        del tensors[name]
        tensors |= {f"{name}_{part}": torch.from_numpy(np.ascontiguousarray(x)) for part, x in parts.items()}
    save_file(tensors, path, {"format": "pt"})


def logits(model: Any) -> np.ndarray:
    """Return the model's logits (T, vocabulary) for the prompt `ids()`."""
    import torch

    for module in model.modules():  # MPT: exact GELU, which GGUF cannot express, would give an NMSE of 9e-8
        if type(module).__name__ == "GELU":
            module.approximate = "tanh"
    with torch.no_grad():
        found: np.ndarray = model(torch.tensor([ids()]), use_cache=False).logits[0].float().numpy()
    return found


def spec_of(name: str) -> dict[str, Any]:
    """Return config.json, the tensors and the tokenizer as transformers saves them."""
    from safetensors.numpy import load_file

    with tempfile.TemporaryDirectory() as place:
        make(name, Path(place))
        saved = {key: x for path in Path(place).glob("*.safetensors") for key, x in load_file(path).items()}
        config = json.loads((Path(place) / "config.json").read_text())
    if name in CLASSES:
        config["architectures"] = [name.partition("-")[0]]
    tensors = [[key, list(x.shape), _base(key, x)] for key, x in sorted(saved.items()) if not key.endswith(COMPUTED)]
    spec = {"config": config, "tensors": tensors, "tokenizer": ALL[name].tokenizer}
    return spec | ({"fp8": [64, 96]} if name.endswith("fp8") else {})


def _base(name: str, values: np.ndarray) -> float | list[Any]:
    """Return the mean of a tensor's random values, or the values themselves for integers."""
    if values.dtype == np.int64:
        found: list[Any] = values.tolist()
        return found
    if name.endswith(XIELU):
        return float(values)
    return float(round(values.mean())) if "norm" in name.lower() and name.endswith("weight") else 0.0


def results_of(name: str, folder: Path) -> dict[str, np.ndarray]:
    """Return the results of transformers for a folder of `write`: logits at some positions; of encoders hidden states,
    the pooled embedding, and classifier scores.
    """
    import torch

    model, told = _program(name, of_answers=True).from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
    )
    assert not [key for keys in told.values() for key in keys if not key.endswith(COMPUTED)], told
    model, program, pooling = model.eval(), ALL[name].program, ALL[name].pooling
    if name not in TABLES["hf_encoders"] and name not in TABLES["hf_t5"]:
        return {name: logits(model)[POSITIONS[:: 2 if name in CLASSES else 1]]}
    with torch.no_grad():
        if name in TABLES["hf_t5"]:
            if program.endswith("EncoderModel"):
                return {name: model(torch.tensor([PROMPT])).last_hidden_state[0].numpy()}
            whole = model(torch.tensor([PROMPT]), decoder_input_ids=torch.tensor([ANSWER]))
            return {name: whole.logits[0].numpy()}
        hidden = model.base_model(torch.tensor([ids()])).last_hidden_state[0].numpy()
        results = {name: hidden[POSITIONS]}
        if program.endswith("SequenceClassification"):
            results[f"{name}:scores"] = model(torch.tensor([ids()])).logits[0].numpy()
    pooled = {"mean": hidden.mean(axis=0), "cls": hidden[0], "lasttoken": hidden[-1]}.get(pooling)
    if pooled is not None:
        for matrix in dense_layers(name).values():
            pooled = matrix @ pooled
        results[f"{name}:pooled"] = pooled
    return results


def _trimmed(name: str, spec: dict[str, Any]) -> dict[str, Any]:
    """Cut the tensors outside of the language model to a single value, and add tensors of additional models."""
    tensors = [row if TEXT.match(row[0]) else [row[0], [1], 0.0] for row in spec["tensors"]]
    return {**spec, "tensors": tensors + [[key, [1], 0.0] for key in BESIDE.get(name, ())]}


def remake(name: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return the stored data of a model: its specification, and the results of its weights."""
    SPECS[name] = spec = spec_of(name)
    with tempfile.TemporaryDirectory() as place:
        results = results_of(name, write(name, Path(place), packed=False))
    return (_trimmed(name, spec) if name in CLASSES else spec), results


# Checkpoints in data/hf: name, model, dtype, arguments of save_pretrained.
FOLDERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama-shards": ("llama", "float32", {"max_shard_size": "40KB"}),
    "experts": ("mixtral", "bfloat16", {}),
    "gemma-pieces": ("gemma", "bfloat16", {}),
    "fused": ("phi3", "float16", {}),
    "long-rope": ("phi3-long", "bfloat16", {}),
    "mxfp4": ("gpt-oss-mxfp4", "bfloat16", {}),
}


def _make_folders(root: Path) -> None:
    results = {}
    for name, (model, dtype, told) in FOLDERS.items():
        (root / name).mkdir(parents=True, exist_ok=True)
        results[name] = logits(make(model, root / name, dtype, **told))
        (root / name / "generation_config.json").unlink(missing_ok=True)
    (root / "gemma-pieces" / "tokenizer.json").unlink()
    np.savez_compressed(root / "logits.npz", ids=np.array(ids()), **results)


def _main(names: list[str]) -> None:
    for file, table in TABLES.items():
        wanted = [name for name in table if name not in LEFT_OUT and (not names or name in names)]
        if not wanted:
            continue
        specs = {name: spec for name, spec in read_json(file).items() if name in table}
        stored = {name: x for name, x in STORED.items() if name.partition(":")[0] in table}
        for name in wanted:
            specs[name], found = remake(name)
            stored |= found
        text = json.dumps(specs, separators=(",", ":")).encode()
        (DATA / f"{file}.json.gz").write_bytes(gzip.compress(text, mtime=0))
        np.savez_compressed(DATA / f"{file}.npz", **stored)


if __name__ == "__main__":
    _make_folders(DATA / "hf") if sys.argv[1:] == ["--folders"] else _main(sys.argv[1:])
