"""Facts about encoders of pictures and sound for `localllm show`: tokens, sizes and memory."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np

from localllm.backends import BackendError
from localllm.base.errors import LocalLLMError
from localllm.base.machine.processor import usable_threads
from localllm.cli.flags import typed
from localllm.cli.terminal.formatting import size
from localllm.gguf import GGUFFile
from localllm.models import ModelError, is_mmproj

SIDES = (448, 1024)  # pixels of the squares whose tokens are counted
SECONDS = 30  # of the sound whose tokens are counted
_KINDS: dict[str, Literal["vision", "audio"]] = {"image": "vision", "audio": "audio"}


def beside(file: GGUFFile) -> list[str]:
    """Return the paths of the mmproj files that `run`, `chat` and `serve` try for a model, the best first."""
    from localllm.loading.mmproj import mmproj_beside

    return [] if is_mmproj(file.metadata) else [str(path) for path in mmproj_beside(Path(file.path))]


def encoders(file: GGUFFile) -> dict[str, Any]:
    """Return the facts of each encoder in an mmproj file, by kind ("image", "audio").

    Raises LocalLLMError for a file that cannot be used.
    """
    from localllm.media import EncoderInput, Projector, TextModel

    found: dict[str, Any] = {}
    projector = Projector.of(file, TextModel(0))  # of no particular text model
    for kind in projector.kinds:
        facts: dict[str, Any] = {"projector": projector.picture_type if kind == "image" else projector.sound_type}
        try:
            facts |= _encoder(file, _KINDS[kind])
            if kind == "image":
                pictures = {
                    f"{side}x{side}": projector.picture([np.zeros((side, side, 3), np.uint8)]) for side in SIDES
                }
                parts = pictures
            else:
                parts = {f"{SECONDS} s": projector.sound(np.zeros(SECONDS * projector.rate, np.float32))}
            facts["tokens"] = {
                what: sum(part.tokens for part in each if isinstance(part, EncoderInput))
                for what, each in parts.items()
            }
        except (LocalLLMError, ModelError, BackendError) as error:
            facts["problem"] = typed(error)
        found[kind] = facts
    return found


def _encoder(file: GGUFFile, kind: Literal["vision", "audio"]) -> dict[str, Any]:
    """Return the sizes of an encoder, and the bytes that it needs on the CPU."""
    from localllm.engine.encoder import memory_of
    from localllm.models.encoders import encoder_of

    metadata = file.metadata
    model = encoder_of(metadata, file.tensors, kind)
    needed = memory_of(model, usable_threads())
    layers = {match[1] for name in file.tensors if (match := re.match(rf"{kind[0]}\.blk\.(\d+)\.", name))}
    return {
        "layers": len(layers),
        "width": metadata.get(f"clip.{kind}.embedding_length"),
        "embedding_width": model.width,
        "weights": sum(each.weights for each in needed),
        "scratch": sum(each.scratch + each.cache for each in needed),
    }


def encoder_rows(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the lines about encoders: label and text."""
    if "problem" in facts:
        yield "encoders", facts["problem"]
        return
    for kind, each in facts.items():
        label = {"image": "pictures", "audio": "sound"}[kind]
        if "problem" in each:
            yield label, f"{each['projector']}: {each['problem']}"
            continue
        yield label, f"{each['projector']}, {each['layers']} layers, {each['width']} wide"
        yield "", ", ".join(f"{what}: {tokens} tokens" for what, tokens in each["tokens"].items())
        yield "", f"{size(each['weights'])} of weights, {size(each['scratch'])} for the largest input"
