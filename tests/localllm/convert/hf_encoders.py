"""Tiny encoders and embedding models as Hugging Face checkpoints, written without torch as in `hf_synthetic`.

transformers computed the stored hidden states, embeddings and scores.

    python -m tests.localllm.convert.hf_encoders [MODEL...]    # regenerates data/hf_encoders.*, or these models

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

from tests.localllm.convert.hf_models import ids
from tests.localllm.convert.hf_settings import CONTEXT, WINDOW
from tests.localllm.convert.hf_synthetic import DATA, POSITIONS, numbers, write_folder
from tests.localllm.convert.hf_tokenizers import VOCABULARY
from tests.localllm.convert.support import save

_COMMON = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": CONTEXT, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "initializer_range": 0.4,
}  # fmt: skip
_MODERN = {
    "num_hidden_layers": 5, "local_attention": WINDOW, "global_attn_every_n_layers": 3, "cls_token_id": 1,
    "sep_token_id": 2,
}  # fmt: skip
_GEMMA = {
    "head_dim": 16, "num_key_value_heads": 2, "query_pre_attn_scalar": 16, "sliding_window": WINDOW,
    "num_hidden_layers": 7, "use_bidirectional_attention": True,
}  # fmt: skip
_DISTIL = {"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4}

# Name: model class, configuration class, further settings, tokenizer, and sentence-transformers pooling.
ENCODERS: dict[str, tuple[str, str, dict[str, Any], str, str]] = {
    "bert": ("BertModel", "BertConfig", {}, "wordpiece", "cls"),
    "bert-masked": ("BertForMaskedLM", "BertConfig", {}, "wordpiece", ""),
    "bert-rank": ("BertForSequenceClassification", "BertConfig", {"num_labels": 3}, "wordpiece", ""),
    "distilbert": ("DistilBertModel", "DistilBertConfig", _DISTIL, "wordpiece", "mean"),
    "roberta": ("RobertaModel", "RobertaConfig", {}, "roberta", "mean"),
    "roberta-rank": ("RobertaForSequenceClassification", "RobertaConfig", {"num_labels": 1}, "roberta", ""),
    "xlm-roberta": ("XLMRobertaModel", "XLMRobertaConfig", {}, "unigram", "cls"),
    "xlm-roberta-rank": ("XLMRobertaForSequenceClassification", "XLMRobertaConfig", {"num_labels": 1}, "unigram", ""),
    "nomic-bert": ("NomicBertModel", "NomicBertConfig", {}, "wordpiece", "mean"),
    "modern-bert": ("ModernBertModel", "ModernBertConfig", _MODERN, "roberta", "mean"),
    "modern-bert-silu": ("ModernBertForMaskedLM", "ModernBertConfig",
                         {**_MODERN, "hidden_activation": "silu", "norm_bias": True, "mlp_bias": True,
                          "attention_bias": True}, "roberta", "cls"),
    "modern-bert-rank": ("ModernBertForSequenceClassification", "ModernBertConfig",
                         {**_MODERN, "num_labels": 1, "classifier_pooling": "mean"}, "roberta", ""),
    "jina-bert-v3": ("JinaEmbeddingsV3Model", "JinaEmbeddingsV3Config", {}, "unigram", "mean"),
    "jina-bert-v3-rank": ("JinaEmbeddingsV3ForSequenceClassification", "JinaEmbeddingsV3Config", {"num_labels": 1},
                          "unigram", ""),
    "eurobert": ("EuroBertModel", "EuroBertConfig", {"num_key_value_heads": 2, "mask_token_id": 3}, "llama3", "mean"),
    "gemma-embedding": ("Gemma3TextModel", "Gemma3TextConfig", _GEMMA, "spm", "mean"),
    "qwen3-embedding": ("Qwen3ForCausalLM", "Qwen3Config", {"head_dim": 16, "num_key_value_heads": 2}, "qwen2",
                        "lasttoken"),
    "qwen3-rank": ("Qwen3ForSequenceClassification", "Qwen3Config",
                   {"head_dim": 16, "num_key_value_heads": 2, "num_labels": 1}, "qwen2", ""),
}  # fmt: skip
DENSE = {"gemma-embedding": (40, 32)}  # output widths of the dense layers after pooling


def read_encoders() -> dict[str, dict[str, Any]]:
    specs: dict[str, dict[str, Any]] = json.loads(gzip.decompress((DATA / "hf_encoders.json.gz").read_bytes()))
    return specs


def write_encoder(name: str, spec: dict[str, Any], folder: Path) -> list[np.ndarray]:
    """Write an encoder checkpoint, and return the weight matrices of its dense layers."""
    write_folder(spec, folder)
    pooling, matrices, width = ENCODERS[name][4], [], int(_COMMON["hidden_size"])
    modules = [("", "models.Transformer")]
    if pooling:
        modules.append(("1_Pooling", "models.Pooling"))
        (folder / "1_Pooling").mkdir()
        modes = {"mean": "mean_tokens", "cls": "cls_token", "lasttoken": "lasttoken"}
        flags = {f"pooling_mode_{flag}": mode == pooling for mode, flag in modes.items()}
        (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": width, **flags}))
    for number, rows in enumerate(DENSE.get(name, ()), 2):
        path = folder / f"{number}_Dense"
        path.mkdir()
        modules.append((path.name, "models.Dense"))
        matrices.append(numbers(path.name, [rows, width], 0.0))
        save(path / "model.safetensors", {"linear.weight": matrices[-1]})
        told = {"in_features": width, "out_features": rows, "bias": False}
        (path / "config.json").write_text(
            json.dumps({**told, "activation_function": "torch.nn.modules.linear.Identity"})
        )
        width = rows
    entries = [{"idx": i, "path": path, "type": f"sentence_transformers.{kind}"}
               for i, (path, kind) in enumerate(modules)]  # fmt: skip
    if pooling:
        (folder / "modules.json").write_text(json.dumps(entries))
    return matrices


def _spec(name: str, folder: Path) -> dict[str, Any]:
    """Return config.json, tensor names and shapes as transformers saves them for an entry of ENCODERS."""
    import transformers
    from safetensors.numpy import load_file

    kind, settings, more, tokenizer, _ = ENCODERS[name]
    config = getattr(transformers, settings)(**{**_COMMON, **more})
    getattr(transformers, kind)(config).save_pretrained(folder)
    saved = load_file(folder / "model.safetensors")
    tensors = [
        (key, list(x.shape), float(round(x.mean())) if "norm" in key.lower() and key.endswith("weight") else 0.0)
        for key, x in sorted(saved.items())
    ]
    return {"config": json.loads((folder / "config.json").read_text()), "tensors": tensors, "tokenizer": tokenizer}


def _results(name: str, folder: Path, dense: list[np.ndarray]) -> dict[str, np.ndarray]:
    """Return hidden states at some positions, the pooled embedding, and classifier scores."""
    import torch
    import transformers

    kind, _, _, _, pooling = ENCODERS[name]
    model, found = getattr(transformers, kind).from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
    )
    assert not found["missing_keys"], found
    with torch.no_grad():
        hidden = model.eval().base_model(torch.tensor([ids()])).last_hidden_state[0].numpy()
        results = {name: hidden[POSITIONS]}
        if kind.endswith("SequenceClassification"):
            results[f"{name}:scores"] = model(torch.tensor([ids()])).logits[0].numpy()
    pooled = {"mean": hidden.mean(axis=0), "cls": hidden[0], "lasttoken": hidden[-1]}.get(pooling)
    if pooled is not None:
        for matrix in dense:
            pooled = matrix @ pooled
        results[f"{name}:pooled"] = pooled
    return results


if __name__ == "__main__":
    names = set(sys.argv[1:]) or set(ENCODERS)
    whole = names == set(ENCODERS)
    all_specs = {} if whole else read_encoders()
    stored = {} if whole else dict(np.load(DATA / "hf_encoders.npz"))
    for model_name in names:
        with tempfile.TemporaryDirectory() as place:
            all_specs[model_name] = _spec(model_name, Path(place))
        with tempfile.TemporaryDirectory() as place:
            layers = write_encoder(model_name, all_specs[model_name], Path(place))
            stored |= _results(model_name, Path(place), layers)
    text = json.dumps(dict(sorted(all_specs.items())), separators=(",", ":")).encode()
    (DATA / "hf_encoders.json.gz").write_bytes(gzip.compress(text, mtime=0))
    np.savez_compressed(DATA / "hf_encoders.npz", **stored)
