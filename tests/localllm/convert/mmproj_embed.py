"""Embeddings of a picture or a sound by transformers, for `mmproj_make`.

Each function takes a model, and returns the kind and shape of the input, which `mmproj_cases` makes of random numbers,
and a function that runs the model. Names of arrays that `embed` returns: `vision:out`, and `vision:rows`: which of our
rows they are.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.localllm.convert.mmproj_cases import given

Array = np.ndarray
Prepared = tuple[str, tuple[int, ...], Callable[[Any], Any]]
Prepare = Callable[..., Prepared]


def model_of(folder: Path) -> Any:
    """Return the model, with all weights of the encoders from the folder."""
    import torch
    import transformers

    config = json.loads((folder / "config.json").read_text())
    program = getattr(transformers, config["architectures"][0])
    model, info = program.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    text = ("language_model", "text_model", "lm_head", "model.embed_tokens", "model.layers", "model.norm", ".head.")
    missing = [name for name in info["missing_keys"] if not any(part in name for part in text)]
    assert not missing, missing
    assert not info["unexpected_keys"], info["unexpected_keys"]
    return model.eval()


def embed(folder: Path, *prepares: Prepare) -> dict[str, Array]:
    """Return the embeddings of a checkpoint's encoders."""
    import torch

    found = {}
    for prepare in prepares:
        model = model_of(folder)
        kind, shape, run = prepare(model)
        own = given(kind, shape)
        with torch.no_grad():
            found |= {f"{kind}:shape": np.array(shape), f"{kind}:out": _rows(run(own))}
        if prepare is pixtral:
            found["vision:rows"] = _without_breaks(model)
    return found


def _rows(found: Any) -> Array:
    found = getattr(found, "pooler_output", found)
    found = found[0] if isinstance(found, list | tuple) else found
    rows: Array = found.numpy()
    return rows.reshape(-1, rows.shape[-1])


def _tensor(values: Array) -> Any:
    import torch

    return torch.from_numpy(np.ascontiguousarray(values))


def _channels(pixels: Array) -> Any:
    """Return pixels (n, height, width, 3) as (n, 3, height, width)."""
    return _tensor(pixels.transpose(0, 3, 1, 2))


