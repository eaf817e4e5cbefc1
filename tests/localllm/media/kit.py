"""The reference kit `../shared/data/multimodal`: its cases as projectors, its inputs, and the stored layouts."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.gguf import open_gguf
from localllm.media import Projector, TextModel
from localllm.media.encoder_input import EncoderInput
from localllm.tokenizer import Tokenizer
from tests.localllm.support import REPOSITORY

KIT = REPOSITORY.parent / "shared" / "data" / "multimodal"
CASES = sorted(path.stem for path in KIT.glob("*.npz") if not path.stem.startswith("text-"))
_LIMITS = {"qwen2.5vl-limits": (24, 60)}  # image_min_tokens, image_max_tokens
_MROPE = ("qwen2vl", "qwen3vl", "qwen3vlmoe", "qwen35")


@cache
def maker() -> Any:
    """Return the module make_mmproj."""
    spec = importlib.util.spec_from_file_location("make_mmproj", KIT / "make_mmproj.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _metadata(stored: Any, folder: Path, name: str) -> dict[str, Any]:
    """Return the metadata of a stored header, read from a file whose tensors are zeros."""
    path = folder / f"{name}.gguf"
    header = stored["header"].tobytes()
    _, tensors, _, end = maker().parse_header(header)
    with path.open("wb") as file:
        file.write(header)
        file.truncate(end + max(at + 4 * int(np.prod(shape)) + 32 for _, shape, _, at in tensors))
    with open_gguf(path) as opened:
        return dict(opened.metadata)


class Case:
    """A case of the kit."""

    def __init__(self, name: str, folder: Path) -> None:
        self.stored = np.load(KIT / f"{name}.npz")
        self.metadata = _metadata(self.stored, folder, name)
        shapes = {tensor[0]: tensor[1] for tensor in maker().parse_header(self.stored["header"].tobytes())[1]}
        text, self.tokenizer = _text(str(self.stored["text_model"]), folder)

        def weights(tensor: str) -> NDArray[np.float32] | None:
            if tensor not in shapes:
                return None
            values: NDArray[np.float64] = maker().clip_values(tensor, shapes[tensor], 1)
            return values.astype(np.float32)

        self.projector = Projector(self.metadata, text, weights, *_LIMITS.get(name, (None, None)))

    def inputs(self) -> Iterator[tuple[str, str, Any]]:
        yield from maker().inputs(self.stored)

    def chunks(self, kind: str, data: Any) -> list[list[int] | EncoderInput]:
        """Return the chunks of the kit's prompt: token ids, or pieces."""
        media = data if kind == "two" else [data]
        chunks: list[list[int] | EncoderInput] = []
        index = 0

        def add(part: str | EncoderInput) -> None:
            if isinstance(part, EncoderInput):
                chunks.append(part)
                return
            ids = self.tokenizer.encode(part, add_special=False, parse_special=True)
            if chunks and isinstance(chunks[-1], list):
                chunks[-1] += ids
            else:
                chunks.append(ids)

        add("a ")
        for medium in media:
            before = sum(len(chunk) if isinstance(chunk, list) else chunk.tokens for chunk in chunks)
            if kind == "audio":
                parts = self.projector.sound(medium)
            else:
                parts = self.projector.picture(medium if kind == "pair" else [medium], index, before)
                index += 1
            for part in parts:
                add(part)
        add(" b")
        assert isinstance(chunks[0], list)
        assert self.tokenizer.bos is not None
        chunks[0].insert(0, self.tokenizer.bos)
        return chunks


@cache
def _text(name: str, folder: Path) -> tuple[TextModel, Tokenizer]:
    metadata = _metadata(np.load(KIT / f"{name}.npz"), folder, name)
    arch = metadata["general.architecture"]
    tokens = frozenset(metadata["tokenizer.ggml.tokens"])
    text = TextModel(metadata[f"{arch}.embedding_length"], arch in _MROPE, tokens)
    return text, Tokenizer.from_metadata(metadata)
