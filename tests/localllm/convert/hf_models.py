"""The tiny random models of `hf_table`, built with torch and transformers, with tokenizers trained here.

`make` saves one as a Hugging Face checkpoint and returns the logits that transformers computes.

    python -m tests.localllm.convert.hf_models tests/localllm/convert/data/hf    # for tests without torch
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

from tests.localllm.convert.hf_mxfp4 import mxfp4, replace_experts
from tests.localllm.convert.hf_settings import COMMON, PARTS, VISION, XIELU
from tests.localllm.convert.hf_table import MODELS
from tests.localllm.convert.hf_tokenizers import VOCABULARY, save_tokenizer

TOKENS = 24  # prompt length, longer than the models' sliding windows


def make(name: str, folder: Path, dtype: str = "float32", **save: Any) -> np.ndarray:
    """Save the model to `folder` with weights of type `dtype`, and return its logits (TOKENS, vocabulary) for the
    prompt `ids()`.

    The logits are computed in float32. `save` holds further arguments of save_pretrained.
    """
    import torch
    import transformers

    kind, more, tokenizer = MODELS[name]
    torch.manual_seed(sum(name.encode()))
    of_kind, settings = getattr(transformers, kind), {**COMMON, **more}
    parts = {"text_config": settings, "vision_config": VISION, **PARTS.get(kind, {})}
    config = of_kind(**parts) if sees(name) else of_kind(**settings)
    maker = transformers.AutoModelForImageTextToText if sees(name) else transformers.AutoModelForCausalLM
    model = maker.from_config(config, attn_implementation="eager", dtype=torch.float32)
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
    by_tanh(model.eval())
    with torch.no_grad():
        logits: np.ndarray = model(torch.tensor([ids()]), use_cache=False).logits[0].float().numpy()
    model.to(kept).save_pretrained(folder, **save)
    if experts:
        replace_experts(folder / "model.safetensors", experts)
    save_tokenizer(tokenizer, folder)
    return logits


def sees(name: str) -> bool:
    """Return whether the model has a vision encoder."""
    return "VL" in MODELS[name][0] or MODELS[name][0] in ("Mistral3Config", "Glm5NextConfig", "Step3p7Config", *PARTS)


def by_tanh(model: Any) -> None:
    """Switch MPT's GELU to the tanh approximation, which GGUF requires. Exact GELU would give an NMSE of 9e-8."""
    for module in model.modules():
        if type(module).__name__ == "GELU":
            module.approximate = "tanh"


def _values(torch: Any, name: str, parameter: Any) -> Any:
    """Return random weights that make every tensor matter: peaked attention, norm weights away from 1, and nonzero
    biases.
    """
    noise = torch.randn(parameter.shape)
    if "norm" in name and name.endswith("weight"):
        return parameter + 0.3 * noise
    if name.endswith(("bias", "sinks")) or "bias" in name.rsplit(".", 1)[-1]:
        return 0.3 * noise
    if "embed" in name:
        return noise
    gain = 2.0 if "q_proj" in name or "k_proj" in name or "qkv" in name else 1.0
    columns = parameter.shape[-2] if parameter.ndim == 3 and "experts" in name else parameter.shape[-1]
    return gain * noise / columns**0.5


def ids() -> list[int]:
    return [1, *(int(i) for i in np.random.default_rng(3).integers(3, VOCABULARY, TOKENS - 1))]


# Checkpoints in tests/localllm/convert/data/hf: name, model, dtype, arguments of save_pretrained.
FIXTURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama-shards": ("llama", "float32", {"max_shard_size": "40KB"}),
    "experts": ("mixtral", "bfloat16", {}),
    "gemma-pieces": ("gemma", "bfloat16", {}),
    "fused": ("phi3", "float16", {}),
    "long-rope": ("phi3-long", "bfloat16", {}),
    "mxfp4": ("gpt-oss-mxfp4", "bfloat16", {}),
}

if __name__ == "__main__":
    root, all_logits = Path(sys.argv[1]), {}
    for folder_name, (model_name, kept_as, told) in FIXTURES.items():
        target = root / folder_name
        target.mkdir(parents=True, exist_ok=True)
        all_logits[folder_name] = make(model_name, target, kept_as, **told)
        (target / "generation_config.json").unlink(missing_ok=True)
    (root / "gemma-pieces" / "tokenizer.json").unlink()
    np.savez_compressed(root / "logits.npz", ids=np.array(ids()), **all_logits)