def _cells(pixels: Array, side: int, *axes: int) -> Array:
    """Return the patches of a picture, (rows * columns, side, side, 3) with these axes in order."""
    height, width = pixels.shape[1:3]
    found = pixels[0].reshape(height // side, side, width // side, side, 3).transpose(0, 2, 1, 3, 4)
    return found.reshape(-1, side, side, 3).transpose(0, *axes)


def qwen(model: Any) -> Prepared:
    import torch

    side, rows, columns = model.config.vision_config.patch_size, 8, 12

    def run(pixels: Array) -> Any:
        both = np.concatenate([pixels, pixels]).transpose(0, 3, 1, 2)
        cells = both.reshape(1, 2, 3, rows // 2, 2, side, columns // 2, 2, side).transpose(0, 3, 6, 4, 7, 2, 1, 5, 8)
        grid = torch.tensor([[1, rows, columns]])
        found = model.model.visual(_tensor(cells.reshape(rows * columns, -1)), grid_thw=grid)
        return torch.cat([found.pooler_output, *(getattr(found, "deepstack_features", None) or [])], -1)

    return "vision", (1, rows * side, columns * side, 3), run


def square(model: Any) -> Prepared:
    """Gemma 3, InternVL."""
    side = model.config.vision_config.image_size
    sides = (side, side) if isinstance(side, int) else side
    return "vision", (1, *sides, 3), lambda pixels: model.get_image_features(_channels(pixels))


def idefics(model: Any) -> Prepared:
    side = model.config.vision_config.image_size
    return "vision", (1, side, side, 3), lambda pixels: model.get_image_features(_channels(pixels)[None])


LINES, PATCHES = 4, 6


def pixtral(model: Any) -> Prepared:
    import torch

    side = model.config.vision_config.patch_size
    sizes = torch.tensor([[LINES * side, PATCHES * side]])
    shape = (1, LINES * side, PATCHES * side, 3)
    return "vision", shape, lambda pixels: model.get_image_features(_channels(pixels), image_sizes=sizes)


def _without_breaks(model: Any) -> Array:
    """Return which of our rows are not the ends of lines, which are in the prompt in transformers."""
    merge = getattr(model.config, "spatial_merge_size", 1)
    lines, each = LINES // merge, PATCHES // merge
    return np.concatenate([np.arange(each) + line * (each + 1) for line in range(lines)])


def lfm2(model: Any) -> Prepared:
    import torch

    rows, columns = 6, 8

    def run(pixels: Array) -> Any:
        return model.get_image_features(
            pixel_values=_tensor(_cells(pixels, 16, 1, 2, 3).reshape(1, rows * columns, -1)),
            spatial_shapes=torch.tensor([[rows, columns]]),
            pixel_attention_mask=torch.ones(1, rows * columns, dtype=torch.long),
        )

    return "vision", (1, rows * 16, columns * 16, 3), run


def paddle(model: Any) -> Prepared:
    """PaddleOCR-VL, with more patches than its table has: if there are fewer, llama.cpp smooths the table, too."""
    import torch

    rows, columns = 10, 12

    def run(pixels: Array) -> Any:
        return model.model.get_image_features(_tensor(_cells(pixels, 14, 3, 1, 2)), torch.tensor([[1, rows, columns]]))

    return "vision", (1, rows * 14, columns * 14, 3), run


def minicpm(model: Any) -> Prepared:
    import torch

    rows, columns = 8, 12

    def run(pixels: Array) -> Any:
        strip = _cells(pixels, 14, 3, 1, 2).transpose(1, 2, 0, 3).reshape(1, 3, 14, -1)
        return model.get_image_features(_tensor(strip), torch.tensor([[rows, columns]]))

    return "vision", (1, rows * 14, columns * 14, 3), run


def gemma4(model: Any) -> Prepared:
    """Gemma 4, and without encoder layers, whose cells are larger."""
    own = model.config.vision_config
    unified = "Unified" in type(model).__name__
    side, rows, columns = (own.model_patch_size, 2, 3) if unified else (own.patch_size, 6, 9)
    places = np.stack(np.meshgrid(np.arange(columns), np.arange(rows)), -1).reshape(1, -1, 2)

    def run(pixels: Array) -> Any:
        cells = _cells(pixels, side, 1, 2, 3).reshape(1, rows * columns, -1)
        return model.get_image_features(_tensor(cells), _tensor(places))

    return "vision", (1, rows * side, columns * side, 3), run


def gemma4_audio(model: Any) -> Prepared:
    import torch

    def run(mel: Array) -> Any:
        mask = torch.ones(1, mel.shape[1], dtype=torch.bool)
        return model.model.get_audio_features(_tensor(mel.T)[None], mask)

    return "audio", (128, 69), run


def unified_audio(model: Any) -> Prepared:
    import torch

    def run(frames: Array) -> Any:
        mask = torch.ones(1, frames.shape[1], dtype=torch.bool)
        return model.model.get_audio_features(_tensor(frames.T)[None], mask)

    return "audio", (640, 18), run


def whisper(model: Any) -> Prepared:
    def run(mel: Array) -> Any:
        if hasattr(model, "get_audio_features"):
            return model.get_audio_features(_tensor(mel)[None])
        inner = model.model
        return inner.multi_modal_projector(inner.audio_tower(_tensor(mel)[None]).last_hidden_state)

    return "audio", (model.config.audio_config.num_mel_bins, 3000), run


def qwen3a(model: Any) -> Prepared:
    import torch

    def run(mel: Array) -> Any:
        mask = torch.ones(1, mel.shape[1], dtype=torch.long)
        return model.get_audio_features(_tensor(mel)[None], mask)

    return "audio", (128, 400), run
