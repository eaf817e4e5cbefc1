"""MXFP4 expert weights in the layout of gpt-oss checkpoints."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from localllm import quant


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
