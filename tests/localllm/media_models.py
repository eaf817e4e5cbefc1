"""Small models with encoders: an mmproj file of tests/models/encoders and the text model of `support`."""

from __future__ import annotations

import base64
import io
import wave
from pathlib import Path
from typing import Any

import numpy as np

from localllm.gguf import NewTensor, write_gguf
from tests.localllm.support import CHATML, write_model
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
