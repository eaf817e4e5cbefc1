"""The tests of `localllm bench --image WxH`: preprocessing, encoding, the first token, and a second turn.

Pictures are noise, a new one each run, so that no run finds a picture of another one in the cache. The second turn asks
about the same picture, whose tokens are in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter_ns
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from localllm.base.errors import LocalLLMError
from localllm.base.notices import Notice, Setting
from localllm.engine import Encoding, MediaSpan
from localllm.gguf import open_gguf
from localllm.loading.media_parts import Medium
from localllm.loading.mmproj import open_multimodal
from localllm.loading.multimodal import MediaChunk, Multimodal
from localllm.loading.resolve import resolve
from localllm.model import Model, refuse_other_kinds
from localllm.options import LoadOptions
from localllm.tokenizer import Tokenizer, has_tokenizer

BEFORE, ASKED = 8, 32  # tokens of text before the picture, and after it in each turn

Size = tuple[int, int]  # width and height in pixels


@dataclass(frozen=True, slots=True)
class PictureRun:
    """One run: nanoseconds, and the tokens of the first prompt and of the picture in it.

    The first token includes preprocessing and encoding. The second turn is measured from the picture to its first
    token, too.
    """

    preprocess: int
    encode: int
    first: int
    second: int
    prompt: int
    tokens: int


def needed_context(name: str, options: LoadOptions, sizes: Sequence[Size]) -> int:
    """Return the cache size in tokens that the longest test needs.

    Raises LocalLLMError for a model without an encoder of pictures, and for pictures that it cannot read.
    """
    with open_gguf(resolve(name)) as file:
        refuse_other_kinds(file)
        tokenizer = Tokenizer.from_metadata(file.metadata, options.force) if has_tokenizer(file.metadata) else None
        encoders = open_multimodal(file, tokenizer, options)
        if encoders is None:
            raise _no_encoder(name)
        with encoders:
            _check_reads(name, encoders)
            found = max(_tokens(_chunks(encoders, _picture(0, size), [], [])) for size in sizes)
    return found + BEFORE + 2 * ASKED + 2 + 64  # an answer token each, and the texts around the picture


def measure_picture(model: Model, size: Size, repetitions: int, warm_up: bool) -> list[PictureRun]:
    """Time a conversation of two turns about a picture, in several runs."""
    runs = [_run(model, size, number) for number in range(-1 if warm_up else 0, repetitions)]
    return runs[warm_up:]


def _run(model: Model, size: Size, number: int) -> PictureRun:
    assert model.config is not None
    random = np.random.RandomState(number + 1)
    before, asked, more = (
        random.randint(0, model.config.vocabulary, count).tolist() for count in (BEFORE, ASKED, ASKED)
    )
    pixels, encoders = _picture(number, size), model.encoders
    began = perf_counter_ns()
    chunks = _chunks(encoders, pixels, before, asked, model)
    prepared = perf_counter_ns()
    embeddings = [chunk.embeddings for chunk in chunks]
    encoded = perf_counter_ns()
    prompt = [each for chunk, own in zip(chunks, embeddings, strict=True) for each in _with(chunk, own)]
    token = _first_token(model, prompt)
    answered = perf_counter_ns()
    again = _chunks(encoders, pixels, before, [*asked, token, *more], model)
    _first_token(model, [each for chunk in again for each in chunk.prompt])
    ended = perf_counter_ns()
    tokens = sum(chunk.count for chunk in chunks if chunk.piece is not None)
    return PictureRun(prepared - began, encoded - prepared, answered - began, ended - answered, _tokens(chunks), tokens)


def _first_token(model: Model, prompt: Sequence[int | MediaSpan]) -> int:
    with model.generate(prompt, temperature=0, max_tokens=1, ignore_eos=True) as reply:
        tokens = [piece.token for piece in reply if piece.token is not None]
    return tokens[0]


class _Ready(NamedTuple):
    """Embeddings that were encoded before."""

    embeddings: NDArray[np.float32]

    def advance(self, seconds: float = 0.0) -> bool:
        return True


def _with(chunk: MediaChunk, embeddings: NDArray[np.float32] | None) -> Sequence[int | MediaSpan]:
    """Return a chunk of a prompt whose embeddings are known."""
    if embeddings is None:
        return chunk.prompt
    ready: Encoding = _Ready(embeddings)
    return [replace(span, encode=lambda: ready) for span in chunk.prompt if isinstance(span, MediaSpan)]


def _chunks(
    encoders: Multimodal, pixels: NDArray[np.uint8], before: list[int], after: list[int], model: Model | None = None
) -> list[MediaChunk]:
    """Return a prompt: text, a picture, text. Without a model, the texts around the picture are left out."""
    marks = (lambda text: []) if model is None else model.media_marks
    sections = (" ", Medium("image", pixels), "")
    return encoders.chunks(sections, lambda text, first: list(before if text else after), marks)


def _tokens(chunks: Sequence[MediaChunk]) -> int:
    return sum(chunk.count for chunk in chunks)


def _picture(number: int, size: Size) -> NDArray[np.uint8]:
    """Return noise (height, width, 3)."""
    width, height = size
    return np.random.default_rng(number + 1).integers(0, 256, (height, width, 3), np.uint8)


def _check_reads(name: str, encoders: Multimodal) -> None:
    if "image" not in encoders.kinds:
        raise LocalLLMError(f"{name}: its encoders read sound, not pictures; leave out --image")


def _no_encoder(name: str) -> LocalLLMError:
    problem = f"{name}: --image needs the encoder of pictures; give the mmproj file of this model with "
    return LocalLLMError(Notice(problem, Setting("mmproj")))
