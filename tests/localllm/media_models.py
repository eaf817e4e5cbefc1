"""Small models with encoders: an mmproj file of tests/models/encoders and the text model of `support`."""

from __future__ import annotations

import base64
import io
import wave
from pathlib import Path
from typing import Any

import numpy as np

from localllm.gguf import NewTensor, open_gguf, write_gguf
from tests.localllm.support import CHATML, HEADS, WIDTH, write_model
from tests.models.encoders import small

MARKS = ("<start_of_image>", "<end_of_image>")  # gemma3's
# As Qwen's templates do: lists of parts become the model's own tokens.
LISTS = (
    "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\n' }}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}<start_of_image>PAD<end_of_image>{% else %}{{ p.text }}"
    "{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_mmproj(path: Path, case: str, **changed: Any) -> Path:
    """Write the encoders of a case of `small`."""
    metadata, tensors = small.loaded(case)
    given = {
        "general.architecture": "clip",
        **{key: np.array(value) if isinstance(value, list) else value for key, value in metadata.items()},
        **{f"clip.{key}": value for key, value in changed.items()},
    }
    found = [NewTensor(each.name, each.format, each.shape, each.rows) for each in tensors.values()]
    write_gguf(path, given, found)
    return path


def write_pair(folder: Path, case: str = "gemma3", template: str = CHATML, name: str = "tiny") -> Path:
    """Write a text model and the encoders of a case to one folder. Return the path of the text model."""
    write_mmproj(folder / f"mmproj-{name}-F16.gguf", case)
    return write_model(folder / f"{name}-Q8_0.gguf", template=template, context=1024)


def write_absolute(folder: Path, case: str) -> Path:
    """Write a model whose pictures depend on their place in the prompt: of hunyuanvl, the positions of rows and
    columns; of deepseek4v, the pads in front.
    """
    path = write_pair(folder, case)
    if case != "hunyuanvl":
        return path
    with open_gguf(path) as file:
        metadata = {key.replace("llama.", "hunyuan_vl."): value for key, value in file.metadata.items()}
        found = [(each, each.read(0, each.rows).copy()) for each in file.tensors.values()]
    metadata |= {"general.architecture": "hunyuan_vl", "hunyuan_vl.rope.dimension_sections": np.full(4, 4, np.int32)}
    norm = np.linspace(0.5, 1.5, WIDTH // HEADS, dtype=np.float32)
    tensors = [NewTensor(each.name, each.format, each.shape, data) for each, data in found]
    tensors += [NewTensor(f"blk.0.attn_{part}_norm.weight", "F32", norm.shape, norm.tobytes()) for part in "qk"]
    write_gguf(path, metadata, tensors, overwrite=True)
    return path


def png(width: int = 40, height: int = 24, seed: int = 0) -> bytes:
    """Return a picture as PNG."""
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    data = io.BytesIO()
    Image.fromarray(pixels).save(data, "PNG")
    return data.getvalue()


def wav(samples: int = 8000, rate: int = 16000) -> bytes:
    """Return a sound as WAV."""
    data = io.BytesIO()
    with wave.open(data, "wb") as file:
        file.setparams((1, 2, rate, 0, "NONE", ""))
        file.writeframes((np.sin(np.arange(samples) / 9) * 9000).astype("<i2").tobytes())
    return data.getvalue()


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def data_url(data: bytes) -> str:
    return f"data:image/png;base64,{encoded(data)}"
