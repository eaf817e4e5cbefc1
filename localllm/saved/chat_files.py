"""Saves the cached prefix of a text to a file and restores it, between two steps of the core."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from localllm.engine import CacheSequence
from localllm.loading.predictor import Predictor
from localllm.saved.attachments import NOTHING, Attachments
from localllm.saved.prompt_cache import Kept, restore, save


def take_up(kept: Kept, model: Predictor) -> list[int]:
    """Restore a file into the model's cache; return its tokens."""

    def restored() -> tuple[CacheSequence, int]:
        sequence = model.engine.add()
        restore(kept, model, sequence)
        return sequence, 0

    slots = model.stepper.core.running.slots
    return model.stepper.run(lambda: slots.take_up(restored)[0])


def keep_in_file(
    path: Path,
    model: Predictor,
    tokens: Sequence[int],
    messages: Sequence[dict[str, str]],
    overwrite: bool,
    attachments: Attachments = NOTHING,
) -> tuple[list[int], int]:
    """Write the cached prefix of `tokens` to a file; return the prefix and the file size. Raises
    the errors of `save`."""
    slots = model.stepper.core.running.slots

    def write(sequence: CacheSequence) -> tuple[list[int], int]:
        size = save(path, model, sequence, messages, overwrite, attachments=attachments)
        return list(sequence.tokens), size

    return model.stepper.run(lambda: slots.with_cached(tokens, write))
