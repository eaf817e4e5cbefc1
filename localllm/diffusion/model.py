"""Runs a diffusion model: the forward pass over a whole canvas, and the text of the answer."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from localllm.base.errors import LocalLLMError
from localllm.base.notices import Notice, Setting
from localllm.diffusion.canvas import Canvas, Diffusion, fill
from localllm.diffusion.reading import masking_of
from localllm.engine import ContextFull, Engine, SequenceRows
from localllm.options import DiffusionOptions, SamplingOptions

if TYPE_CHECKING:
    from localllm.loading.loaded_model import LoadedModel


def diffuse(
    model: LoadedModel, ids: Sequence[int], options: DiffusionOptions, sampling: SamplingOptions, max_tokens: int | None
) -> Iterator[Canvas]:
    """Yield the canvas after every step that unmasks tokens. Raise LocalLLMError early for unsupported requests."""
    if not model.diffuses:
        raise LocalLLMError(
            f"{model.file.path}: not a diffusion model, so it cannot fill in a text; use model.generate"
        )
    engine, config = model.engine, model.config
    assert config is not None, "a bound model has a shape"
    masking = masking_of(model.file.metadata, config.vocabulary)
    left = model.context - len(ids)
    if left < (max_tokens or 1):
        asked = f"{len(ids)} tokens of prompt and {max_tokens or 1} of answer"
        problem = f"the canvas holds {model.context} tokens, too few for {asked}; make it larger ("
        raise ContextFull(Notice(problem, Setting("ctx_size"), ")"))
    length = left if max_tokens is None else max_tokens
    if not length:
        raise LocalLLMError("an answer of 0 tokens leaves nothing to fill in; give at least 1")
    seed = sampling.seed if sampling.seed >= 0 else secrets.randbits(32)
    chosen = Diffusion.of(options, masking)
    return fill(Forward(engine), ids, length, masking, chosen, sampling, seed)


class Forward:
    """The forward pass over a canvas. Attention is bidirectional, so nothing is cached between passes."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __call__(self, tokens: Sequence[int], wanted: Sequence[int]) -> NDArray[np.float32]:
        """Return logits, float32 (wanted, vocabulary)."""
        sequence = self._engine.add()
        with self._engine.alone:
            try:
                [result] = self._engine.step([SequenceRows(sequence, tokens, tuple(wanted))])
                return result.logits.copy()
            finally:
                self._engine.release(sequence)


def answer_ids(model: LoadedModel, canvas: Canvas, ignore_eos: bool = False) -> list[int]:
    """Return the unmasked answer tokens before the first end-of-generation token."""
    found: list[int] = []
    for token in canvas.answer:
        if token in model.tokenizer.eog and not ignore_eos:
            break
        if token != canvas.mask:
            found.append(token)
    return found


def answer_text(model: LoadedModel, canvas: Canvas, ignore_eos: bool = False) -> str:
    return model.detokenize(answer_ids(model, canvas, ignore_eos))
