"""Embeddings of a picture or a sound by transformers, for `mmproj_make`: what goes in, and what comes out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np


def picture(height: int, width: int, frames: int = 1) -> np.ndarray:
    """Return normalized pixels (frames, height, width, 3)."""
    return np.random.RandomState(7).standard_normal((frames, height, width, 3)).astype(np.float32)


def model_of(folder: Path) -> Any:
    """Return the model, with all weights of the encoders from the folder."""
    import torch
    import transformers

    config = json.loads((folder / "config.json").read_text())
    program = getattr(transformers, config["architectures"][0])
    model, info = program.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    missing = [name for name in info["missing_keys"] if "language_model" not in name and "lm_head" not in name]
    assert not missing, missing
    assert not info["unexpected_keys"], info["unexpected_keys"]
    return model.eval()


def patches(pixels: np.ndarray, side: int, merge: int) -> np.ndarray:
    """Return the patches of one picture as Qwen's processors order them: (patches, 3 * 2 * side * side)."""
    both = np.concatenate([pixels, pixels])[:2].transpose(0, 3, 1, 2)
    rows, columns = pixels.shape[1] // side, pixels.shape[2] // side
    cells = both.reshape(1, 2, 3, rows // merge, merge, side, columns // merge, merge, side)
    return cells.transpose(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(rows * columns, -1)


def qwen(folder: Path) -> dict[str, np.ndarray]:
    import torch

    model = model_of(folder)
    visual = model.model.visual
    side, pixels = model.config.vision_config.patch_size, None
    pixels = picture(8 * side, 12 * side)
    grid = torch.tensor([[1, 8, 12]])
    with torch.no_grad():
        found = visual(torch.from_numpy(patches(pixels, side, 2)), grid_thw=grid)
    parts = [found.pooler_output, *(getattr(found, "deepstack_features", None) or [])]
    return {"vision:in": pixels, "vision:out": torch.cat(parts, -1).numpy()}
